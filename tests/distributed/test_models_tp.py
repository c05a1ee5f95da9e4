"""Promise: two and four real ranks say what one rank says, and hold bit-equal hidden states.

Families, replicated key/value heads (two over four ranks), a vocabulary that no rank count divides,
biases that only one rank may add. Float32; the only difference is the order of sums over ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models_tp_rank import run_model
from support.thread_group import ThreadGroups

from mstar_tp.common.errors import ConfigError
from mstar_tp.distributed.comm import SingleGroup
from mstar_tp.models.config.families import load_model_config
from mstar_tp.models.loader import load_model
from mstar_tp.testing.tiny_models import FAMILIES, Family, make_tiny_model

RANK = Path(__file__).with_name("models_tp_rank.py")
MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3-one-kv-head": ("qwen3", {"num_key_value_heads": 1, "attention_bias": True}),
    "gemma3-vocab": ("gemma3", {"vocab_size": 205, "tie_word_embeddings": False}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (family, overrides) in MODELS.items():
        make_tiny_model(folder / name, family, 2, **overrides)
    return folder


@pytest.fixture(scope="module")
def single(folders: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: run_model(path, SingleGroup()) for path in sorted(folders.iterdir())}


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_agree_with_one_rank_on_every_model(
    folders: Path, single: dict[str, dict[str, torch.Tensor]], tmp_path: Path, world_size: int
) -> None:
    """Four real ranks; two as threads, which real ones serve in ``parity/test_serving.py``."""
    if world_size == 4:
        out = tmp_path / "logits.pt"
        _run_ranks(world_size, folders, tmp_path, out)
        results = torch.load(out, weights_only=True)
    else:
        groups = ThreadGroups(world_size)
        results = {
            name: groups.run(lambda group, name=name: run_model(folders / name, group))[0]
            for name in MODELS
        }
    assert set(results) == set(MODELS)
    for name, wanted in single.items():
        for case, logits in wanted.items():
            got = results[name][case]
            assert got.shape == logits.shape, (name, case)
            error = (got - logits).abs().max() / logits.abs().max()
            assert error < 1e-5, (name, case, error)
            assert torch.equal(got.argmax(-1), logits.argmax(-1)), (name, case)


def _run_ranks(world_size: int, folders: Path, tmp_path: Path, out: Path) -> None:
    """Every rank to its end; one that fails ends the others, and its traceback is the failure."""
    logs = [tmp_path / f"rank{rank}.log" for rank in range(world_size)]
    ranks = []
    for rank, log in enumerate(logs):
        arguments = [str(tmp_path / "store"), str(rank), str(world_size), str(folders), str(out)]
        environment = dict(
            os.environ,
            PYTHONHASHSEED=str(rank + 1),
            OMP_NUM_THREADS="1",
            PYTHONPATH=os.pathsep.join(sys.path),
        )
        with log.open("wb") as file:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(RANK), *arguments],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            )
    try:
        codes = [process.wait(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * world_size, "\n".join(log.read_text()[-3000:] for log in logs)


@pytest.mark.parametrize(
    ("world_size", "overrides", "said"),
    [
        (3, {}, "q_proj: 4 blocks do not divide over 3 ranks"),
        (8, {}, "q_proj: 4 blocks cannot be dealt to 8 ranks"),
        (
            2,
            {"num_key_value_heads": 3, "num_attention_heads": 6, "hidden_size": 96},
            "k_proj: 3 blocks do not divide",
        ),
        (4, {"intermediate_size": 90}, "gate_proj: 90 blocks do not divide over 4 ranks"),
    ],
)
def test_what_cannot_be_dealt_to_the_ranks_is_refused_before_any_read(
    tmp_path: Path, world_size: int, overrides: dict[str, Any], said: str
) -> None:
    make_tiny_model(tmp_path, "llama", 2, head_dim=16, **overrides)
    (tmp_path / "model.safetensors").unlink()
    config = load_model_config(tmp_path)
    group = ThreadGroups(world_size)[0]
    with pytest.raises(ConfigError, match=said):
        load_model(tmp_path, config, group, torch.float32, torch.device("cpu"))
