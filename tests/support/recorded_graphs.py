"""Graphs without a GPU: what a capture records, run again operation by operation.

A replay runs no Python of the engine: each torch operation, kernel call and collective that the
capture saw runs again on the very tensors and numbers of then, as a captured graph does. So
whatever a real graph would get wrong goes wrong here too: a tensor that is made anew each step is
read as it was, a number that varies by step stands still. What a real capture would refuse, or a
replay read from memory that is no longer its own, is refused by name: a value handed to the host,
a tensor made from the host's values, one that is neither the recording's nor stood before the first
capture. Before each replay the recording's own tensors are filled with NaN, so that nothing passes
for being left over.

``RecordedGroup`` takes a rank's collectives into its recordings. One capture a thread.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mstar_tp.distributed.comm import AgreeOp, CommGroup
from mstar_tp.engine.graphs.device import Graph
from mstar_tp.kernels.cpu import cpu_kernels

_aten = torch.ops.aten
_TO_HOST = {
    _aten._local_scalar_dense.default,
    _aten.item.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.bincount.default,
    _aten.repeat_interleave.Tensor,
    _aten.repeat_interleave.self_Tensor,
}
_INDEXED = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
_FROM_HOST = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_UNWRITTEN = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.empty_strided.default,
}

_here = threading.local()


def _recording() -> _Recording | None:
    return getattr(_here, "recording", None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _storage(tensor: torch.Tensor) -> Any:
    """None for a packed weight, which has none."""
    return None if tensor.is_mkldnn else tensor.untyped_storage()


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what runs on this thread while it is entered."""

    def __init__(self, standing: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._standing = standing
        """Storages that stood before any capture."""
        self._kept: list[Any] = []
        self._made: dict[int, torch.Tensor] = {}
        self.calls: list[Callable[[], None]] = []

    @property
    def made(self) -> list[torch.Tensor]:
        return list(self._made.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (func in _TO_HOST and kwargs.get("output_size") is None) or (
            func in _INDEXED and _has_mask(args[1])
        ):
            raise RuntimeError(f"a graph cannot hand a value to the host: {func}")
        if func in _FROM_HOST:
            raise RuntimeError(f"a graph cannot make a tensor from the host's values: {func}")
        inputs = list(_tensors((args, kwargs)))
        for tensor in inputs:
            self._check(tensor, func)
        result = func(*args, **kwargs)
        shared = {storage._cdata for t in inputs if (storage := _storage(t)) is not None}
        fresh = [t for t in _tensors(result) if _storage(t)._cdata not in shared]
        for tensor in fresh:
            self.keep(tensor)
        writes = any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in func._schema.arguments
        )
        self._kept.append((args, kwargs, result))
        if writes or (fresh and func not in _UNWRITTEN):
            self.calls.append(lambda: _again(func, args, kwargs, result, fresh))
        return result

    def keep(self, tensor: torch.Tensor) -> None:
        """A tensor that the recording made."""
        self._made[_storage(tensor)._cdata] = tensor

    def _check(self, tensor: torch.Tensor, what: Any) -> None:
        storage = _storage(tensor)
        if storage is None or storage.nbytes() == 0:
            return
        if storage._cdata not in self._made and storage._cdata not in self._standing:
            raise RuntimeError(
                f"a graph reads a tensor {list(tensor.shape)} that does not stand still: {what}"
            )


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype is torch.bool for index in indices)


def _again(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    fresh: list[torch.Tensor],
) -> None:
    """The same operation on the same tensors, its results where they were."""
    now = func(*args, **kwargs)
    for old, new in zip(_tensors(result), _tensors(now), strict=True):
        if any(old is tensor for tensor in fresh):
            old.copy_(new)


class _Replayed:
    def __init__(self, calls: list[Callable[[], None]], made: list[torch.Tensor]) -> None:
        self._calls = calls
        self._made = made

    @torch.inference_mode()
    def replay(self) -> None:
        for tensor in self._made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        for call in self._calls:
            call()


class RecordedGraphs:
    """One rank's captures."""

    def __init__(self) -> None:
        self._standing: dict[int, StorageWeakRef] | None = None
        for dtype in (torch.float32, torch.bfloat16):
            _hook_kernels(dtype)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        if self._standing is None:
            # A weak reference keeps a storage's number from being given to another.
            self._standing = {}
            for found in gc.get_objects():
                if issubclass(type(found), torch.Tensor) and not found.is_mkldnn:
                    storage = found.untyped_storage()
                    self._standing[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        _here.made_before = set()
        yield

    def begin(self) -> None:
        assert _recording() is None and self._standing is not None
        _here.recording = _Recording({*self._standing, *_here.made_before})
        _here.recording.__enter__()

    def end(self) -> Graph:
        recording = self._leave()
        assert recording is not None, "nothing is being captured"
        # What a piece made, the next ones may read.
        _here.made_before |= recording._made.keys()
        return _Replayed(recording.calls, recording.made)

    def abandon(self) -> None:
        self._leave()

    @staticmethod
    def _leave() -> _Recording | None:
        recording = _recording()
        if recording is not None:
            recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            _here.recording = None
        return recording


class RecordedGroup:
    """A rank's group, whose collectives go into the recording under way and run at each replay."""

    def __init__(self, group: CommGroup) -> None:
        self._group = group
        self.rank = group.rank
        self.world_size = group.world_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._in_place(x, self._group.all_reduce)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._in_place(x, self._group.broadcast)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        recording = _recording()
        if recording is None or self.world_size == 1:
            return self._group.all_gather(x, dim)
        out = self._made(recording, x, dim)
        recording.calls.append(lambda: _fill(out, self._group.all_gather(x, dim)))
        return out

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        recording = _recording()
        if recording is None or self.world_size == 1:
            return self._group.gather(x, dim)
        out = self._made(recording, x, dim)
        recording.calls.append(lambda: _fill(out, self._group.gather(x, dim)))
        return out if self.rank == 0 else None

    def agree(self, values: Sequence[int], op: AgreeOp = AgreeOp.MIN) -> list[int]:
        assert _recording() is None, "no graph holds an agreement"
        return self._group.agree(values, op)

    def _in_place(
        self, x: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        recording = _recording()
        if recording is None or self.world_size == 1:
            return call(x)
        recording._kept.append(x)
        recording.calls.append(lambda: _fill(x, call(x)))
        return x

    def _made(self, recording: _Recording, x: torch.Tensor, dim: int) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            out = torch.cat([x] * self.world_size, dim=dim)
        recording.keep(out)
        recording._kept.append((x, out))
        return out


def _fill(out: torch.Tensor, result: torch.Tensor | None) -> None:
    if result is not None and result is not out:
        out.copy_(result)


def _hook_kernels(dtype: torch.dtype) -> None:
    """Let the CPU kernels of ``dtype`` be recorded, with the addresses of their calls."""
    kernels = cpu_kernels(torch.device("cpu"), dtype)
    if kernels is None:
        return
    for name, call in kernels._call.items():
        if not isinstance(call, _HookedKernel):
            kernels._call[name] = _HookedKernel(call)


class _HookedKernel:
    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        recording = _recording()
        if recording is not None:
            recording.calls.append(lambda: self._call(*args))
        self._call(*args)
