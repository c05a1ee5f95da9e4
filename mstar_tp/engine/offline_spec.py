"""What adapters may change in a model that nobody serves: its spec, from config.json alone."""

from __future__ import annotations

from pathlib import Path

import torch

from mstar_tp.distributed.comm import SingleGroup
from mstar_tp.engine.resources.lora.binding import module_lora_spec
from mstar_tp.errors import ConfigError
from mstar_tp.layers.weights import Placement
from mstar_tp.lora.peft_config import MAX_RANK
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.models.config import load_model_config
from mstar_tp.models.registry import MODELS, rules_of


def offline_spec(folder: str | Path) -> LoraSpec:
    """The modules of the model in ``folder`` as serving describes them, without serving's limits:
    nothing is held in slots. Reads config.json and builds no weights.

    Raises:
        CheckpointError: the folder holds no config, or one of a model that is not served.
        ConfigError: the model reads images.
    """
    config = load_model_config(folder)
    if config.vision is not None:
        raise ConfigError(f"{folder}: adapters of a model that reads images are not handled here")
    place = Placement(group=SingleGroup(), dtype=torch.float32, device=torch.device("cpu"))
    spec = module_lora_spec(
        MODELS[config.architecture](config, place, 1),
        rules_of(config.architecture),
        slots=1,
        max_rank=MAX_RANK,
        cpu_capacity=1,
        dtype="float32",
    )
    return spec.apply_yaml_overrides({"max_saved_rows": config.vocab_size})
