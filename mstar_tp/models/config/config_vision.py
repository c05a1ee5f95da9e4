"""The settings of a model that reads images: its tower, its projector, its pixels.

No torch: the frontend reads it too. What would change the maths and is not served is refused by its
key.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mstar_tp.common.errors import CheckpointError
from mstar_tp.models.config.config_keys import Keys, read_json

VisionActivation = Literal["quick_gelu", "gelu", "gelu_tanh"]
_ACTIVATIONS: dict[str, VisionActivation] = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"

CLIP_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
"""The values of a CLIP tower for keys that a vision_config leaves out."""
LLAVA_TOWER: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""The values of LLaVA for a vision_config that is not there at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelConfig:
    """An image's way to pixels: made RGB, padded square, resized, cropped, then normalised.

    ``resize_short``: the shorter side's new length; None: both sides become ``size``. ``size`` is
    the side of the square that the tower reads; ``crop`` says whether it is cut from the middle.
    ``pad_color``: what an image is padded square with, before all else; None: it is not.
    ``resample`` is Pillow's number of a filter. A value v of channel c becomes
    (v * scale - mean[c]) / std[c].
    """

    size: int
    resize_short: int | None
    crop: bool
    pad_color: tuple[int, int, int] | None
    resample: int
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def num_bytes(self) -> int:
        """The bytes of one image's pixels, uint8 [3, size, size]."""
        return 3 * self.size * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A vision tower and the projector behind it. Equal on every rank."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    layer_norm_eps: float
    activation: VisionActivation
    num_used_layers: int
    """Layers that run: the projector may read an earlier one's output than the last's."""
    keeps_class: bool
    """True where the class token's output is one of an image's tokens."""
    projector_activation: VisionActivation
    projector_bias: bool
    image_token_id: int
    """Stands in a prompt once for each of an image's tokens."""
    pixels: PixelConfig

    @property
    def num_patches(self) -> int:
        return (self.pixels.size // self.patch_size) ** 2

    @property
    def tokens_per_image(self) -> int:
        return self.num_patches + self.keeps_class


def load_vision_config(folder: str | Path) -> VisionConfig | None:
    """The vision half of the model in ``folder``; None of a model that reads text alone.

    Raises:
        CheckpointError: a config file is missing or malformed, or names something that is not
            served.
    """
    path = Path(folder) / "config.json"
    keys = Keys(read_json(path), str(path))
    is_llava = keys.get("architectures") == ["LlavaForConditionalGeneration"]
    return llava_vision(keys, path.parent) if is_llava else None


def llava_vision(keys: Keys, folder: Path) -> VisionConfig:
    """The vision half of a LLaVA's config.json, and its folder's image processor.

    Raises:
        CheckpointError: a key is malformed or names something that is not served.
    """
    given = keys.get("vision_config")
    table = keys.table("vision_config")
    tower = Keys({**CLIP_DEFAULTS, **(LLAVA_TOWER if given is None else table.tree)}, table.where)
    tower.choice("model_type", ("clip_vision_model",), "clip_vision_model")
    if tower.count("num_channels", 3) != 3:
        raise tower.refuse("num_channels", "3")
    hidden_size, num_heads = tower.count("hidden_size"), tower.count("num_attention_heads")
    if hidden_size % num_heads:
        raise tower.refuse("num_attention_heads", f"a divisor of hidden_size = {hidden_size}")
    image_size, patch_size = tower.count("image_size"), tower.count("patch_size")
    if patch_size > image_size:
        raise tower.refuse("patch_size", f"at most image_size = {image_size}")
    strategy = keys.choice("vision_feature_select_strategy", ("default", "full"), "default")
    activation = tower.choice("hidden_act", tuple(_ACTIVATIONS))
    projector_activation = keys.choice("projector_hidden_act", tuple(_ACTIVATIONS), "gelu")
    num_layers = tower.count("num_hidden_layers")
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=tower.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        patch_size=patch_size,
        layer_norm_eps=tower.number("layer_norm_eps"),
        activation=_ACTIVATIONS[activation],
        num_used_layers=_used_layers(keys, num_layers),
        keeps_class=strategy == "full",
        projector_activation=_ACTIVATIONS[projector_activation],
        projector_bias=keys.flag("multimodal_projector_bias", True),
        image_token_id=_image_token(keys),
        pixels=load_pixels(folder, image_size),
    )


def _used_layers(keys: Keys, num_layers: int) -> int:
    """The hidden state that ``vision_feature_layer`` picks: 0 is the input of the first layer."""
    layer = keys.get("vision_feature_layer")
    layer = -2 if layer is None else layer
    if type(layer) is not int or not -num_layers - 1 <= layer <= num_layers:
        raise keys.refuse(
            "vision_feature_layer", f"one number from {-num_layers - 1} to {num_layers}"
        )
    return layer if layer >= 0 else num_layers + 1 + layer


def _image_token(keys: Keys) -> int:
    key = "image_token_id" if keys.has("image_token_id") else "image_token_index"
    ids = keys.ids(key)
    if len(ids) > 1:
        raise keys.refuse(key, "one token id")
    return ids[0] if ids else 32000


def load_pixels(folder: Path, image_size: int) -> PixelConfig:
    """The image processor's settings of a model folder, for squares of ``image_size`` a side.

    Raises:
        CheckpointError: there is none, or it makes something else.
    """
    keys = _processor_keys(folder)
    for flag in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not keys.flag(flag, True):
            raise keys.refuse(flag, "true: nothing else is served")
    crop, pad = keys.flag("do_center_crop", True), keys.flag("do_pad", False)
    short, sides = _sizes(keys, "size")
    _, cropped = _sizes(keys, "crop_size")
    made = cropped if crop else sides or (pad and short)
    if made != image_size:
        raise CheckpointError(
            f"{keys.where}: makes images of {made or 'unequal'} pixels a side, but the tower of "
            f"config.json reads {image_size}: size and crop_size must agree with image_size"
        )
    resample = keys.get("resample")
    resample = 3 if resample is None else resample
    if type(resample) is not int or not 0 <= resample <= 5:
        raise keys.refuse("resample", "the number of a Pillow filter, 0 to 5")
    mean = _three(keys, "image_mean", (0.48145466, 0.4578275, 0.40821073))
    return PixelConfig(
        size=image_size,
        resize_short=short,
        crop=crop,
        pad_color=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)) if pad else None,
        resample=resample,
        scale=keys.number("rescale_factor", 1 / 255),
        mean=mean,
        std=_three(keys, "image_std", (0.26862954, 0.26130258, 0.27577711)),
    )


def _processor_keys(folder: Path) -> Keys:
    path = folder / _PREPROCESSOR
    if path.exists():
        return Keys(read_json(path), str(path))
    path = folder / _PROCESSOR
    keys = Keys(read_json(path), str(path)) if path.exists() else None
    if keys is None or not keys.has("image_processor"):
        raise CheckpointError(
            f"{folder}: has no {_PREPROCESSOR}: save the model's image processor beside its weights"
        )
    return keys.table("image_processor")


def _sizes(keys: Keys, name: str) -> tuple[int | None, int | None]:
    """(the shorter side's length, or None; the side of a square, or None); 224 when absent."""
    value = keys.get(name)
    if value is None:
        return (224, None) if name == "size" else (None, 224)
    if type(value) is int and value > 0:
        return (value, None) if name == "size" else (None, value)
    table = keys.table(name)
    if table.has("shortest_edge") and not table.has("longest_edge"):
        return table.count("shortest_edge"), None
    height, width = table.count("height"), table.count("width")
    if height != width:
        raise keys.refuse(name, "equal height and width")
    return None, height


def _three(
    keys: Keys, name: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    value = keys.get(name)
    if value is None:
        return default
    numbers = value if isinstance(value, list) else [value] * 3
    if len(numbers) != 3 or not all(type(v) in (int, float) for v in numbers):
        raise keys.refuse(name, "three numbers")
    if name == "image_std" and not all(v > 0 for v in numbers):
        raise keys.refuse(name, "three positive numbers")
    red, green, blue = numbers
    return float(red), float(green), float(blue)
