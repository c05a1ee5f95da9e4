"""Pins who may ask for what: every kind of key against every kind of route, that a listing shows no
more than may be asked for, and that no answer tells whether a name exists to one who may not use
it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.api_kit import Api

from mstar_tp.common import env
from mstar_tp.common.errors import ConfigError
from mstar_tp.config import ServerConfig
from mstar_tp.frontend.api.access import Access, key_ring, read_keys

KEYS = {
    "whole": {"key": "k-whole"},
    "hashed": {"sha256": hashlib.sha256(b"k-hashed").hexdigest(), "name": "hashed"},
    "pirates": {"key": "k-pirates", "adapters": ["pir*", "team/*"], "base": False},
    "based": {"key": "k-based", "adapters": []},
    "boss": {"key": "k-boss", "adapters": ["other"], "admin": True},
}
ALLOWED = {
    # key: (base, pirate, an unknown name it may use, whether it is an operator's)
    "whole": (200, 200, 404, 403),
    "hashed": (200, 200, 404, 403),
    "pirates": (403, 200, 403, 403),
    "based": (200, 403, 403, 403),
    "boss": (200, 403, 403, 200),
    "wrong": (401, 401, 401, 401),
    "": (401, 401, 401, 401),
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": list(KEYS.values())}))
    api = Api(folder, api_key_file=str(folder / "keys.yaml"), admin_key="root")
    yield api
    api.close()


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer k-{name}"} if name else {}


@pytest.mark.parametrize("name", ALLOWED)
def test_each_key_may_do_what_its_entry_says_and_no_more(api: Api, name: str) -> None:
    base, pirate, unknown, operator = ALLOWED[name]
    with api.http(headers=headers(name)) as http:
        for model, wanted in (("tiny", base), ("alias", base), ("pirate", pirate), ("x", unknown)):
            body = {"model": model, "prompt": "x", "max_tokens": 1}
            answers = [http.post("/v1/completions", json=body)]
            answers.append(http.post("/v1/completions", json=body | {"stream": True}))
            chat = {"model": model, "messages": [{"role": "user", "content": "x"}]}
            answers.append(http.post("/v1/chat/completions", json=chat | {"max_tokens": 1}))
            answers.append(http.post("/v1/responses", json={"model": model, "input": "x"}))
            answers.append(http.post("/tokenize", json=body))
            answers.append(http.post("/detokenize", json={"model": model, "tokens": [5]}))
            answers.append(http.get(f"/v1/models/{model}"))
            assert {answer.status_code for answer in answers} == {wanted}, (model, answers)
            if wanted != 200:
                errors = [answer.json()["error"] for answer in answers]
                codes = {401: "invalid_api_key", 403: "model_not_allowed", 404: "model_not_found"}
                assert {error["code"] for error in errors} == {codes[wanted]}
                assert {error["type"] for error in errors} == {"invalid_request_error"}
        both = {"model": "tiny", "lora_adapter": "pirate", "prompt": "x", "max_tokens": 1}
        answer = http.post("/v1/completions", json=both)
        assert answer.status_code == max(base, pirate)
        answers = [
            http.get("/debug/state"),
            http.post("/v1/unload_lora_adapter", json={"lora_name": "nobody"}),
        ]
        # An operator finds that there is no such adapter, nobody else learns as much.
        assert [answer.status_code for answer in answers] == [
            operator,
            {200: 404}.get(operator, operator),
        ]
        for route in ("/health", "/ping", "/version", "/metrics", "/openapi.json"):
            assert http.get(route).status_code == 200, route


def test_a_listing_shows_what_its_key_may_name(api: Api) -> None:
    for name, wanted in {
        "whole": {"tiny", "alias", "pirate"},
        "pirates": {"pirate"},
        "based": {"tiny", "alias"},
    }.items():
        with api.http(headers=headers(name)) as http:
            listed = {card["id"] for card in http.get("/v1/models").json()["data"]}
            assert listed == wanted


def test_names_that_exist_and_names_that_do_not_are_refused_alike(api: Api) -> None:
    with api.http(headers=headers("based")) as http:
        texts = []
        for model in ("pirate", "absent"):
            answer = http.post("/v1/completions", json={"model": model, "prompt": "x"})
            texts.append(answer.text.replace(model, "NAME"))
        assert texts[0] == texts[1]


def test_the_official_client_knows_the_refusals(api: Api) -> None:
    with pytest.raises(openai.PermissionDeniedError) as denied:
        api.client(api_key="k-based").completions.create(model="pirate", prompt="x")
    assert denied.value.code == "model_not_allowed"
    with pytest.raises(openai.AuthenticationError):
        api.client(api_key="k-nobody").completions.create(model="pirate", prompt="x")


def test_the_operators_key_opens_the_operators_routes_alone(api: Api) -> None:
    with api.http(headers={"Authorization": "Bearer root"}) as http:
        assert http.get("/debug/state").status_code == 200
        assert http.get("/v1/models").status_code == 401
    for header in ("Basic root", "root", "Bearer", "Bearer root x", "Bearer ROOT"):
        with api.http(headers={"Authorization": header}) as http:
            assert http.get("/debug/state").status_code == 401, header


def test_keys_of_the_environment_count_and_need_no_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MSTAR_TP_API_KEY", "one two")
    monkeypatch.setenv("MSTAR_TP_ADMIN_KEY", "root")
    ring = key_ring(ServerConfig(api_key=("three", "one")))
    for key, served in (("one", True), ("two", True), ("three", True), ("root", False)):
        request = httpx.Request("GET", "http://x", headers={"Authorization": f"Bearer {key}"})
        if served:
            assert ring.client(request) == Access()  # type: ignore[arg-type]
        else:
            ring.operator(request)  # type: ignore[arg-type]
    monkeypatch.setenv("MSTAR_TP_ADMIN_KEY", "root again")
    with pytest.raises(ConfigError, match="MSTAR_TP_ADMIN_KEY"):
        key_ring(ServerConfig())


def test_no_process_that_the_server_starts_is_given_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MSTAR_TP_API_KEY", "MSTAR_TP_ADMIN_KEY", "SOMETHING_ELSE"):
        monkeypatch.setenv(name, "secret")
    given = env.child_environment(MORE="1")
    assert (given["SOMETHING_ELSE"], given["MORE"]) == ("secret", "1")
    assert not {"MSTAR_TP_API_KEY", "MSTAR_TP_ADMIN_KEY"} & set(given)


def test_without_an_operators_key_only_whole_keys_manage() -> None:
    ring = key_ring(ServerConfig(api_key=("one",)))
    request = httpx.Request("GET", "http://x", headers={"Authorization": "Bearer one"})
    ring.operator(request)  # type: ignore[arg-type]
    key_ring(ServerConfig()).operator(httpx.Request("GET", "http://x"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: []", "wanted one key 'keys'"),
        ("- key: a", "wanted one key 'keys'"),
        ("keys:\n  - {key: SECRET, sha256: x}", "entry 1"),
        ("keys:\n  - {key: SECRET}\n  - {adapters: [a]}", "entry 2"),
        ("keys:\n  - {key: SECRET, adaptors: [a]}", "entry 1, adaptors"),
        ("keys:\n  - {key: SECRET, base: maybe}", "entry 1, base"),
        ("keys:\n  - {key: SECRET, adapters: a}", "entry 1, adapters"),
        ("keys:\n  - {key: ' SECRET'}", "spaces around it"),
        ("keys: [SECRET", "is no YAML"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_a_bad_key_file_is_refused_and_no_key_is_told(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as refused:
        read_keys(str(file))
    assert message in str(refused.value) and str(file) in str(refused.value)
    assert "SECRET" not in str(refused.value)


def test_one_key_may_stand_once(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n  - {key: a, name: mine, base: false}\n")
    with pytest.raises(ConfigError, match="number 1 and mine are the same") as refused:
        key_ring(ServerConfig(api_key=("a",), api_key_file=str(file)))
    assert "'a'" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none.yaml"))


NAMES = st.text(alphabet="ab/*", min_size=1, max_size=5)


@given(st.lists(NAMES, max_size=3), NAMES, st.booleans())
def test_a_pattern_is_the_name_itself_or_stars_for_any_text(
    patterns: list[str], name: str, base: bool
) -> None:
    access = Access(adapters=tuple(patterns), base=base)
    parts = [re.compile(".*".join(map(re.escape, pattern.split("*")))) for pattern in patterns]
    assert access.allows(name, ("base",)) == any(part.fullmatch(name) for part in parts)
    assert access.allows("base", ("base",)) == base
