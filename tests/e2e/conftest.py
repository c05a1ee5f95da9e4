"""One small real server for all tests that leave a server as they found it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mstar_tp.testing.server import Server

DEMO = Path(__file__).parents[2] / "launch" / "demo"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall: <tool_call>{% for tool in tools %}"
    "{{ tool.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def api_key() -> str:
    return "sk-test"


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory, api_key: str) -> Iterator[Server]:
    """The demo model as "base" on two ranks with adapters "loud" and "odd/name", which answer
    otherwise, behind ``api_key``. Its chat template takes tools.
    """
    model = tmp_path_factory.mktemp("shared") / "model"
    shutil.copytree(DEMO / "model", model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    adapters = ["--lora", f"loud={DEMO}/adapters/shouting"]
    adapters += ["--lora", f"odd/name={DEMO}/adapters/robot"]
    flags = "--tp 2 --threads 1 --dtype float32 --max-model-len 256 --scheduling-policy priority"
    with Server(
        str(model), "--served-model-name", "base", *adapters, *flags.split(),
        "--max-loras", "2", "--lora-root", str(DEMO / "adapters"), "--api-key", api_key,
    ) as server:  # fmt: skip
        yield server
