"""Pins the GEMM's promise: packed or plain, ``LinearWeight`` is x @ weight.T + bias to its dtype's
precision, the same bits every time, packing drops the plain copy, and our own kernel gives a row
the same bits in any company.
"""

from __future__ import annotations

import pytest
import torch

from mstar_tp.kernels import linear_weight
from mstar_tp.kernels.cpu import cpu_kernels
from mstar_tp.kernels.linear_weight import LinearWeight, can_pack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A result is rounded once to its dtype; sums are kept in float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
SHAPES = [(1, 1), (3, 5), (96, 64), (344, 256), (255, 129)]
ROWS = [1, 2, 8, 33, 64]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_is_product(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    wanted = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        wanted, magnitude = wanted + bias.double(), magnitude + bias.double().abs()
    assert got.dtype == x.dtype
    assert ((got.double() - wanted).abs() <= TOLERANCE[x.dtype] * magnitude + 1e-12).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_in", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ours", [True, False])
def test_a_packed_weight_multiplies_as_float64_does(
    dtype: torch.dtype,
    out_in: tuple[int, int],
    with_bias: bool,
    ours: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not ours:  # as where there is no compiler, or no such arithmetic
        monkeypatch.setattr(linear_weight, "cpu_kernels", lambda device, dtype: None)
    values = random(out_in, dtype, 1)
    bias = random(out_in[:1], dtype, 2) if with_bias else None
    weight = LinearWeight(values.clone())
    weight.pack()
    for rows in ROWS:
        x = random((rows, out_in[1]), dtype, rows)
        got = weight(x, bias)
        assert_is_product(got, x, values, bias)
        assert torch.equal(got, weight(x, bias)), "the same rows gave other bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_in", [(255, 129), (640, 128)], ids=str)
def test_a_rows_bits_depend_on_neither_its_company_nor_the_threads(
    dtype: torch.dtype, out_in: tuple[int, int]
) -> None:
    kernels = cpu_kernels(torch.device("cpu"), dtype)
    if kernels is None or kernels.pack_weight(torch.ones(1, 1, dtype=dtype)) is None:
        pytest.skip("this machine has no GEMM of our own for the dtype")
    weight = LinearWeight(random(out_in, dtype, 1))
    weight.pack()
    x = random((100, out_in[1]), dtype, 2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([weight(x[i : i + 1]) for i in range(len(x))])
        for count in (1, 3):
            torch.set_num_threads(count)
            for rows in (2, 13, 14, 15, 29, 64, 100):
                assert torch.equal(weight(x[:rows]), alone[:rows]), (count, rows)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plain_weight_multiplies_as_float64_does(dtype: torch.dtype) -> None:
    values, x = random((24, 40), dtype, 1), random((7, 40), dtype, 2)
    weight = LinearWeight(values)
    assert not weight.is_packed
    assert_is_product(weight(x), x, values, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_cut_from_a_wider_tensor_are_read_where_they_lie(dtype: torch.dtype) -> None:
    values, wide = random((48, 32), dtype, 1), random((9, 80), dtype, 2)
    weight = LinearWeight(values.clone())
    weight.pack()
    x = wide[:, 16:48]
    assert not x.is_contiguous()
    assert torch.equal(weight(x), weight(x.contiguous()))


def test_packing_twice_is_packing_once_and_the_plain_copy_is_gone() -> None:
    values = random((64, 32), torch.float32, 1)
    weight = LinearWeight(values.clone())
    weight.pack()
    first = weight(values[:4])
    weight.pack()
    assert torch.equal(weight(values[:4]), first)
    if can_pack(values.dtype):
        assert weight.is_packed
        held = [getattr(weight, name) for name in weight.__slots__]
        tensors = [each for each in held if isinstance(each, torch.Tensor)]
        assert len(tensors) == 1
        assert tensors[0].is_mkldnn or tensors[0].dim() == 1, "the plain copy is held"


def test_without_the_private_ops_the_weight_stays_plain_and_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_weight, "_packed_gemm_works", lambda dtype: False)
    monkeypatch.setattr(linear_weight, "cpu_kernels", lambda device, dtype: None)
    values, x = random((24, 40), torch.float32, 1), random((7, 40), torch.float32, 2)
    weight = LinearWeight(values)
    weight.pack()
    assert not weight.is_packed
    assert_is_product(weight(x), x, values, None)


def test_a_packed_op_that_answers_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    linear_weight._packed_gemm_works.cache_clear()
    monkeypatch.setattr(linear_weight, "_packed_linear", lambda x, w, b: torch.zeros(3, 16))
    monkeypatch.setattr(linear_weight, "cpu_kernels", lambda device, dtype: None)
    try:
        assert not can_pack(torch.float32)
    finally:
        linear_weight._packed_gemm_works.cache_clear()


def test_shape_and_dtype_survive_packing() -> None:
    weight = LinearWeight(random((24, 40), torch.bfloat16, 1))
    weight.pack()
    assert weight.shape == (24, 40)
    assert weight.dtype == torch.bfloat16
