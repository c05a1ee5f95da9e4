"""``mstar-tp inspect`` and ``mstar-tp check``: what they look at, and how they answer."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mstar_tp.common.errors import ConfigError, MstarError
from mstar_tp.config import ConfigFindings, EngineConfig, LoraConfig
from mstar_tp.config.server_flags import parse_args
from mstar_tp.lora.format.checkpoint import readable
from mstar_tp.tools.check import check_console, render
from mstar_tp.tools.check.adapters import FileValidator, Validator, inspect_adapters
from mstar_tp.tools.check.find_adapters import find_adapters, is_model
from mstar_tp.tools.check.findings import AdapterFindings, Finding, Inspection, ModelFindings

if TYPE_CHECKING:
    from mstar_tp.tools.check.base_model import PlannedModel


def inspect_command(args: argparse.Namespace) -> int:
    """Exit code 0 when all of it can be served, else 1.

    Raises:
        MstarError: there is nothing to look at.
    """
    path = Path(args.path)
    found = _inspect_model(args) if is_model(path) else _inspect_adapters(args, path)
    if args.json:
        _print_json(found)
    else:
        check_console.show(render.inspection(found, check_console.page(everything=args.all)))
    return 0 if found.ok else 1


def check_command(args: argparse.Namespace) -> int:
    """Exit code 0 when it can be started, else 1."""
    from mstar_tp.tools.check.deployment import check_deployment

    try:
        found = parse_args(args)
    except ConfigError as error:
        found = ConfigFindings(None, (str(error),))
    report = check_deployment(
        found, str(args.model), digests=args.digests, progress=check_console.progress
    )
    if args.json:
        _print_json(report)
    else:
        check_console.show(render.check(report, check_console.page(everything=args.all)))
    return 0 if report.ok else 1


def _print_json(answer: msgspec.Struct) -> None:
    tree = msgspec.to_builtins(answer)
    text = json.dumps(tree, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a file's name that is no UTF-8, or an output that is not
        text = json.dumps(tree, indent=2)
    sys.stdout.write(text + "\n")


def _inspect_model(args: argparse.Namespace) -> Inspection:
    planned, problems = _plan(args, args.path)
    model = None if planned is None else planned.findings(args.path)
    return _inspection(args, model=model, problems=problems)


def _inspect_adapters(args: argparse.Namespace, path: Path) -> Inspection:
    lora = LoraConfig(
        max_lora_rank=args.max_lora_rank, max_lora_saved_rows=args.max_lora_saved_rows
    )
    found = find_adapters(path)
    validator: Validator = FileValidator(
        max_rank=lora.max_lora_rank, max_saved_rows=lora.max_lora_saved_rows
    )
    planned, problems = (None, []) if args.model is None else _plan(args, args.model)
    slot: tuple[int, ...] | None = None
    if planned is not None:
        from mstar_tp.tools.check.base_model import validator_of

        try:
            validator = of_model = validator_of(planned, args.model, lora)
            slot = of_model.slot_bytes()
        except ConfigError as error:
            problems.append(Finding(block="adapters", text=str(error)))
    start = time.perf_counter()
    with check_console.progress(len(found.adapters)) as told:
        adapters = inspect_adapters(validator, found.adapters, digests=args.digests, progress=told)
    seconds = time.perf_counter() - start
    notes = []
    if found.skipped:
        names = readable(", ".join(found.skipped[:5])) + (" …" if len(found.skipped) > 5 else "")
        text = f"{len(found.skipped)} folders hold nothing of an adapter: {names}"
        notes.append(Finding(block="adapters", text=text))
    return _inspection(
        args,
        model=None if planned is None else planned.findings(args.model),
        slot=slot,
        adapters=tuple(adapters),
        problems=problems,
        notes=notes,
        seconds=seconds,
    )


def _inspection(
    args: argparse.Namespace,
    *,
    model: ModelFindings | None,
    problems: list[Finding],
    slot: tuple[int, ...] | None = None,
    adapters: tuple[AdapterFindings, ...] = (),
    notes: list[Finding] | None = None,
    seconds: float = 0.0,
) -> Inspection:
    notes = notes or []
    for findings in adapters:
        problems += [
            Finding(block="adapters", text=text, adapter=findings.name)
            for text in findings.refusals
        ]
        notes += [
            Finding(
                block="adapters", text=f"adapter {findings.name!r}: {text}", adapter=findings.name
            )
            for text in findings.notes
        ]
    return Inspection(
        ok=not problems,
        path=args.path,
        tensor_parallel_size=args.tp,
        max_lora_rank=args.max_lora_rank,
        max_lora_saved_rows=args.max_lora_saved_rows,
        model=model,
        slot_bytes=slot,
        adapters=adapters,
        problems=tuple(problems),
        notes=tuple(notes),
        seconds=round(seconds, 3),
    )


def _plan(args: argparse.Namespace, model: str) -> tuple[PlannedModel | None, list[Finding]]:
    """The model as its ranks would build it, and what is wrong with it."""
    from mstar_tp.tools.check.base_model import (
        plan_model,  # needs torch: a look at a file alone does not
    )

    engine = EngineConfig(model=model, tensor_parallel_size=args.tp, dtype=args.dtype)
    try:
        planned = plan_model(engine)
    except MstarError as error:
        return None, [Finding(block="model", text=text) for text in str(error).splitlines()]
    return planned, [Finding(block="model", text=text) for text in planned.problems]
