"""Promise: an image's pixels and places in a prompt are transformers' own, to the bit; what cannot
be read so is refused with one sentence, in bounded memory.
"""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.frontend_kit import encode_chat
from support.tiny_llava import IMAGE_SIZE, make_tiny_llava

from mstar_tp.common.errors import CheckpointError, RequestError
from mstar_tp.frontend.text.images import MAX_PIXELS, ImageReader, pixels_of, shaped
from mstar_tp.frontend.text.tokenizer import TextTokenizer, load_tokenizer
from mstar_tp.models.config.config_vision import PixelConfig, VisionConfig, load_vision_config

SIZES = [(1, 1), (IMAGE_SIZE, IMAGE_SIZE), (100, 40), (40, 101), (7, 300), (31, 29)]
SQUARE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
PROCESSORS: dict[str, dict[str, Any]] = {
    "CLIP's": {"size": {"shortest_edge": IMAGE_SIZE}, "crop_size": SQUARE},
    "smaller than the crop": {"size": {"shortest_edge": 13}, "crop_size": SQUARE, "resample": 2},
    "stretched": {"size": SQUARE, "do_center_crop": False, "image_mean": [0.5, 0.4, 0.3]},
    "padded square": {"size": SQUARE, "crop_size": SQUARE, "do_pad": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llava(tmp_path_factory.mktemp("llava"), 3)


@pytest.fixture(scope="module")
def config(folder: Path) -> VisionConfig:
    config = load_vision_config(folder)
    assert config is not None
    return config


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return load_tokenizer(folder)


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(width * height).integers(0, 256, (height, width, 3))
    return Image.fromarray(values.astype(np.uint8)).convert(mode)


def file_of(image: Image.Image, form: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **how)
    return out.getvalue()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def normalised(pixels: bytes, config: PixelConfig) -> np.ndarray[Any, Any]:
    """What the tower is given; its own table is compared in the models' parity tests."""
    values = np.frombuffer(pixels, np.uint8).reshape(3, config.size, config.size)
    scaled = (values.astype(np.float64) * config.scale).astype(np.float32)
    mean, std = (np.array(v, np.float32).reshape(3, 1, 1) for v in (config.mean, config.std))
    return (scaled - mean) / std


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_transformers_image_processor(
    folder: Path, tmp_path: Path, name: str
) -> None:
    import json

    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    theirs = LlavaImageProcessorPil(**PROCESSORS[name])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    vision = load_vision_config(tmp_path)
    assert vision is not None
    for size in SIZES:
        for mode in ("RGB", "L", "P", "RGBA", "LA", "1", "CMYK"):
            image = (
                picture(*size).convert("L").convert(mode) if mode == "LA" else picture(*size, mode)
            )
            data = file_of(image, "JPEG" if mode == "CMYK" else "PNG")
            wanted = theirs(Image.open(io.BytesIO(data)), return_tensors="np")["pixel_values"][0]
            got = normalised(pixels_of(data, vision.pixels), vision.pixels)
            assert np.array_equal(got, wanted), (size, mode)


def test_an_image_is_turned_as_its_camera_says(config: VisionConfig) -> None:
    upright = picture(40, 90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    lying = upright.transpose(Image.Transpose.ROTATE_90)
    assert pixels_of(file_of(lying, exif=exif), config.pixels) == pixels_of(
        file_of(upright), config.pixels
    )


def frames(form: str) -> bytes:
    return file_of(picture(8, 8), form, save_all=True, append_images=[picture(9, 9).resize((8, 8))])


def deep() -> bytes:
    return file_of(Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000))


def scans() -> bytes:
    """A progressive JPEG whose last scan comes again and again: seconds of work in 70 bytes each,
    where it is large.
    """
    whole = file_of(picture(8, 8), "JPEG", progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * 1000 + whole[-2:]


def run_lengths() -> bytes:
    """A BMP of 9 million pixels in 4 bytes: to the end of the line, then to the end of it all."""
    whole = file_of(Image.new("P", (3000, 3000)), "BMP")
    start = int.from_bytes(whole[10:14], "little")
    return whole[:30] + b"\1\0\0\0" + whole[34:start] + b"\1\0\0\0"


REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "remote": (lambda: "https://example.com/a.png", "this server fetches nothing"),
    "file": (lambda: "file:///etc/passwd", "this server fetches nothing"),
    "not base64": (lambda: "data:image/png;base64,a?b", "not valid base64"),
    "no image": (lambda: url_of(b"hello"), "is not one of JPEG, PNG"),
    "empty": (lambda: url_of(b""), "is not one of JPEG, PNG"),
    "another format": (lambda: url_of(file_of(picture(8, 8), "TIFF")), "is not one of JPEG, PNG"),
    "cut short": (lambda: url_of(file_of(picture(50, 50))[:700]), "is damaged"),
    "GIF of two": (lambda: url_of(frames("GIF")), "is animated"),
    "WebP of two": (lambda: url_of(frames("WEBP")), "is animated"),
    "16 bits": (lambda: url_of(deep()), "more than 8 bits"),
    "bomb": (lambda: url_of(file_of(Image.new("1", (9000, 9000)))), "9000 x 9000 pixels"),
    "large bomb": (lambda: url_of(file_of(Image.new("1", (14000, 14000)))), "pixels"),
    "many scans": (lambda: url_of(scans()), "has more than 500 scans"),
    "run lengths": (lambda: url_of(run_lengths()), "is a compressed BMP"),
    "narrow": (lambda: url_of(file_of(picture(1, 60000))), "is too narrow"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_a_sentence(config: VisionConfig, name: str) -> None:
    make, said = REFUSED[name]
    good = url_of(file_of(picture(9, 9)))
    with pytest.raises(RequestError, match="messages: image 2: ") as error:
        ImageReader(config).read([good, make()], 100)
    assert said in str(error.value) and error.value.param == "messages"


def test_damaged_files_end_in_pixels_or_a_sentence(config: VisionConfig) -> None:
    rng = np.random.default_rng(5)
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        whole = file_of(picture(20, 20), form)
        for _ in range(40):
            data = bytearray(whole)
            for _ in range(3):
                data[rng.integers(len(data))] = rng.integers(256)
            try:
                got = pixels_of(bytes(data[: rng.integers(8, len(data) + 1)]), config.pixels)
            except ValueError as error:
                assert str(error)
            else:
                assert len(got) == config.pixels.num_bytes


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    """In a process of its own, with room for little more than Pillow itself."""
    code = (
        "import io, resource\n"
        "from PIL import Image\n"
        "from mstar_tp.frontend.text.images import pixels_of\n"
        "from mstar_tp.models.config.config_vision import PixelConfig\n"
        "out = io.BytesIO()\n"
        "Image.new('1', (6000, 6000)).save(out, 'PNG')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "config = PixelConfig(size=8, resize_short=8, crop=True, pad_color=None, resample=3,\n"
        "    scale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)\n"
        "try:\n"
        "    pixels_of(out.getvalue(), config)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, grown_kb = ran.stdout.splitlines()
    assert f"at most {MAX_PIXELS}" in said
    assert int(grown_kb) < 20_000


def test_prompts_are_those_of_transformers_processor(
    folder: Path, config: VisionConfig, tokenizer: TextTokenizer
) -> None:
    from transformers import AutoTokenizer, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    theirs = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(**PROCESSORS["CLIP's"]),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        patch_size=config.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=AutoTokenizer.from_pretrained(folder).chat_template,
    )
    image, text = {"type": "image"}, {"type": "text", "text": "What is it?"}
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": [text, image]}],
        [
            {"role": "system", "content": [text]},
            {"role": "user", "content": [image, text, image]},
            {"role": "assistant", "content": [text]},
            {"role": "user", "content": [image]},
        ],
    ]
    assert tokenizer.template_takes_parts
    reader = ImageReader(config)
    for chat in chats:
        count = sum(part["type"] == "image" for turn in chat for part in turn["content"])
        prompt = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        given = theirs(text=[prompt], images=[picture(9, 9)] * count, add_special_tokens=False)
        ids = encode_chat(tokenizer, shaped(chat, as_parts=True, image_token="<image>"))
        placed, images = reader.place(ids, [b"pixels"] * count)
        assert list(placed) == given["input_ids"][0]
        tokens = [i for i, token in enumerate(placed) if token == config.image_token_id]
        assert tokens == [
            i for image in images for i in range(image.start, image.start + image.num_tokens)
        ]


def test_templates_of_plain_strings_get_the_image_token_where_the_image_stands() -> None:
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
    (message,) = shaped(chat, as_parts=False, image_token="<image>")
    assert message == {"role": "user", "content": "<image>\na"}
    (message,) = shaped([{"role": "user", "content": "a"}], as_parts=True, image_token="<image>")
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}]}


def test_images_that_no_context_holds_are_refused_before_they_are_decoded(
    config: VisionConfig,
) -> None:
    urls = ["https://never.looked/at"] * 13
    with pytest.raises(RequestError, match="hold 13 images, and at most 12 of 4 tokens"):
        ImageReader(config).read(urls, 50)


def test_a_prompt_that_names_another_number_of_images_is_refused(config: VisionConfig) -> None:
    reader = ImageReader(replace(config, image_token_id=7))
    with pytest.raises(RequestError, match="name 2 images once they are laid out, and hold 1"):
        reader.place([1, 7, 2, 7], [b""])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"do_normalize": False}, "do_normalize is False, wanted true"),
        ({"size": {"shortest_edge": 20}, "do_center_crop": False}, "makes images of unequal"),
        ({"crop_size": 20}, "makes images of 20 pixels a side, but the tower"),
        ({"image_std": [1, 0, 1]}, "three positive numbers"),
        ({"resample": "x"}, "the number of a Pillow filter"),
    ],
)
def test_an_image_processor_that_is_not_followed_is_refused(
    folder: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    import json

    base = {"size": {"shortest_edge": IMAGE_SIZE}, "crop_size": SQUARE}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(base | settings))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=said):
        load_vision_config(tmp_path)
