"""``mstar-tp convert``: pickles, Kohya's and diffusers' files to PEFT's, by serving's parser.

A pickle is read by a process of its own; what that wrote is then validated like any other file. The
result is parsed again and compared with the source before it takes its name.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mstar_tp.common.atomic_folder import FreshFolder
from mstar_tp.common.errors import AdapterError
from mstar_tp.common.module_names import AS_BUILT
from mstar_tp.common.problems import Problems
from mstar_tp.common.units import counted
from mstar_tp.engine.base_weights import CheckpointWeights
from mstar_tp.engine.offline_spec import offline_spec
from mstar_tp.lora.format.adapter_files import (
    PICKLES,
    WEIGHTS_NAME,
    Headers,
    open_file,
    read_headers,
)
from mstar_tp.lora.format.assemble import parse_keys
from mstar_tp.lora.format.checkpoint import AdapterFile, survey_adapter
from mstar_tp.lora.format.config_file import read_small
from mstar_tp.lora.format.keys import Spelling
from mstar_tp.lora.format.peft_config import CONFIG_NAME, read_peft_config
from mstar_tp.lora.reading.base_weights import check_copy
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.models.config.families import load_model_config
from mstar_tp.models.registry import modules_of
from mstar_tp.tools.convert.decoder_spec import decoder_spec
from mstar_tp.tools.convert.peft_files import write_peft
from mstar_tp.tools.convert.pickles import pickle_to_safetensors

PICKLE_NAME = "adapter_model.bin"
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """The source, the target, and the base model whose modules the source names, if it is told."""

    source: Path
    out: Path
    model: Path | None
    force: bool


class _Source(NamedTuple):
    """The place of the adapter.

    It is a folder or file that the parser reads, or a pickle and the config beside it.
    """

    path: Path
    pickle: Path | None = None
    config: Path | None = None


def convert(options: ConvertOptions) -> str:
    """Write a PEFT folder; a sentence that says what was written. Blocks on the disk.

    Raises:
        AdapterError: the source cannot be converted exactly; the message names file and key.
        CheckpointError: the base model is none that is served.
        OutputError: the result cannot be written.
    """
    source = _find(options.source)
    fresh = FreshFolder(
        options.out, inputs=(options.source,), kind_file=CONFIG_NAME, force=options.force
    )
    spec = None if options.model is None else offline_spec(options.model)
    fresh.check_space(2 * _size(source))
    with fresh as folder:
        if source.pickle is None:
            said = _convert(source.path, folder, spec, options)
        else:
            said = _convert_pickle(source, folder, spec, options)
    return f"wrote {fresh.path}: {said}"


def _find(path: Path) -> _Source:
    if path.is_file():
        if not path.name.endswith(PICKLES):
            return _Source(path)
        config = path.with_name(CONFIG_NAME)
        return _Source(path, path, config if config.is_file() else None)
    if not path.is_dir():
        raise AdapterError(f"{path}: there is no such file or folder")
    names = sorted(entry.name for entry in path.iterdir())
    pickles = [name for name in names if name.endswith(PICKLES)]
    if any(name.endswith(".safetensors") for name in names) or not pickles:
        return _Source(path)
    if PICKLE_NAME not in pickles and len(pickles) > 1:
        raise AdapterError(f"{path}: holds {', '.join(pickles[:4])}: name the file that is meant")
    pickle = path / (PICKLE_NAME if PICKLE_NAME in pickles else pickles[0])
    return _Source(path, pickle, path / CONFIG_NAME if CONFIG_NAME in names else None)


def _size(source: _Source) -> int:
    path = source.pickle or source.path
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _convert_pickle(
    source: _Source, folder: Path, spec: LoraSpec | None, options: ConvertOptions
) -> str:
    """Convert a pickle by way of a safetensors file with the pickle's own keys."""
    assert source.pickle is not None
    stage = folder / "stage"
    stage.mkdir()
    print(f"reading {source.pickle} in a process of its own", file=sys.stderr)
    pickle_to_safetensors(source.pickle, stage / WEIGHTS_NAME)
    if source.config is not None:
        (stage / CONFIG_NAME).write_bytes(read_small(source.config))
    try:
        return _convert(stage, folder, spec, options)
    except AdapterError as error:
        # Whoever reads this knows the pickle, not what stood for it here.
        text = str(error).replace(str(stage / WEIGHTS_NAME), str(source.pickle))
        raise AdapterError(text.replace(str(stage), str(source.path))) from None
    finally:
        shutil.rmtree(stage)


def _convert(path: Path, folder: Path, spec: LoraSpec | None, options: ConvertOptions) -> str:
    headers = read_headers(path, Problems())
    keys = parse_keys(headers, Problems())
    peft = headers.folder is not None and (headers.folder / CONFIG_NAME).exists()
    if spec is None and peft and all(key.spelling is Spelling.PEFT for key in keys):
        return _keep(headers, folder, options)
    survey = survey_adapter(
        lambda found: spec or decoder_spec(found), str(options.source), path, limit=1
    )
    if survey.refusals or survey.file is None:
        raise AdapterError(survey.refusals[0])
    file = survey.file
    for note in file.notes:
        print(f"note: {note}", file=sys.stderr)
    if any(module.place.target.routed for module in file.modules):
        # PEFT turns experts' keys into stacked ones by the names that it knows.
        return _keep(headers, folder, options)
    if spec is not None and options.model is not None:
        _check_copies(file, CheckpointWeights(options.model, spec.module_map.own))
    tying = file.config is not None and file.config.ensure_weight_tying
    base, names = None, AS_BUILT
    if options.model is not None:
        base = str(options.model)
        names = modules_of(load_model_config(options.model).architecture)
    write_peft(file, folder, base=base, tying=tying, names=names)
    _check_result(file, folder, spec)
    return f"{counted(len(_settings(file)), 'module')} of rank {_ranks(file)}{_others(file)}"


def _keep(headers: Headers, folder: Path, options: ConvertOptions) -> str:
    """A PEFT adapter whose keys PEFT reads as they are: only its file changes."""
    where = options.source
    odd = [
        key.text
        for key in parse_keys(headers, Problems())
        if key.adapter or not key.text.startswith(_PREFIX) or "._" in key.text
    ]
    if odd:
        raise AdapterError(
            f"{where}: {odd[0]}: is a key that PEFT would not find: give --model DIR, the model "
            "that the adapter is for"
        )
    assert headers.folder is not None
    if headers.folder.parent != folder:
        raise AdapterError(
            f"{where}: is a PEFT adapter in safetensors already; with --model DIR its modules are "
            "checked against that model and fused factors are split"
        )
    read_peft_config(headers.folder, Problems())
    shutil.copyfile(headers.folder / CONFIG_NAME, folder / CONFIG_NAME)
    headers.files[0].path.rename(folder / WEIGHTS_NAME)
    return f"{counted(len(headers.tensors), 'tensor')} as they were, and their config"


def _check_copies(file: AdapterFile, weights: CheckpointWeights) -> None:
    """Copies of base weights are left out, so they must be what the base model has."""
    for copy in file.copies:
        with open_file(file.files[copy.tensor.file]) as tensors:
            check_copy(copy, tensors, weights, 0, 1)


def _check_result(file: AdapterFile, folder: Path, spec: LoraSpec | None) -> None:
    result = survey_adapter(lambda found: spec or decoder_spec(found), "result", folder, limit=1)
    assert result.file is not None and not result.refusals, result.refusals
    assert _settings(result.file) == _settings(file), "the result says something else"


def _settings(file: AdapterFile) -> dict[str, tuple[int, float]]:
    """Every module by name, with rank and scaling."""
    return {
        module.place.target.module(module.place.layer, index): (module.lora_rank, module.scaling)
        for module in file.modules
        for index in module.place.slices
    }


def _ranks(file: AdapterFile) -> str:
    ranks = sorted({module.lora_rank for module in file.modules})
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}" if ranks else "0"


def _others(file: AdapterFile) -> str:
    whole = len(file.rows) + len(file.norms)
    return f", {counted(whole, 'replaced weight')}" if whole else ""
