"""Kernels compile for GPUs that are not at hand, fit them, and spill nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from mstar_tp.kernels.triton.compile import (
    ARCHITECTURES,
    Compiled,
    cases,
    compile_case,
)

WIDEST = (
    ("bfloat16", "lora_shrink decode packed 16"),
    ("bfloat16", "lora_expand prefill rank 32"),
    ("bfloat16", "lora_fused decode rank 32"),
    ("float32", "lora_fused decode rank 16"),
    ("bfloat16", "lora_embed prefill rank 32"),
    ("float32", "lora_head_rows prefill"),
    ("bfloat16", "attend decode head 128"),
    ("bfloat16", "attend prefill head 80"),
    ("float32", "attend prefill head 64"),
    ("float32", "kv_write"),
)
"""Those nearest to their limits; ``scripts/compile_kernels.py`` compiles all."""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_fit_and_spill_nothing(
    arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = [
        compile_case(case, dtype, arch)
        for dtype in ("bfloat16", "float32")
        for case in cases(dtype)
        if (dtype, case.name) in WIDEST
    ]
    assert len(found) == len(WIDEST)
    for one in found:
        print(one)
        assert one.problem is None
        assert one.registers <= 255


def test_a_spill_or_too_much_shared_memory_is_a_problem() -> None:
    fits = Compiled("k", "float16", 80, 64, 1024, 0)
    assert fits.problem is None
    assert "spills 8 bytes" in str(fits._replace(spilled_bytes=8).problem)
    assert "needs 999999 bytes" in str(fits._replace(shared_bytes=999999).problem)
