"""Pixels for a model's tower from a client's image.

Any thread, bounded memory, no torch.

An image comes as a base64 data URL; nothing is ever fetched. It is turned upright, made RGB and
resized exactly as transformers' image processor does it. What cannot be read so is refused with one
sentence.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mstar_tp.common.errors import RequestError
from mstar_tp.models.config.config_vision import PixelConfig, VisionConfig
from mstar_tp.wire.values import ImageInput

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 32_000_000
"""The most pixels of an image as sent, and on its way to its final size: 100 MB as RGB."""
MAX_REQUEST_BYTES = 32 * 2**20
"""The most bytes of the pixels that one request sends to the ranks."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Pillow reads many more, some by running other programs."""
MAX_SCANS = 500
"""The most scans of a JPEG's data.

Each is a pass over all its pixels, and takes as little as 70 bytes.
"""
_DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""More than 8 bits a channel: what they would become is not defined."""
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)


class ImageReader:
    """Images and their places in prompts, for one model."""

    def __init__(self, config: VisionConfig) -> None:
        self.config = config

    def read(self, urls: Sequence[str], max_tokens: int) -> list[bytes]:
        """Every image's pixels, uint8 [3, side, side].

        Takes a while; ``max_tokens`` is the model's context.

        Raises:
            RequestError: an image is refused, or they are too many.
        """
        pixels, tokens = self.config.pixels, self.config.tokens_per_image
        fitting = min((max_tokens - 1) // tokens, MAX_REQUEST_BYTES // pixels.num_bytes)
        if len(urls) > fitting:
            raise RequestError(
                f"messages: hold {len(urls)} images, and at most {fitting} of {tokens} tokens each "
                "can be read at once: send fewer",
                param="messages",
            )
        return [_read(number, url, pixels) for number, url in enumerate(urls, start=1)]

    def place(
        self, ids: Sequence[int], pixels: Sequence[bytes]
    ) -> tuple[tuple[int, ...], tuple[ImageInput, ...]]:
        """A prompt in which each image has as many tokens as it gives, and where they begin.

        Raises:
            RequestError: the prompt names another number of images.
        """
        image_token, count = self.config.image_token_id, self.config.tokens_per_image
        named = sum(token == image_token for token in ids)
        if named != len(pixels):
            raise RequestError(
                f"messages: name {named} images once they are laid out, and hold {len(pixels)}: "
                "a text must not hold the model's image token, and the chat template must show "
                "every image",
                param="messages",
            )
        placed: list[int] = []
        images: list[ImageInput] = []
        for token in ids:
            if token == image_token:
                data = pixels[len(images)]
                images.append(ImageInput(start=len(placed), num_tokens=count, pixels=data))
                placed += [token] * count
            else:
                placed.append(token)
        return tuple(placed), tuple(images)


def shaped(
    messages: Sequence[Mapping[str, Any]], *, as_parts: bool, image_token: str
) -> list[dict[str, Any]]:
    """Return messages as the chat template of a model that reads images takes them.

    Each content is a list of parts, or one string in which the image token stands for an image.
    """

    def content(given: Any) -> Any:
        parts = given if isinstance(given, list) else [{"type": "text", "text": given}]
        if as_parts:
            return [p if p["type"] == "text" else {"type": "image"} for p in parts]
        return "\n".join(p["text"] if p["type"] == "text" else image_token for p in parts)

    return [{**message, "content": content(message["content"])} for message in messages]


def _read(number: int, url: str, config: PixelConfig) -> bytes:
    try:
        return pixels_of(decode_url(url), config)
    except ValueError as error:
        raise RequestError(f"messages: image {number}: {error}", param="messages") from None


def decode_url(url: str) -> bytes:
    """Return what a data URL holds.

    Raises:
        ValueError: it is no base64 data URL.
    """
    match = _DATA_URL.match(url)
    if match is None:
        raise ValueError("its url must be 'data:image/...;base64,...': this server fetches nothing")
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("its url is not valid base64") from None


def pixels_of(data: bytes, config: PixelConfig) -> bytes:
    """An image file's pixels, uint8 [3, size, size].

    Raises:
        ValueError: it is no image that can be read, or is too large.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            _refuse_slow(opened, data)
            return _pixels(_upright(opened), config)
    except Image.DecompressionBombError:
        raise ValueError(f"has more than the {MAX_PIXELS} pixels that are read") from None
    except UnidentifiedImageError:
        raise ValueError(f"is not one of {', '.join(FORMATS)}") from None
    except (OSError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError):
        raise ValueError("is damaged") from None


def _refuse_slow(opened: Image, data: bytes) -> None:
    """Decoding takes a time that follows from the pixels, not from what a client thought up."""
    # Pillow decodes these byte by byte while it holds the interpreter.
    if any(tile[0] == "bmp_rle" for tile in getattr(opened, "tile", ())):
        raise ValueError("is a compressed BMP: save it as PNG")
    if opened.format in ("JPEG", "MPO") and data.count(b"\xff\xda") > MAX_SCANS:
        raise ValueError(f"has more than {MAX_SCANS} scans: save it again")


def _upright(opened: Image) -> Image:
    """The whole image in RGB, turned as its camera says. Its size is known before it is decoded."""
    from PIL import ImageOps

    width, height = opened.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"has {width} x {height} pixels: at most {MAX_PIXELS} are read")
    # A camera's JPEG may hold smaller copies of itself (MPO): it is its first picture.
    if opened.format != "MPO" and getattr(opened, "is_animated", False):
        raise ValueError("is animated: send one of its frames")
    if opened.mode in _DEEP_MODES:
        raise ValueError("has more than 8 bits a channel: save it with 8")
    image = ImageOps.exif_transpose(opened)
    return image if image.mode == "RGB" else image.convert("RGB")


def _pixels(image: Image, config: PixelConfig) -> bytes:
    import numpy as np

    if config.pad_color is not None:
        image = _padded(image, config.pad_color)
    width, height = _resized(image.size, config)
    if width * height > MAX_PIXELS:
        raise ValueError(f"is too narrow: its sides are {image.width} and {image.height} pixels")
    image = image.resize((width, height), resample=config.resample)
    if config.crop:
        image = _cropped(image, config.size)
    return np.asarray(image).transpose(2, 0, 1).tobytes()


def _resized(size: tuple[int, int], config: PixelConfig) -> tuple[int, int]:
    """Width and height after the resize."""
    if config.resize_short is None:
        return config.size, config.size
    short, long = min(size), max(size)
    new_long = int(config.resize_short * long / short)
    if size[0] <= size[1]:
        return config.resize_short, new_long
    return new_long, config.resize_short


def _padded(image: Image, color: tuple[int, int, int]) -> Image:
    from PIL import Image as Images

    side = max(image.size)
    if side * side > MAX_PIXELS:
        raise ValueError(f"is too narrow: its sides are {image.width} and {image.height} pixels")
    square = Images.new("RGB", (side, side), color)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _cropped(image: Image, side: int) -> Image:
    """The middle; what lies outside a smaller image is black."""
    left, top = ((length - side) // 2 for length in image.size)
    return image.crop((left, top, left + side, top + side))
