"""Argument parsers that say in one sentence what is wrong, and the types of their arguments."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mstar_tp.config.flags import PEERS_FLAGS


class ClearParser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one sentence, and where help is."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, extras = super().parse_known_args(args, namespace)
        if extras:
            self.error(self._unknown(extras))
        return parsed, extras

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            message = f"{missing} is missing: {self._wanted(missing)}"
        self.exit(2, f"error: {message}\nSee `{self.prog} --help`.\n")

    def _unknown(self, extras: Sequence[str]) -> str:
        flag = next((extra for extra in extras if extra.startswith("-")), None)
        if flag is None:
            return f"{extras[0]!r} is one word too many for `{self.prog}`"
        flag = flag.partition("=")[0]
        if (instead := PEERS_FLAGS.get(flag)) is not None:
            return f"{flag} is no flag of `{self.prog}`: {instead}"
        known = [name for action in self._actions for name in action.option_strings]
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
        meant = f": did you mean {close[0]}?" if close else ""
        return f"{flag} is no flag of `{self.prog}`{meant}"

    def _wanted(self, missing: str) -> str:
        """Help for the first of the missing arguments."""
        first = missing.partition(", ")[0]
        for action in self._actions:
            if first in (action.metavar, "/".join(action.option_strings)):
                if action.choices:
                    return f"it is one of {', '.join(action.choices)}"
                return action.help or "give it"
        return "give it"


class ModelParser(ClearParser):
    """Takes MODEL wherever it stands, also behind a flag that takes several values."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(self._model_first(given), namespace)

    def _model_first(self, args: list[str]) -> list[str]:
        """``args``, with MODEL in front where a flag of several values would take it for its own.

        It is the last word behind such a flag, or the one that is no NAME=PATH where those are
        wanted.
        """
        flags = {flag: action for action in self._actions for flag in action.option_strings}
        taking: argparse.Action | None = None
        left, last, sure = 0, -1, -1
        for at, arg in enumerate(args):
            flag, attached, _ = arg.partition("=")
            if flag in flags:
                action = flags[flag]
                taking = action if action.nargs == "+" and not attached else None
                left = 1 if action.nargs in (None, "+") and not attached else 0
            elif left:
                left -= 1
            elif taking is not None:
                if taking.metavar != "NAME=PATH":
                    last = at
                elif not attached:
                    sure = at
            elif not arg.startswith("-"):
                return args  # it stands for itself
        at = sure if sure >= 0 else last
        return args if at < 0 else [args[at], *args[:at], *args[at + 1 :]]


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], **more: str
) -> argparse.ArgumentParser:
    """Add a command that ``run`` runs to argparse's ``commands``; its parser.

    ``more`` are the parser's ``help``, ``description`` and ``epilog``.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, allow_abbrev=False, **more)
    parser.set_defaults(command=run)
    return parser


def positive(text: str) -> int:
    """A whole number from 1."""
    return _number(text, 1)


def count(text: str) -> int:
    """A whole number from 0."""
    return _number(text, 0)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers from 0 with commas between."""
    return tuple(_number(word, 0) for word in text.split(","))


def positives(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 with commas between."""
    return tuple(_number(word, 1) for word in text.split(","))


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number from {least}")
    return int(text)
