"""The JSON schemas that answers can be held to.

A keyword that the grammar would pass over is refused by its path: an answer that keeps to half of
a schema would be wrong in silence. So is what would make a grammar too large to build. Pure
functions; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from mstar_tp.frontend.api.api_errors import FieldError, printable, wrong_shape

MAX_SCHEMA_BYTES = 64 * 2**10
MAX_DEPTH = 32
"""The deepest nesting of schemas within schemas."""
MAX_COUNT = 4096
"""The highest bound of characters, items or properties that a schema may set."""
MAX_CHOICES = 1024
"""The most values of an enum: more take seconds to build."""
MAX_PATTERN_CHARS = 512

_IGNORED = frozenset(
    {
        "uniqueItems", "multipleOf", "not", "if", "then", "else", "contains", "minContains",
        "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
        "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
        "contentMediaType", "contentEncoding", "contentSchema",
    }
)  # fmt: skip
"""Keywords that xgrammar passes over."""
_FORMATS = frozenset(
    {
        "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid",
        "uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
    }
)  # fmt: skip
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"
)  # fmt: skip
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "additionalItems")
_REPEATED = re.compile(r"\{(\d+)")


def check_schema(schema: Any, field: str) -> str:
    """``schema``, from the request's ``field``, as JSON text.

    Raises:
        FieldError: naming the path of what no answer can be held to.
    """
    if not isinstance(schema, dict):
        raise FieldError(field, f"must be a JSON schema, an object, got {wrong_shape(schema)}")
    text = msgspec.json.encode(schema)
    if len(text) > MAX_SCHEMA_BYTES:
        raise FieldError(field, f"has {len(text)} bytes, and a schema may have {MAX_SCHEMA_BYTES}")
    _check(schema, field, 0)
    return text.decode()


def _check(schema: Any, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise FieldError(path, f"is more than {MAX_DEPTH} schemas deep")
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise FieldError(path, f"must be a schema, got {wrong_shape(schema)}")
    for keyword in schema:
        if keyword in _IGNORED and schema[keyword] is not False:
            raise FieldError(_under(path, keyword), "is not served here: leave it out")
    _check_values(schema, path)
    for name, part in _parts(schema, path):
        _check(part, name, depth + 1)


def _check_values(schema: dict[str, Any], path: str) -> None:
    for keyword in _COUNTS:
        count = schema.get(keyword, 0)
        if type(count) is not int or not 0 <= count <= MAX_COUNT:
            raise FieldError(_under(path, keyword), f"must be a whole number from 0 to {MAX_COUNT}")
    choices = schema.get("enum", [None])
    if not isinstance(choices, list) or not 0 < len(choices) <= MAX_CHOICES:
        raise FieldError(
            _under(path, "enum"), f"must be a list of at least one and at most {MAX_CHOICES} values"
        )
    given = schema.get("format", "email")
    if given not in _FORMATS:
        raise FieldError(_under(path, "format"), f"must be one of {', '.join(sorted(_FORMATS))}")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise FieldError(_under(path, "$ref"), "must point into the schema itself, with #/")
    if len(schema.get("allOf") or ()) > 1:
        raise FieldError(_under(path, "allOf"), "of several schemas is not served: merge them")
    patterns = [schema.get("pattern", "")]
    if isinstance(by_pattern := schema.get("patternProperties"), dict):
        patterns += by_pattern
    for pattern in patterns:
        _check_pattern(pattern, _under(path, "pattern"))


def _check_pattern(pattern: Any, path: str) -> None:
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        raise FieldError(path, f"must be a string of at most {MAX_PATTERN_CHARS} characters")
    if "(?" in pattern.replace("(?:", ""):
        raise FieldError(path, "looks around or names groups, which is not served")
    if re.search(r"\\[bB1-9]", pattern):
        raise FieldError(path, "looks around or refers back, which is not served")
    if '"' in pattern or "\\\\" in pattern:
        raise FieldError(path, "holds a quote or a backslash itself, which is not served")
    product = 1
    for count in _REPEATED.findall(pattern):
        product *= max(int(count[:9]), 1)
    if product > MAX_COUNT:
        raise FieldError(path, f"repeats what it holds more than {MAX_COUNT} times")


def _parts(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """The schemas right within ``schema``, each with its path."""
    for keyword in _BY_NAME:
        held = schema.get(keyword, {})
        if not isinstance(held, dict):
            raise FieldError(_under(path, keyword), f"must be an object, got {wrong_shape(held)}")
        yield from ((_under(_under(path, keyword), name), part) for name, part in held.items())
    for keyword in _LISTS:
        held = schema.get(keyword, [])
        if not isinstance(held, list):
            raise FieldError(_under(path, keyword), f"must be a list, got {wrong_shape(held)}")
        yield from ((f"{_under(path, keyword)}[{at}]", part) for at, part in enumerate(held))
    for keyword in _SINGLE:
        if keyword not in schema:
            continue
        held = schema[keyword]
        if isinstance(held, list):  # the older spelling of prefixItems
            yield from ((f"{_under(path, keyword)}[{at}]", part) for at, part in enumerate(held))
        else:
            yield _under(path, keyword), held


def _under(path: str, name: str) -> str:
    return f"{path}.{printable(name)}"
