"""The images that a step encodes, and the places of their tokens in it. No torch.

An image is encoded by the step that runs its first token, and kept until its last token has run: a
rule over a row's place in its prompt alone, so every rank encodes the same. A preempted request
starts over, and its images with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mstar_tp.wire.values import ImageInput


class ImagePiece(NamedTuple):
    """Tokens ``tokens`` of image ``image``, which stand in a row from its token ``first`` on."""

    image: int
    tokens: range
    first: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowImages:
    """A row of a step whose tokens are images', in part or whole.

    Its tokens are ``start`` to ``start + num_tokens`` of its request, and the first of them is the
    step's token ``place``. ``begins`` are the images to encode; ``encoded`` keeps what encoding
    gave, by image, while it is needed. Step thread.
    """

    images: Sequence[ImageInput]
    encoded: dict[int, Any]
    begins: tuple[int, ...]
    start: int
    num_tokens: int
    place: int

    def pieces(self) -> Iterator[ImagePiece]:
        """The parts of images that this row runs."""
        end = self.start + self.num_tokens
        for index, image in enumerate(self.images):
            first, stop = max(image.start, self.start), min(image.start + image.num_tokens, end)
            if first < stop:
                tokens = range(first - image.start, stop - image.start)
                yield ImagePiece(index, tokens, first - self.start)

    def is_last(self, piece: ImagePiece) -> bool:
        """Return whether no later step needs the image."""
        return piece.tokens.stop == self.images[piece.image].num_tokens


def beginning(images: Sequence[ImageInput], start: int, end: int) -> tuple[int, ...]:
    """The images whose first token is one of a request's tokens ``start`` to ``end``."""
    return tuple(i for i, image in enumerate(images) if start <= image.start < end)
