"""The problems of something, in the order found: serving stops at the first, checking goes on.

One parser serves both. It wraps each part that can be checked by itself in ``with problems:``. With
a limit of one, the first error goes straight up, as if nothing were wrapped; with more, it is kept,
the rest of that part is skipped, and the next part is checked. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from mstar_tp.common.errors import MstarError

P = ParamSpec("P")
T = TypeVar("T")


class Problems:
    """Errors found so far, at most ``limit``: the one that reaches it is raised. One thread."""

    def __init__(self, limit: int = 1) -> None:
        assert limit >= 1
        self.limit = limit
        self.errors: list[MstarError] = []

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool:
        if not isinstance(exc, MstarError):
            return False
        if not self.errors or self.errors[-1] is not exc:  # an inner part may have passed it up
            self.errors.append(exc)
        return not self.is_full

    @property
    def is_full(self) -> bool:
        return len(self.errors) >= self.limit

    def __len__(self) -> int:
        return len(self.errors)

    def attempt(self, otherwise: T, parse: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``parse(...)``, or ``otherwise`` where that is at fault: a value that nobody may use."""
        with self:
            return parse(*args, **kwargs)
        return otherwise

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(map(str, self.errors))
