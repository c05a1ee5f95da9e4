"""Ahead-of-time compilation of every kernel, for architectures that need not be at hand.

``ptxas`` comes with Triton, so registers, shared memory and spills are known without a GPU. The
launches are those of ``launch`` and ``attention_sizes``, over the shapes that change them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mstar_tp.kernels.triton.attention.compile_attention import attention_cases
from mstar_tp.kernels.triton.case import DTYPES, Case
from mstar_tp.kernels.triton.experts.expert_group import (
    expert_count_kernel,
    expert_place_kernel,
    slot_count_kernel,
    slot_place_kernel,
)
from mstar_tp.kernels.triton.experts.expert_linear import expert_linear_kernel, expert_sum_kernel
from mstar_tp.kernels.triton.launch import (
    BLOCK_COLUMNS,
    DECODE_ROWS,
    EMBED_COLUMNS,
    GROUP_BLOCK,
    PREFILL_ROWS,
    expand_sizes,
    expert_sizes,
    fused_sizes,
    head_rows_sizes,
    shrink_sizes,
)
from mstar_tp.kernels.triton.lora.expand import lora_expand_kernel
from mstar_tp.kernels.triton.lora.fused import lora_fused_kernel
from mstar_tp.kernels.triton.lora.rows import lora_bias_kernel, lora_norm_kernel
from mstar_tp.kernels.triton.lora.shrink import lora_shrink_kernel
from mstar_tp.kernels.triton.lora.vocab_deltas import lora_embed_kernel, lora_head_rows_kernel

ARCHITECTURES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Compute capability -> bytes of shared memory that a block may have."""


class Compiled(NamedTuple):
    """The resources of a launch. ``spilled_bytes``: stores and loads of a thread."""

    name: str
    dtype: str
    arch: int
    registers: int
    shared_bytes: int
    spilled_bytes: int

    @property
    def problem(self) -> str | None:
        """The reason why it should not be launched, or None."""
        if self.spilled_bytes:
            return f"{self.name} in {self.dtype} spills {self.spilled_bytes} bytes on {self.arch}"
        if self.shared_bytes > ARCHITECTURES[self.arch]:
            return f"{self.name} in {self.dtype} needs {self.shared_bytes} bytes on {self.arch}"
        return None


def cases(dtype: str) -> Iterator[Case]:
    """Every launch whose code differs, for weights of ``dtype``."""
    element, size = DTYPES[dtype]
    weights = {name: f"*{element}" for name in "xyab"}
    for rows, place in ((DECODE_ROWS, "decode"), (PREFILL_ROWS, "prefill")):
        for packed in (16, 32, 64):
            shrink = shrink_sizes(packed, rows, size)
            yield Case(
                f"lora_shrink {place} packed {packed}",
                lora_shrink_kernel,
                weights | _TABLES | {"h": "*fp32"},
                {
                    "SLICES": 3,
                    "SPLITS": 8 if rows == DECODE_ROWS else 1,
                    "BLOCK_T": rows,
                    "BLOCK_R": shrink.block_r,
                    "BLOCK_K": shrink.block_k,
                    "WIDEN": False,
                },
                shrink.num_warps,
                shrink.num_stages,
            )
        for rank in (16, 32):
            expand = expand_sizes(rank, rows, size)
            if expand.block_r != rank:
                continue
            yield Case(
                f"lora_expand {place} rank {rank}",
                lora_expand_kernel,
                weights | _TABLES | {"h": "*fp32"},
                {
                    "SPLITS": 8 if rows == DECODE_ROWS else 1,
                    "BLOCK_T": rows,
                    "BLOCK_R": expand.block_r,
                    "BLOCK_O": BLOCK_COLUMNS,
                    "WIDEN": False,
                },
                expand.num_warps,
                expand.num_stages,
            )
    for rank in (16, 32):
        fused = fused_sizes(rank, size)
        yield Case(
            f"lora_fused decode rank {rank}",
            lora_fused_kernel,
            weights | _TABLES,
            {
                "BLOCK_T": DECODE_ROWS,
                "BLOCK_R": fused.block_r,
                "BLOCK_K": fused.block_k,
                "BLOCK_O": BLOCK_COLUMNS,
                "WIDEN": False,
            },
            fused.num_warps,
            fused.num_stages,
        )
    yield from _vocab_cases(element, size)
    yield from _expert_cases(element, size)
    yield from attention_cases(dtype)


def _vocab_cases(element: str, size: int) -> Iterator[Case]:
    """Beside the linears: the two ends of a model, biases, norms."""
    saved = {"saved_ids": "*i64", "saved_rows": f"*{element}", "saved_counts": "*i32"}
    weights = _TABLES | saved | {name: f"*{element}" for name in ("y", "x", "a", "b")}
    for rows, place in ((DECODE_ROWS, "decode"), (PREFILL_ROWS, "prefill")):
        expand = expand_sizes(32, rows, size)
        yield Case(
            f"lora_embed {place} rank 32",
            lora_embed_kernel,
            weights | {"ids": "*i64"},
            {
                "SEARCH": 7,
                "BLOCK_T": rows,
                "BLOCK_R": expand.block_r,
                "BLOCK_O": EMBED_COLUMNS,
                "WIDEN": False,
            },
            expand.num_warps,
            expand.num_stages,
            frozenset({"first_id", "part_size", "stride_ids", "stride_a"}),
        )
        head = head_rows_sizes(64, rows, size)
        yield Case(
            f"lora_head_rows {place}",
            lora_head_rows_kernel,
            weights,
            {"BLOCK_T": rows, "BLOCK_S": head.block_r, "BLOCK_K": head.block_k, "WIDEN": False},
            head.num_warps,
            head.num_stages,
            frozenset({"stride_y", "stride_ids"}),
        )
        yield Case(
            f"lora_bias {place}",
            lora_bias_kernel,
            weights | {"bias": f"*{element}"},
            {"BLOCK_T": rows, "BLOCK_O": BLOCK_COLUMNS},
            4,
            1,
        )
    norm = {"weight": f"*{element}", "replaced": "*i32", "eps": "fp32"}
    for width, warps in ((128, 4), (8192, 8)):
        yield Case(
            f"lora_norm of {width}",
            lora_norm_kernel,
            weights | norm,
            {"UNIT_OFFSET": False, "BLOCK_D": width},
            warps,
            1,
            frozenset({"parts", "stride_replaced"}),
        )


def _expert_cases(element: str, size: int) -> Iterator[Case]:
    """Grouping, GEMMs and sums of routed experts."""
    tables = dict.fromkeys(
        ("counts", "order", "tiles", "indptr", "num_tiles", "pairs", "tokens"), "*i32"
    ) | {"experts": "*i64", "slots": "*i64"}
    numbers = frozenset({"num_pairs", "num_experts", "num_slots", "choices"})
    kernels: tuple[tuple[str, Any, dict[str, object]], ...] = (
        ("expert_count", expert_count_kernel, {}),
        ("expert_place", expert_place_kernel, {"ROWS": DECODE_ROWS, "BLOCK_E": 128}),
        ("slot_count", slot_count_kernel, {"ROWS": DECODE_ROWS, "BLOCK_S": 64}),
        ("slot_place", slot_place_kernel, {"ROWS": 16, "BLOCK_E": 128, "BLOCK_S": 64}),
    )
    for name, kernel, constants in kernels:
        yield Case(name, kernel, tables, constants | {"BLOCK": GROUP_BLOCK}, 4, 3, numbers)
    weights = {name: f"*{element}" for name in ("y", "x", "weight", "out")}
    for rows, place in ((DECODE_ROWS, "decode"), (PREFILL_ROWS, "prefill")):
        sizes = expert_sizes(rows, size)
        yield Case(
            f"expert_linear {place}",
            expert_linear_kernel,
            weights | {"order": "*i32", "tiles": "*i32"},
            {
                "BLOCK_T": rows,
                "BLOCK_O": sizes.block_o,
                "BLOCK_K": sizes.block_k,
                "WIDEN": False,
            },
            sizes.num_warps,
            sizes.num_stages,
            frozenset({"per"}),
        )
    yield Case(
        "expert_sum",
        expert_sum_kernel,
        weights | {"weights": "*fp32"},
        {"BLOCK_D": 1024},
        4,
        3,
        frozenset({"choices"}),
    )


_TABLES = {"order": "*i32", "tiles": "*i32", "blocks": "*i32", "ranks": "*i64"}


def compile_cases(
    architectures: Sequence[int], dtypes: Sequence[str], having: str = ""
) -> Iterator[Compiled]:
    """Compile every launch whose name has ``having`` in it, one after another."""
    for dtype in dtypes:
        for case in cases(dtype):
            if having in case.name:
                for arch in architectures:
                    yield compile_case(case, dtype, arch)


def compile_case(case: Case, dtype: str, arch: int) -> Compiled:
    """Compile one launch.

    Raises:
        RuntimeError: ptxas refused the code.
    """
    signature = {
        name: "constexpr" if name in case.constants else case.types.get(name, "i32")
        for name in case.kernel.arg_names
    }
    # As at run time for the shapes of models: pointers, sizes and strides are multiples of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind not in {"constexpr", "fp32"} and name not in case.odd
    }
    source = ASTSource(case.kernel, signature, constexprs=dict(case.constants), attrs=aligned)
    made = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    registers, spilled = _assembled(made.asm["ptx"], arch)
    return Compiled(case.name, dtype, arch, registers, made.metadata.shared, spilled)


def _assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Registers a thread and bytes spilled, by the ptxas that Triton takes."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        target = f"--gpu-name={sm_arch_from_capability(arch)}"
        command = [get_ptxas(arch).path, "-v", target, str(path), "-o", f"{folder}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    if done.returncode or registers is None:
        raise RuntimeError(f"ptxas refused a kernel for sm_{arch}: {said.strip()}")
    return int(registers[1]), sum(map(int, spills))
