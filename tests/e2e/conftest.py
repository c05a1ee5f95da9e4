"""One small real server for all tests that leave a server as they found it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mstar_tp.testing.server import Server
from mstar_tp.testing.tiny_models import make_adapter

DEMO = Path(__file__).parents[2] / "demo" / "model"
KEY = "sk-test"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall: <tool_call>{% for tool in tools %}"
    "{{ tool.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model as "base" on two ranks with adapters "loud" and "odd/name", which answer
    otherwise, behind the key ``KEY``. Its chat template takes tools.
    """
    folder = tmp_path_factory.mktemp("shared")
    model = folder / "model"
    shutil.copytree(DEMO, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    adapters = []
    for seed, name in enumerate(("loud", "odd/name")):
        path = make_adapter(folder / str(seed), model, rank=4, seed=seed, strength=2.0)
        adapters += ["--lora", f"{name}={path}"]
    flags = "--tp 2 --threads 1 --dtype float32 --max-model-len 256 --scheduling-policy priority"
    with Server(
        str(model), "--served-model-name", "base", *adapters, *flags.split(),
        "--max-loras", "2", "--lora-root", str(folder), "--api-key", KEY,
    ) as server:  # fmt: skip
        yield server
