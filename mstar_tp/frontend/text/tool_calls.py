"""Finds tool calls in an answer's text while it comes, and tells them apart from what is said.

Names and arguments leave as soon as they are known; what turns out to be no call is text again, so
nothing a model wrote is lost. One reader belongs to one answer.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable
from typing import NamedTuple

from mstar_tp.frontend.text.tool_forms import LLAMA, MISTRAL, ToolForm

_ID_CHARS = string.ascii_letters + string.digits
_ARGUMENTS = ("arguments", "parameters")


class CallPiece(NamedTuple):
    """A part of call ``place``. Its first piece alone has an id and a name."""

    place: int
    id: str | None
    name: str | None
    arguments: str


class Read(NamedTuple):
    text: str
    calls: list[CallPiece]


class ToolCallReader:
    """Reads one answer. ``push`` its text as it comes, then ``finish``."""

    def __init__(
        self,
        form: ToolForm,
        *,
        several: bool = True,
        new_id: Callable[[int], str] | None = None,
    ) -> None:
        """``several``: take more than the first call; those past it are dropped."""
        self._form = form
        self._several = several
        self._new_id = new_id or random_id
        self._held = ""
        """Text that may still be part of a marker, or white space before one."""
        self._began = False
        """Something that is no white space has come."""
        self._in_calls = False
        self._name = ""
        """A name that stands before its arguments, bare."""
        self._unread = ""
        """What was passed over on the way to a call, and is text should none come."""
        self._call: _Call | None = None
        self.count = 0
        """Calls whose name is known."""

    def push(self, text: str) -> Read:
        said: list[str] = []
        pieces: list[CallPiece] = []
        rest = self._held + text
        self._held = ""
        while rest:
            if self._call is not None:
                rest = self._read_call(self._call, rest, said, pieces)
            elif self._in_calls:
                rest = self._between(rest, said)
            else:
                rest = self._read_text(rest, said)
        return Read("".join(said), pieces)

    def finish(self) -> Read:
        """The answer ended: what is held is no call any more."""
        said, pieces = [], list[CallPiece]()
        if self._call is not None and self._call.index is None:
            said.append(self._unread + self._call.give_up())
        elif not self._in_calls or self._name or not self.count:
            said.append(self._unread + self._name + self._held)
        self._call, self._held, self._name, self._unread = None, "", "", ""
        return Read("".join(said), pieces)

    # ------------------------------------------------------------------ text

    def _read_text(self, rest: str, said: list[str]) -> str:
        """Say what stands before a marker; returns what stands behind it."""
        opening = self._form.opening
        if not self._began and self._form is LLAMA:
            inner = rest.lstrip()
            if not inner:
                self._held = rest
                return ""
            if inner[0] == "{":
                self._began = self._in_calls = True
                return inner
        place = rest.find(opening)
        if place >= 0:
            kept = len(rest[:place].rstrip())
            said.append(rest[:kept])
            self._unread = rest[kept : place + len(opening)]
            self._began = self._in_calls = True
            return rest[place + len(opening) :]
        keep = _open_end(rest, opening)
        shown = rest[: len(rest) - keep]
        kept = len(shown.rstrip())
        self._held = rest[kept:]
        said.append(shown[:kept])
        self._began = self._began or kept > 0
        return ""

    # ------------------------------------------------------------------ calls

    def _between(self, rest: str, said: list[str]) -> str:
        """Before, between or behind calls."""
        inner = rest if self._name else rest.lstrip(" \t\r\n,;")
        self._pass_over(rest[: len(rest) - len(inner)])
        if not inner:
            return ""
        for marker in self._markers():
            if inner.startswith(marker):
                self._in_calls = marker != self._form.closing
                self._pass_over(marker)
                return inner[len(marker) :]
            if marker.startswith(inner):
                self._held = inner
                return ""
        if inner[0] in "[]" and not self._name:
            self._pass_over(inner[0])
            return inner[1:]
        if inner[0] == "{":
            self._call = _Call(self._name or None)
            self._name = ""
            return inner
        if self._form is MISTRAL and (inner[0].isalnum() or inner[0] in "_-."):
            self._name += inner[0]
            return inner[1:]
        said.append(self._unread + self._name + inner[0])
        self._unread, self._name, self._in_calls = "", "", False
        return inner[1:]

    def _markers(self) -> tuple[str, ...]:
        """Return what may stand here besides a call."""
        if self._name:
            return ("[ARGS]",)
        return tuple(filter(None, (self._form.closing, self._form.opening)))

    def _pass_over(self, text: str) -> None:
        if not self.count or self._unread:
            self._unread += text

    def _read_call(self, call: _Call, rest: str, said: list[str], pieces: list[CallPiece]) -> str:
        for at, char in enumerate(rest):
            call.push(char)
            if call.failed or call.done:
                rest = rest[at + 1 :]
                break
        else:
            rest = ""
        if call.failed:
            said.append(self._unread + call.give_up())
            self._call, self._in_calls, self._unread = None, False, ""
            return rest
        self._tell(call, pieces)
        if call.done:
            self._call = None
        return rest

    def _tell(self, call: _Call, pieces: list[CallPiece]) -> None:
        """Report the part of a call that is known by now and has not been reported."""
        if call.name is None or (self.count and not self._several and call.index is None):
            return
        arguments = call.take_arguments()
        if call.index is None:
            self._unread = ""
            call.index = self.count
            self.count += 1
            id_ = self._new_id(self._form.id_chars)
            pieces.append(CallPiece(call.index, id_, call.name, arguments))
        elif arguments:
            pieces.append(CallPiece(call.index, None, None, arguments))


class _Call:
    """One call's JSON object, a character at a time.

    With a name given, the object is its arguments.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.index: int | None = None
        self.done = False
        self.failed = False
        self._raw = name or ""
        self._bare = name is not None
        self._key: str | None = None
        self._value: list[str] = []
        self._scan = _Scan()
        self._arguments: list[str] = []
        self._has_arguments = self._bare
        self._opened = False

    def push(self, char: str) -> None:
        self._raw += char
        if self._bare:
            self._arguments.append(char)
            self._scan.push(char)
            self.done = self._scan.complete
        elif not self._opened:
            self._opened = True  # the brace
        elif self._key is None:
            self._push_key(char)
        else:
            self._push_value(char)

    def take_arguments(self) -> str:
        """The arguments' text since the last call, once it is known to be theirs."""
        taken, self._arguments = "".join(self._arguments), []
        if self.done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        return taken

    def give_up(self) -> str:
        """The call as text, as far as nothing of it was told."""
        return self._raw if self.index is None else ""

    def _push_key(self, char: str) -> None:
        if not self._value and not self._scan.complete:
            if char in " \t\r\n,":
                return
            if char == "}":
                self.done = self.name is not None
                self.failed = not self.done
                return
            if char != '"':
                self.failed = True
                return
        if not self._scan.complete:
            self._value.append(char)
            self._scan.push(char)
        elif char == ":":
            self._key = self._parsed()
        elif char not in " \t\r\n":
            self.failed = True

    def _push_value(self, char: str) -> None:
        if not self._value and char in " \t\r\n":
            return
        ends_here = self._scan.plain and char in ",} \t\r\n"
        if not ends_here:
            self._value.append(char)
            self._scan.push(char)
            if self._key in _ARGUMENTS and self._value[0] == "{":
                self._has_arguments = True
                self._arguments.append(char)
        if self._scan.complete or ends_here:
            self._end_value()
        if ends_here and char == "}":
            self.done = self.name is not None
            self.failed = not self.done

    def _end_value(self) -> None:
        key, text, opens = self._key, "".join(self._value), self._value[0]
        value = self._parsed()
        self._key = None
        if key == "name" and isinstance(value, str) and value:
            self.name = value
        elif key in _ARGUMENTS and opens != "{":
            # Some models write the arguments' JSON as a string.
            self._has_arguments = True
            self._arguments.append(value if isinstance(value, str) else text)

    def _parsed(self) -> str | None:
        """The value that was read, where it is a string; ready for the next."""
        text, self._value, self._scan = "".join(self._value), [], _Scan()
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            return None
        return value if isinstance(value, str) else None


class _Scan:
    """Says when a JSON value that comes a character at a time is complete."""

    def __init__(self) -> None:
        self.complete = False
        self.plain = False
        """A number or a word: it ends with what follows it."""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, char: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                self.complete = self._depth == 0
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.complete = self._depth == 0
        elif self._depth == 0:
            self.plain = True


def random_id(chars: int) -> str:
    """An id of a call: with the prefix that OpenAI's have, unless it must be short."""
    drawn = "".join(secrets.choice(_ID_CHARS) for _ in range(chars))
    return drawn if chars < 12 else f"call_{drawn}"


def _open_end(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker``."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
