"""The spec of a model that nobody serves, from config.json alone."""

from __future__ import annotations

from pathlib import Path

import torch

from mstar_tp.config import LoraConfig
from mstar_tp.distributed.comm import SingleGroup
from mstar_tp.engine.build_lora import lora_spec
from mstar_tp.lora.format.peft_values import MAX_RANK
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.models.config.families import load_model_config
from mstar_tp.models.loader import plan_model


def offline_spec(folder: str | Path) -> LoraSpec:
    """Return the modules of the model in ``folder`` as serving describes them, of all stages.

    Serving's limits are left out: nothing is held in slots. Reads config.json and builds no
    weights.

    Raises:
        CheckpointError: the folder holds no config, or one of a model that is not served.
    """
    config = load_model_config(folder)
    model = plan_model(config, SingleGroup(), torch.float32, max_position=1)
    limits = LoraConfig(max_loras=1, max_lora_rank=MAX_RANK, max_lora_saved_rows=config.vocab_size)
    return lora_spec(limits, model, torch.float32)
