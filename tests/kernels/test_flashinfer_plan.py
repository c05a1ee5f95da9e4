"""Steps are laid out as FlashInfer's documentation asks, held against a small fake of it that
checks what it is given and computes the result from that in float64. The package itself needs a
GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.attention_cases import AttentionCase

from mstar_tp.layers.attention.attention import AttentionShape
from mstar_tp.layers.attention.flashinfer_plan import FlashInferPlanner

CPU = torch.device("cpu")


class Wrapper:
    """What both of FlashInfer's wrappers over paged keys have in common."""

    made: list[Wrapper]

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **options: bool) -> None:
        assert workspace.dtype is torch.uint8 and kv_layout == "NHD"
        self.options = options
        self.plans = 0
        Wrapper.made.append(self)

    def _plan(
        self,
        starts: torch.Tensor,
        page_starts: torch.Tensor,
        pages: torch.Tensor,
        last_lengths: torch.Tensor,
        sizes: tuple[int, int, int, int],
        *,
        window_left: int,
        logits_soft_cap: float,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for table in (starts, page_starts, pages, last_lengths):
            assert table.dtype is torch.int32 and table.dim() == 1
        assert len(starts) == len(page_starts) == len(last_lengths) + 1
        assert page_starts[-1] == len(pages)
        page_size = sizes[3]
        assert ((last_lengths >= 1) & (last_lengths <= page_size)).all()
        assert q_data_type is kv_data_type
        self.plans += 1
        self.sizes, self.dtype = sizes, q_data_type
        self.window, self.cap, self.scale = window_left, logits_soft_cap, sm_scale
        self.rows = [
            (
                slice(int(starts[row]), int(starts[row + 1])),
                pages[int(page_starts[row]) : int(page_starts[row + 1])].long(),
                int(page_starts[row + 1] - page_starts[row] - 1) * page_size + int(last),
            )
            for row, last in enumerate(last_lengths)
        ]

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads, kv_heads, dim, page_size = self.sizes
        assert q.shape[1:] == (heads, dim) and q.is_contiguous() and q.dtype is self.dtype
        assert all(x.shape[1:] == (page_size, kv_heads, dim) for x in cache)
        out = torch.empty(q.shape, dtype=torch.float64)
        for tokens, pages, length in self.rows:
            for token in range(tokens.start, tokens.stop):
                last = length - (tokens.stop - token)
                first = 0 if self.window < 0 else max(0, last - self.window)
                k, v = (
                    x[pages].flatten(0, 1)[first : last + 1].double() for x in cache
                )  # [L, K, D]
                for head in range(heads):
                    at = head // (heads // kv_heads)
                    scores = k[:, at] @ q[token, head].double() * self.scale
                    if self.cap:
                        scores = self.cap * torch.tanh(scores / self.cap)
                    out[token, head] = scores.softmax(0) @ v[:, at]
        return out.to(q.dtype)


class Decode(Wrapper):
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **kept: Any,
    ) -> None:
        starts = torch.arange(len(indptr), dtype=torch.int32)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(starts, indptr, indices, last_page_len, sizes, **kept)


class Prefill(Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        **kept: Any,
    ) -> None:
        assert causal, "its default lets every query see every key"
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan(qo_indptr, *pages, (num_qo_heads, num_kv_heads, head_dim_qk, page_size), **kept)


LIBRARY = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill
)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_steps_of_every_kind_equal_ours(window: int | None, softcap: float | None) -> None:
    shape = AttentionShape(6, 2, 64, 0.2, window, softcap)
    case = AttentionCase(shape=shape, dtype=torch.float16, device=CPU, page_size=4)
    Wrapper.made = []
    planner = FlashInferPlanner(LIBRARY, shape, case.dtype, case.page_size, CPU)
    for spans in (
        [(0, 1), (3, 1), (12, 1), (4, 1)],
        [(0, 8), (5, 1), (7, 5)],
        [(11, 1)],
        [(0, 4)],
    ):
        rows = case.rows(spans)
        wanted = case.step(rows).check(case.planner().plan(rows))
        plan = planner.plan(rows)
        step = case.step(rows)
        assert plan.num_tokens == step.num_tokens
        got = step.attend(plan)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
        assert torch.equal(step.attend(plan), got), "a step's second layer"
    kinds = [(type(wrapper), wrapper.plans) for wrapper in Wrapper.made]
    assert kinds == [(Decode, 2), (Prefill, 2)], "one plan a step and kind, not one a layer"
    assert Wrapper.made[0].options == {"use_tensor_cores": True}


def test_layers_of_two_windows_have_a_plan_each() -> None:
    shape = AttentionShape(2, 2, 64, 0.2)
    case = AttentionCase(shape=shape, dtype=torch.float16, device=CPU, page_size=4)
    Wrapper.made = []
    planner = FlashInferPlanner(LIBRARY, shape, case.dtype, case.page_size, CPU)
    rows = case.rows([(9, 1), (2, 1)])
    step, plan = case.step(rows), planner.plan(rows)
    for window in (None, 4, None, 4):
        wide = AttentionShape(2, 2, 64, 0.2, window)
        plan.attend(wide, step.q, step.k, step.v, *step.cache)
    assert [wrapper.window for wrapper in Wrapper.made] == [-1, 3]
    assert [wrapper.plans for wrapper in Wrapper.made] == [1, 1]
