"""Pins the serving config: every refusal names its key, the digest covers what ranks must share,
and environment variables are parsed as strictly.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mstar_tp
from mstar_tp.common import env
from mstar_tp.common.errors import ConfigError
from mstar_tp.config import EngineConfig, ServeConfig, build_config, load_config, parse_config


def tree(**engine: object) -> dict[str, object]:
    return {"engine": {"model": "some/folder", **engine}}


def test_a_model_alone_is_enough() -> None:
    config = build_config(tree(), source="command line")
    assert config.base_names == ("some/folder",)
    assert config.engine.lora is None


@pytest.mark.parametrize(
    ("bad", "wanted"),
    [
        ({"engine": {}}, "engine.model"),
        (tree(tensor_parallel_size=0), r"engine\.tensor_parallel_size: .*got 0"),
        (tree(dtype="float64"), r"engine\.dtype: .*float64"),
        (tree(max_modellen=5), r"engine\.max_modellen"),
        (tree(max_num_seqs=64, max_num_batched_tokens=8), "max_num_batched_tokens is 8"),
        (
            tree(lora={"max_cpu_loras": 20, "max_cpu_lora_bytes": 4096}),
            r"engine\.lora: .*max_cpu_lora_bytes is 4096: give one of the two",
        ),
        (tree(lora={"max_loras": 4, "max_cpu_loras": 2}), r"engine\.lora: .*max_cpu_loras is 2"),
        (tree(lora={"adapters": {"": "x"}}), "adapters"),
        (tree(lora={"adapters": {"some/folder": "x"}}), "is a name of the base model"),
        (tree() | {"server": {"port": 70000}}, r"server\.port"),
    ],
)
def test_every_refusal_names_the_file_and_the_key(bad: dict[str, object], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted) as refused:
        build_config(bad, source="serve.yaml")
    assert all(line.startswith("serve.yaml: ") for line in str(refused.value).splitlines())


def test_all_bad_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        build_config(tree(block_size=-1, max_num_seqs="many"), source="x")
    assert "block_size" in str(refused.value) and "max_num_seqs" in str(refused.value)


def test_a_fault_in_one_section_hides_none_in_another_and_the_rest_is_kept() -> None:
    bad = {
        "engine": {
            "max_modellen": 5,
            "tensor-parallel-size": 2,
            "max_loras": 3,
            "max_num_seqs": True,
            "max_num_batched_tokens": 8,
            "lora": {"max_loras": 4, "max_cpu_loras": 2, "max_cpu_lora_bytes": 9, "roots": [1]},
        },
        "server": {"port": 70000, "host": "::1"},
        "port": 1,
        "wholly": {"unlike": "anything"},
    }
    config, problems, faulty = parse_config(bad, source="x")
    assert set(problems) == {
        "x: engine.model is missing",
        "x: engine.max_modellen is no setting: did you mean engine.max_model_len?",
        "x: engine.tensor-parallel-size is no setting: did you mean engine.tensor_parallel_size?",
        "x: engine.max_loras is no setting: did you mean engine.lora.max_loras?",
        "x: engine.max_num_seqs: got true, wanted a value, not a switch",
        "x: engine.lora.roots.0: got 1, wanted a valid string",
        "x: server.port: got 70000, wanted less than or equal to 65535",
        "x: port is no setting: did you mean server.port?",
        "x: wholly is no setting: there are engine, server",
        "x: engine: max_num_batched_tokens is 8, wanted at least max_num_seqs = 64: every running "
        "row needs a token a step",
        "x: engine.lora: max_cpu_loras is 2 and max_cpu_lora_bytes is 9: give one of the two "
        "bounds",
        "x: engine.lora: max_cpu_loras is 2, wanted at least max_loras = 4",
    }
    assert config is not None and config.server.host == "::1" and config.engine.model == ""
    assert {"server.port", "engine.lora.max_cpu_loras", "engine.max_num_seqs"} < faulty
    assert "server.host" not in faulty


@pytest.mark.parametrize("name", ["a\nb", "..", "a/../b", "/a", "a\\b", "x" * 257, "base.v1", ""])
def test_a_name_that_no_adapter_can_have_is_told_and_hides_no_other(name: str) -> None:
    tree = {
        "engine": {"model": "m", "lora": {"adapters": {name: "bad", "sql.v2": "good"}}},
        "server": {"served_model_name": ["base.v1"]},
    }
    found = parse_config(tree, source="f.yaml")
    (problem,) = found.problems
    assert "adapters" in problem
    assert "\n" not in problem
    assert found.config is not None
    assert found.config.engine.lora is not None
    assert found.config.engine.lora.adapters == {"sql.v2": "good"}


def test_a_key_that_stands_twice_in_a_file_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("engine:\n  model: m\n  lora:\n    adapters:\n      a: x\n      a: y\n")
    with pytest.raises(ConfigError, match="'a' stands twice, in lines 5 and 6"):
        load_config(path)


def test_the_digest_is_of_what_ranks_share_and_not_of_the_server() -> None:
    one = build_config(tree(), source="x")
    assert one.digest() == build_config(tree() | {"server": {"port": 1}}, source="x").digest()
    assert one.digest() != build_config(tree(max_num_seqs=3), source="x").digest()


def test_a_config_survives_its_own_yaml(tmp_path: Path) -> None:
    config = build_config(tree(lora={"adapters": {"a": "x", "b": "y"}}), source="x")
    path = tmp_path / "serve.yaml"
    path.write_text(config.dump_yaml())
    loaded = load_config(path)
    assert loaded == config and loaded.digest() == config.digest()
    assert list(loaded.engine.lora.adapters) == ["a", "b"]  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["- a list", "a: [", "\x00"])
def test_a_file_that_is_no_mapping_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_a_config_cannot_be_changed() -> None:
    config: ServeConfig = build_config(tree(), source="x")
    with pytest.raises(ValueError, match="frozen"):
        config.engine.block_size = 8  # type: ignore[misc]


# ------------------------------------------------------------------------------------ environment


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_torchrun_a_process_is_a_group_of_one(clean) -> None:
    assert env.rank_env() == env.RankEnv()


def test_torchruns_variables_say_where_a_rank_belongs(clean) -> None:
    values = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    for name, value in values.items():
        clean.setenv(name, value)
    assert env.rank_env() == env.RankEnv(
        rank=5, world_size=8, local_rank=1, local_world_size=4, restarts=2
    )


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2, wanted 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is '-1'"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is 1, wanted 0 to 0"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(clean, values, wanted) -> None:
    for name, value in values.items():
        clean.setenv(name, value)
    with pytest.raises(ConfigError, match=wanted):
        env.rank_env()


def test_the_secret_comes_from_a_variable_or_a_file_but_not_both(clean, tmp_path: Path) -> None:
    assert env.secret() is None
    clean.setenv("MSTAR_TP_SECRET", "sesame")
    assert env.secret() == "sesame"
    path = tmp_path / "secret"
    path.write_text("from a file\n")
    clean.setenv("MSTAR_TP_SECRET_FILE", str(path))
    with pytest.raises(ConfigError, match="both set"):
        env.secret()
    clean.delenv("MSTAR_TP_SECRET")
    assert env.secret() == "from a file"
    path.unlink()
    with pytest.raises(ConfigError, match=r"MSTAR_TP_SECRET_FILE: .*cannot be read"):
        env.secret()


def test_an_unknown_log_level_is_refused(clean) -> None:
    assert env.log_level() == "INFO"
    clean.setenv("MSTAR_TP_LOG_LEVEL", "verbose")
    with pytest.raises(ConfigError, match="MSTAR_TP_LOG_LEVEL is 'verbose'"):
        env.log_level()


def test_a_child_gets_this_environment_and_what_is_added(clean) -> None:
    clean.setenv("SOMETHING", "kept")
    child = env.child_environment(RANK="1")
    assert (child["SOMETHING"], child["RANK"]) == ("kept", "1")
    assert env.rank_env().rank == 0


def test_one_file_alone_reads_the_environment() -> None:
    root = Path(mstar_tp.__file__).parent
    readers = [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        if path.parent.name != "testing"
        and any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]
    assert readers == ["common/env.py"]


@pytest.mark.parametrize(
    ("given", "device", "tokens"),
    [
        ({}, "cpu", 128),
        ({}, "cuda", 2048),
        ({"max_num_seqs": 300}, "cpu", 300),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 8}, "cpu", 8),
        ({"max_num_batched_tokens": 512}, "cuda", 512),
    ],
)
def test_a_step_has_room_for_every_row_and_on_a_cpu_for_few_tokens_beside(
    given: dict[str, int], device: str, tokens: int
) -> None:
    assert EngineConfig(model="m", **given).step_tokens(device) == tokens
