"""Adapters that ship a tokenizer or a chat template: their prompts are what transformers makes of
their folders; what does not go with the base model is refused by the adapter's name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from support.api_kit import Api

from mstar_tp.wire.commands import NewRequest

CHAT: list[Any] = [{"role": "user", "content": "hi"}]
OWN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("tokenizers"))
    yield api
    api.close()


def load(http: httpx.Client, folder: Path) -> httpx.Response:
    body = {"lora_name": folder.name, "lora_path": str(folder)}
    return http.post("/v1/load_lora_adapter", json=body)


def copy_of_base(api: Api, name: str) -> Path:
    """An adapter's folder with the base model's tokenizer."""
    return Path(shutil.copytree(api.config.engine.model, Path(api.roots) / name))


def asked(api: Api, model: str) -> NewRequest:
    client = api.client()
    client.chat.completions.create(model=model, messages=CHAT, max_tokens=1)
    return api.ranks.messages(NewRequest)[-1]


def wanted(folder: Path) -> tuple[int, ...]:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    return tuple(ids)


def test_prompts_are_written_with_what_the_adapter_ships(api: Api) -> None:
    (end,) = api.ids("<|user|>")
    template = Path(api.roots) / "template"
    template.mkdir()
    (template / "chat_template.jinja").write_text(OWN)
    trained = copy_of_base(api, "trained")
    config = json.loads((trained / "tokenizer_config.json").read_text())
    config |= {"chat_template": OWN, "eos_token": "<|user|>"}
    (trained / "tokenizer_config.json").write_text(json.dumps(config))
    with api.http() as http:
        assert load(http, template).status_code == load(http, trained).status_code == 200
        base = asked(api, "tiny").prompt
        assert base == wanted(Path(api.config.engine.model)) == asked(api, "pirate").prompt
        request = asked(api, "trained")
        assert request.prompt == wanted(trained) and request.prompt[-1] == end
        # Its answers end at its own end token too.
        assert end in request.params.stop_token_ids
        mine = asked(api, "template")
        text = api.tokenizer.decode(mine.prompt, skip_special_tokens=False)
        assert text.startswith("[user]hi") and end not in mine.params.stop_token_ids
        told = http.post("/tokenize", json={"model": "trained", "messages": CHAT}).json()
        assert tuple(told["tokens"]) == request.prompt


def test_other_ids_and_broken_templates_are_refused_by_the_adapters_name(api: Api) -> None:
    other = copy_of_base(api, "other")
    tree = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tree))
    broken = Path(api.roots) / "broken"
    broken.mkdir()
    (broken / "chat_template.jinja").write_text("{% for %}")
    outside = Path(api.roots) / "outside"
    outside.mkdir()
    (outside / "chat_template.jinja").symlink_to("/etc/hostname")
    with api.http() as http:
        for folder, why in (
            (other, "has id"),
            (broken, "does not compile"),
            (outside, "leads outside"),
        ):
            answer = load(http, folder)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == "lora_path" and why in error["message"]
            assert folder is outside or f"'{folder.name}'" in error["message"]
            gone = http.post("/v1/completions", json={"model": folder.name, "prompt": "a"})
            assert gone.status_code == 404


@pytest.mark.parametrize(
    "config",
    ['{"chat_template": [5]}', '{"model_specific_special_tokens": [5]}', "[" * 100_000],
    ids=["template", "special tokens", "depth"],
)
def test_files_of_other_shapes_are_refused(api: Api, tmp_path: Path, config: str) -> None:
    folder = copy_of_base(api, tmp_path.name)
    (folder / "tokenizer_config.json").write_text(config)
    with api.http() as http:
        answer = load(http, folder)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_path"


SPIN = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
RECURSE = "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}"
DOUBLE = (
    "{% set s = namespace(t='x') %}"
    "{% for i in range(60) %}{% set s.t = s.t ~ s.t %}{% endfor %}{{ s.t }}"
)


def test_templates_of_adapters_have_bounds(api: Api) -> None:
    """Loops without an end and texts without a bound end their own request alone."""
    for name, source in {
        "spin": SPIN, "recurse": RECURSE, "double": DOUBLE, "fold": "{{ 'x' * 10 ** 10 }}"
    }.items():  # fmt: skip
        folder = Path(api.roots) / name
        folder.mkdir()
        (folder / "chat_template.jinja").write_text(source)
    bounds = (
        ("spin", "takes more"), ("recurse", "recursion"), ("double", "MiB"), ("fold", "MiB")
    )  # fmt: skip
    with api.http() as http:
        for name, why in bounds:
            assert load(http, Path(api.roots) / name).status_code == 200
            answer = http.post("/tokenize", json={"model": name, "messages": CHAT})
            assert answer.status_code == 400 and why in answer.json()["error"]["message"]
        assert asked(api, "pirate").prompt == asked(api, "tiny").prompt
