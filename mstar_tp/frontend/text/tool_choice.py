"""The fields of a chat that shape its answer: tools, the choice among them, and response_format.

What the chat template is given, and the grammar that the answer is held to, follow from them. Pure
functions; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from mstar_tp.frontend.api.api_errors import FieldError
from mstar_tp.frontend.text.schemas import MAX_SCHEMA_BYTES, check_schema
from mstar_tp.frontend.text.tool_forms import ToolForm, calls_grammar
from mstar_tp.wire.values import Grammar

MAX_TOOLS = 128
ANY_OBJECT: dict[str, Any] = {"type": "object"}
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class Function(_Part):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "object") != "object":
            raise ValueError('must be the schema of an object: set its type to "object"')
        return value


class Tool(_Part):
    type: Literal["function"]
    function: Function


class _Named(BaseModel):
    model_config = ConfigDict(strict=True)

    name: ToolName


class NamedChoice(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: _Named


def _choice(value: Any) -> Any:
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise ValueError("must be none, auto, required, or an object that names a function")
    return value


ToolChoice = Annotated[str | NamedChoice, BeforeValidator(_choice)]


class JsonSchema(_Part):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_text(self, field: str) -> dict[str, Any] | None:
        """The schema that answers are held to; None: any text.

        Raises:
            FieldError: there is none, or no answer can be held to it.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return ANY_OBJECT
        where = f"{field}.json_schema"
        if self.json_schema is None:
            raise FieldError(where, "is required with type json_schema")
        if self.json_schema.schema_ is None:
            raise FieldError(f"{where}.schema", "is required")
        check_schema(self.json_schema.schema_, f"{where}.schema")
        return self.json_schema.schema_


class Structure(BaseModel):
    """A chat's fields that say what its answer may be. Mixed into its request."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """``none``, ``auto``, ``required``, or one function by name."""
    parallel_tool_calls: bool | None = None
    """False: the first call alone (default true)."""
    response_format: ResponseFormat | None = None
    """``text``, ``json_object``, or ``json_schema`` with its schema."""

    @property
    def offers_tools(self) -> bool:
        """Return whether the model is told of any."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def several_calls(self) -> bool:
        return self.parallel_tool_calls is not False and not isinstance(
            self.tool_choice, NamedChoice
        )

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates are given them."""
        if not self.offers_tools:
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    def check_structure(self) -> None:
        """Raises FieldError: fields that do not go together, or a schema that nothing keeps to."""
        names = [tool.function.name for tool in self.tools or ()]
        for at, name in enumerate(names):
            if name in names[:at]:
                raise FieldError(f"tools[{at}].function.name", "names two tools")
        if isinstance(self.tool_choice, NamedChoice):
            if self.tool_choice.function.name not in names:
                raise FieldError("tool_choice.function.name", "names none of the tools")
        elif self.tool_choice == "required" and not names:
            raise FieldError("tool_choice", "is required, and there are no tools")
        schema = None
        if self.response_format is not None:
            schema = self.response_format.schema_text("response_format")
        if self.offers_tools and (self._forces_calls or schema is not None):
            size = 0
            for at, tool in enumerate(self.tools or ()):
                if tool.function.parameters:
                    field = f"tools[{at}].function.parameters"
                    size += len(check_schema(tool.function.parameters, field))
            if size > MAX_SCHEMA_BYTES:
                raise FieldError(
                    "tools",
                    f"have schemas of {size} characters together, and may have {MAX_SCHEMA_BYTES} "
                    "where the answer is held to them",
                )

    def grammar(self, form: ToolForm | None) -> Grammar | None:
        """Return what the answer is held to, if anything.

        ``form``: of calls, where tools are offered.
        """
        wanted = self.response_format
        schema = None if wanted is None else wanted.schema_text("response_format")
        if form is not None and self.offers_tools and (self._forces_calls or schema is not None):
            functions = self._functions()
            instead = None if self._forces_calls else schema
            return calls_grammar(form, functions, several=self.several_calls, instead=instead)
        if schema is None:
            return None
        return Grammar(kind="json_schema", text=json.dumps(schema), field="response_format")

    @property
    def _forces_calls(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    def _functions(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, schema of its arguments) of those that may be called."""
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedChoice):
            wanted = self.tool_choice.function.name
            functions = [function for function in functions if function.name == wanted]
        return [
            (function.name, {**ANY_OBJECT, **(function.parameters or {})}) for function in functions
        ]


def parsed_arguments(calls: Sequence[Any], path: str) -> list[dict[str, Any]]:
    """A message's tool calls with their arguments as objects, which is what templates read.

    Raises:
        FieldError: naming the path of what is no call.
    """
    found = []
    for at, call in enumerate(calls):
        where = f"{path}[{at}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise FieldError(where, "must be an object with a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                raise FieldError(f"{where}.arguments", "must be JSON") from None
        if not isinstance(arguments, dict):
            raise FieldError(f"{where}.arguments", "must be an object, or its JSON")
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found
