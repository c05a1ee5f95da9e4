"""The operators of routed experts: right on the CPU, within torch's rules, and as a whole model
with adapters on its experts takes them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.device_checks import answers
from support.expert_cases import check_experts

from mstar_tp.layers import moe
from mstar_tp.lora.device import expert_ops
from mstar_tp.lora.device.expert_ops import grouped
from mstar_tp.testing.tiny_models import MOE_TARGETS, make_adapter, make_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cpu_way_equals_float64(dtype: torch.dtype) -> None:
    for tokens, only in ((1, None), (9, 2), (120, None)):
        ranks = (5, 0, 8)
        check_experts(CPU, dtype, tokens=tokens, experts=5, choices=2, ranks=ranks, only=only)


def test_operators_pass_torchs_own_checks() -> None:
    chosen = torch.tensor([[0, 2], [2, 1], [1, 2]])
    pairs = grouped(chosen, 3)
    slots, tables = torch.tensor([1, 0, 2]), (pairs.order, pairs.tiles)
    x, weight = torch.ones(3, 4), torch.ones(3, 6, 4)
    everything = {
        "group": (chosen, 3, pairs.block_rows),
        "group_slots": (slots, 2, pairs.order, pairs.indptr, 2, pairs.block_rows),
        "linear": (x, weight, *tables, 2, pairs.block_rows),
        "combine": (torch.ones(6, 4), torch.ones(3, 2)),
    }
    for name, arguments in everything.items():
        operator = getattr(torch.ops.mstar_moe, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_model_says_the_same_on_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    make_tiny_model(tmp_path / "model", "qwen3_moe", seed=5)
    make_adapter(tmp_path / "one", tmp_path / "model", rank=4, targets=MOE_TARGETS, seed=1)
    wanted = answers(tmp_path, CPU)
    calls: list[int] = []

    def counted(*arguments: object) -> object:
        calls.append(1)
        return grouped(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(moe, "are_taken", lambda device: True)
    monkeypatch.setattr(expert_ops, "are_taken", lambda device: True)
    monkeypatch.setattr(moe, "grouped", counted)
    got = answers(tmp_path, CPU)
    assert calls
    for (token, logits), (wanted_token, wanted_logits) in zip(got, wanted, strict=True):
        assert token == wanted_token
        torch.testing.assert_close(logits, wanted_logits, rtol=0, atol=1e-4)
