"""JSON from files that nobody vouches for: parsed strictly, and shown cut short in messages.

No torch, no recursion of our own: what the parser takes, everything here can handle.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 8, 4
_SHORT.maxstring, _SHORT.maxlong = 200, 60


class JsonError(ValueError):
    """A refusal of a text: the end of a sentence, with its verb, behind the file's name."""


def parse_json(data: bytes) -> Any:
    """The value in ``data``, which is UTF-8.

    Objects that name a key twice are refused: readers differ in which of the two counts.

    Raises:
        JsonError: it is none.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"is not JSON: byte {error.start} is not UTF-8") from None
    if text.startswith("\ufeff"):
        raise JsonError("is not JSON: it begins with a byte order mark")
    try:
        return json.loads(text, object_pairs_hook=_no_repeats)
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise JsonError(f"is not JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise JsonError("is not JSON that is taken: it nests too deep") from None
    except ValueError:  # Python's own bound on the digits of a number
        raise JsonError(
            "is not JSON that is taken: it holds a number of thousands of digits"
        ) from None


def show(value: Any) -> str:
    """A file's value on one short line; a hostile one may be megabytes, or a thousand deep."""
    return _SHORT.repr(value)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise JsonError(f"names {show(name)} twice")
            seen.add(name)
    return tree
