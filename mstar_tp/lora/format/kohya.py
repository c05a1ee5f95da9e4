"""The source of an adapter's ranks and scalings. No torch.

It is PEFT's config, or what Kohya and diffusers put into the file itself.

Kohya writes an ``alpha`` beside each pair; diffusers does too, or writes PEFT's settings into the
header's metadata. A pair with neither is taken as both take it: alpha equal to the rank.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mstar_tp.common.errors import AdapterError
from mstar_tp.common.problems import Problems
from mstar_tp.common.strict_json import JsonError, parse_json
from mstar_tp.lora.format.adapter_files import Headers, StoredTensor, open_file
from mstar_tp.lora.format.config_file import MAX_CONFIG_BYTES
from mstar_tp.lora.format.keys import Key, Role, Spelling
from mstar_tp.lora.format.peft_config import (
    CONFIG_NAME,
    PeftConfig,
    parse_peft_config,
    read_peft_config,
)
from mstar_tp.lora.format.peft_values import MAX_ALPHA
from mstar_tp.tensor_files.reader import TensorFile

METADATA_KEY = "lora_adapter_metadata"
_COMPONENT = "text_encoder"
_CODES = {"F64": "<d", "F32": "<f", "BF16": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


class Settings(NamedTuple):
    """PEFT's config, or else the alpha of each module as the file spells it.

    It is not ``known`` where problems were found in the settings, which then say nothing.
    """

    config: PeftConfig | None
    alphas: Mapping[str, float]
    known: bool = True


def read_settings(headers: Headers, keys: Sequence[Key], problems: Problems) -> Settings:
    """Ranks and scalings, wherever they are.

    Raises:
        AdapterError: there is no config where one is needed, one where the file speaks for itself,
            or one that cannot be served; past the limit of ``problems``.
    """
    before = len(problems)
    config, alphas = problems.attempt((None, {}), _read, headers, keys, problems)
    return Settings(config, alphas, known=len(problems) == before)


def _read(
    headers: Headers, keys: Sequence[Key], problems: Problems
) -> tuple[PeftConfig | None, dict[str, float]]:
    kohya_keys = [key for key in keys if key.spelling is not Spelling.PEFT]
    has_config = headers.folder is not None and (headers.folder / CONFIG_NAME).exists()
    if has_config:
        with problems:
            _refuse_two_sources(headers, kohya_keys)
        assert headers.folder is not None
        return read_peft_config(headers.folder, problems), {}
    if METADATA_KEY in headers.metadata:
        return _metadata_config(headers, keys, problems), {}
    if not kohya_keys and keys and not all(key.module.startswith(f"{_COMPONENT}") for key in keys):
        raise AdapterError(
            f"{headers.where}: {keys[0].text}: is a PEFT key, but there is no {CONFIG_NAME} beside "
            "it, which says how the factors are scaled: put it there"
        )
    with problems:
        _refuse_other_scaling(headers)
    return None, _alphas(headers, keys, problems)


def _refuse_two_sources(headers: Headers, kohya_keys: Sequence[Key]) -> None:
    if kohya_keys:
        raise AdapterError(
            f"{headers.where}: {kohya_keys[0].text}: is a {kohya_keys[0].spelling.value} key, but "
            f"{CONFIG_NAME} lies beside it, so its scaling has two sources: remove the config, or "
            "convert the file to PEFT's keys"
        )


def _metadata_config(
    headers: Headers, keys: Sequence[Key], problems: Problems
) -> PeftConfig | None:
    """PEFT's settings as diffusers keeps them: one flat mapping over all components."""
    where = f"{headers.where}: {METADATA_KEY}"
    alphas = [key for key in keys if key.role is Role.ALPHA]
    if alphas:
        raise AdapterError(
            f"{headers.where}: {alphas[0].text}: the scaling has two sources, this and "
            f"{METADATA_KEY}: remove one"
        )
    data = headers.metadata[METADATA_KEY].encode("utf-8", "surrogatepass")
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{where}: is larger than {MAX_CONFIG_BYTES} bytes, the most it may be")
    try:
        tree: Any = parse_json(data)
    except JsonError as cause:
        raise AdapterError(f"{where}: {cause}: save the adapter again") from None
    components = {key.module.partition(".")[0] for key in keys}
    if not isinstance(tree, dict) or len(components) != 1:
        raise AdapterError(
            f"{where}: wanted a mapping, and tensors of one component: found "
            f"{', '.join(sorted(components)[:4])}"
        )
    prefix = f"{components.pop()}."
    settings = {k.removeprefix(prefix): v for k, v in tree.items() if k.startswith(prefix)}
    return parse_peft_config({"peft_type": "LORA", **settings}, problems, where=where)


def _refuse_other_scaling(headers: Headers) -> None:
    """LyCORIS can scale by the root of the rank, and says so in its arguments alone."""
    args = headers.metadata.get("ss_network_args", "")
    if "rs_lora" in args or "rslora" in args:
        raise AdapterError(
            f"{headers.where}: ss_network_args say {args[:80]!r}: rank-stabilised scaling of Kohya "
            "files cannot be served: convert the adapter to PEFT's format with use_rslora"
        )


def _alphas(headers: Headers, keys: Sequence[Key], problems: Problems) -> dict[str, float]:
    found: dict[str, float] = {}
    alphas = [headers.tensors[key.text] for key in keys if key.role is Role.ALPHA]
    modules = {key.text: key.module for key in keys}
    for number, weights in enumerate(headers.files):
        mine = [tensor for tensor in alphas if tensor.file == number]
        if not mine:
            continue
        with open_file(weights) as file:
            for tensor in mine:
                with problems:
                    found[modules[tensor.key]] = _scalar(headers.where, tensor, file)
    return found


def _scalar(where: str, tensor: StoredTensor, file: TensorFile) -> float:
    info = tensor.info
    if math.prod(info.shape) != 1 or info.dtype not in _CODES:
        raise AdapterError(
            f"{where}: {tensor.key} is {info.dtype} {list(info.shape)}, wanted one number"
        )
    data = file.read_bytes(tensor.key)
    padded = b"\0\0" + data if info.dtype == "BF16" else data
    value = float(struct.unpack(_CODES[info.dtype], padded)[0])
    if not abs(value) <= MAX_ALPHA:
        raise AdapterError(f"{where}: {tensor.key} is {value}, wanted a number")
    return value
