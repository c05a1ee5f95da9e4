"""The rows of a step that a module sees. No torch.

A step names segments (a request's tokens, or an image's patches) and how many tokens each has. Most
modules see every token; some see fewer rows a segment, and a delta must know which.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from mstar_tp.common.errors import ConfigError


class RowKind(Enum):
    """TOKENS: rows of every segment, by its number of tokens. SEGMENTS: one row a segment.
    SAMPLED: the rows that the step lists, those that sample.
    """

    TOKENS = "tokens"
    SEGMENTS = "segments"
    SAMPLED = "sampled"


@dataclass(frozen=True, slots=True)
class RowGrouping:
    """The rows a target's module sees, in the step's order.

    Of TOKENS a segment gives one row for each ``per`` tokens (a patch merger), its first ``skip``
    left out (a class token, which a patch convolution never sees).
    """

    kind: RowKind = RowKind.TOKENS
    per: int = 1
    skip: int = 0

    TOKENS: ClassVar[RowGrouping]
    SEGMENTS: ClassVar[RowGrouping]
    SAMPLED: ClassVar[RowGrouping]

    def __post_init__(self) -> None:
        if self.per < 1 or self.skip < 0 or (self.kind is not RowKind.TOKENS and self.thins):
            raise ConfigError(
                f"a row grouping of {self.kind.value} has per = {self.per} and skip = {self.skip}: "
                "wanted at least 1 and 0, and other values for tokens alone"
            )

    @property
    def thins(self) -> bool:
        return self.per != 1 or self.skip != 0

    def rows_of(self, num_tokens: int) -> int:
        """The number of rows that a segment of ``num_tokens`` tokens gives; not for SAMPLED.

        Raises:
            ConfigError: its tokens do not come to whole rows.
        """
        assert self.kind is not RowKind.SAMPLED, "the step lists the rows that sample"
        if self.kind is RowKind.SEGMENTS:
            return 1
        left = num_tokens - self.skip
        if left < 0 or left % self.per:
            raise ConfigError(
                f"a segment of {num_tokens} tokens does not come to rows of {self.per} tokens "
                f"after its first {self.skip}"
            )
        return left // self.per


RowGrouping.TOKENS = RowGrouping()
RowGrouping.SEGMENTS = RowGrouping(RowKind.SEGMENTS)
RowGrouping.SAMPLED = RowGrouping(RowKind.SAMPLED)
