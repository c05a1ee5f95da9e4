"""Answers under a grammar from a real server: valid, the same streamed and whole, and the same when
a rank dies in the middle of one.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from support.processes import ranks

from mstar_tp.testing.server import Server

MODEL = str(Path(__file__).parents[2] / "launch" / "demo" / "model")
CHAT: list[Any] = [{"role": "user", "content": "Name some colours."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "words": {
            "type": "array",
            "items": {"type": "string", "minLength": 2, "maxLength": 9},
            "minItems": 30,
            "maxItems": 30,
        },
        "sure": {"type": "boolean"},
    },
    "required": ["words", "sure"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA}}


def test_an_answer_keeps_to_its_schema_over_the_death_of_a_rank() -> None:
    args = (
        "--served-model-name",
        "demo",
        "--max-model-len",
        "600",
        "--threads",
        "1",
        "--dtype",
        "float32",
    )
    with Server(MODEL, "--tp", "2", *args) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)
        asked: Any = {
            "model": "demo",
            "messages": CHAT,
            "response_format": FORMAT,
            "temperature": 0.9,
            "seed": 11,
        }
        whole = client.chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == "stop" and whole.message.content is not None
        jsonschema.validate(json.loads(whole.message.content), SCHEMA)
        follower = ranks(server.process.pid)[1]
        pieces: list[str] = []
        for chunk in client.chat.completions.create(**asked, stream=True):
            pieces.append(chunk.choices[0].delta.content or "")
            if len(pieces) == 4:
                assert follower.send(signal.SIGKILL)
        assert "".join(pieces) == whole.message.content
        assert ranks(server.process.pid)[1] != follower
        with pytest.raises(openai.BadRequestError, match="response_format") as bad:
            schema = {"$ref": "#/$defs/none"}
            client.chat.completions.create(
                model="demo",
                messages=CHAT,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema},
                },
            )
        assert bad.value.param == "response_format"
        plain = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=5)
        assert plain.choices[0].message.content
