"""Pins the command line: the same flags give the same configuration everywhere, what is wrong is
one clear line and never a traceback, and nothing here waits for torch.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.frontend_kit import byte_level_folder

from mstar_tp.cli.main import main
from mstar_tp.common.errors import ConfigError
from mstar_tp.common.version import VERSION
from mstar_tp.config import ServeConfig
from mstar_tp.config.flags import ALIASES, OPTIONS, PEERS_FLAGS
from mstar_tp.config.limits import LimitsConfig
from mstar_tp.config.parsers import ModelParser
from mstar_tp.config.section import GROUPS, Flag
from mstar_tp.config.server_flags import add_config_arguments, config_from_args
from mstar_tp.config.tree import all_fields


def parse(*argv: str) -> ServeConfig:
    parser = ModelParser()
    add_config_arguments(parser)
    return config_from_args(parser.parse_args(argv))


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mstar_tp", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def value_at(config: ServeConfig, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


GIVEN: dict[str, tuple[tuple[str, ...], Any]] = {
    "engine.tensor_parallel_size": (("2",), 2),
    "engine.dtype": (("bfloat16",), "bfloat16"),
    "engine.device": (("cpu",), "cpu"),
    "engine.max_model_len": (("128",), 128),
    "engine.max_num_seqs": (("8",), 8),
    "engine.max_num_batched_tokens": (("256",), 256),
    "engine.async_scheduling": ((), True),
    "engine.enforce_eager": ((), True),
    "engine.graph_rows": (("4", "1"), (4, 1)),
    "engine.graph_tokens": (("16",), (16,)),
    "engine.block_size": (("4",), 4),
    "engine.kv_cache_memory_bytes": (("1000",), 1000),
    "engine.num_kv_pages": (("9",), 9),
    "engine.kv_offloading_size": (("0.5",), 0.5),
    "engine.prefix_caching": ((), True),
    "engine.attention_backend": (("triton",), "triton"),
    "engine.batch_invariant": ((), True),
    "engine.threads": (("1",), 1),
    "engine.scheduling_policy": (("priority",), "priority"),
    "server.tool_call_parser": (("mistral",), "mistral"),
    "engine.logprobs_mode": (("raw_logits",), "raw_logits"),
    "engine.max_logprobs": (("5",), 5),
    "engine.read_timeout_s": (("1.5",), 1.5),
    "engine.start_timeout_s": (("9",), 9.0),
    "engine.step_timeout_s": (("7",), 7.0),
    "engine.record": (("run.rec",), "run.rec"),
    "engine.lora.adapters": (("a=x", "b=y=z"), {"a": "x", "b": "y=z"}),
    "engine.lora.max_loras": (("3",), 3),
    "engine.lora.max_lora_rank": (("32",), 32),
    "engine.lora.max_lora_saved_rows": (("7",), 7),
    "engine.lora.max_cpu_loras": (("20",), 20),
    "engine.lora.max_cpu_lora_bytes": (("4096",), 4096),
    "engine.lora.roots": (("r", "s"), ("r", "s")),
    "engine.lora.adapters_root": (("r",), "r"),
    "engine.lora.on_demand": (("--adapters-root", "r"), True),
    "engine.lora.max_on_demand": (("3",), 3),
    "engine.lora.exclude": ((r".*\.experts\..*", "x"), (r".*\.experts\..*", "x")),
    "engine.lora.limits": (
        ("a=pinned,weight=2", "b=max_rows=3,max_queued=9"),
        {
            "a": LimitsConfig(pinned=True, weight=2.0),
            "b": LimitsConfig(max_rows=3, max_queued=9),
        },
    ),
    "engine.lora.default_limits": (("weight=0.5",), LimitsConfig(weight=0.5)),
    "engine.lora.base_limits": (("max_rows=3",), LimitsConfig(max_rows=3)),
    "server.served_model_name": (("one", "two"), ("one", "two")),
    "server.host": (("::1",), "::1"),
    "server.port": (("0",), 0),
    "server.api_key": (("k",), ("k",)),
    "server.admin_key": (("root",), "root"),
    "server.api_key_file": (("keys.yaml",), "keys.yaml"),
    "server.max_queue": (("7",), 7),
    "server.prepare_threads": (("3",), 3),
    "server.shutdown_grace_s": (("2.5",), 2.5),
    "server.max_restarts": (("3",), 3),
    "server.state_file": (("state.json",), "state.json"),
    "server.metrics_adapters": (("5",), 5),
    "server.log_format": (("json",), "json"),
    "server.enable_log_requests": ((), True),
    "server.otlp_traces_endpoint": (("http://c:4318/v1/traces",), "http://c:4318/v1/traces"),
}


def test_every_field_has_one_flag_in_one_group_with_one_help_text() -> None:
    for key, field in all_fields():
        flags = [each for each in field.metadata if isinstance(each, Flag)]
        if key == "engine.model":
            assert not flags, "it is the first argument"
            continue
        [flag] = flags
        assert flag.group in GROUPS and len(flag.help.split()) >= 3, key
        assert "(default" not in flag.help, f"{key}: the default is the field's"
        assert len([option for option in OPTIONS if option.key == key]) == 1
    spellings = [flag for option in OPTIONS for flag in option.flags]
    assert len(set(spellings)) == len(spellings) and set(ALIASES) < set(spellings)
    assert set(ALIASES.values()) <= {option.flags[0] for option in OPTIONS}


def test_defaults_in_help_are_those_of_the_fields() -> None:
    fields = dict(all_fields())
    for option in OPTIONS:
        value = fields[option.key].get_default(call_default_factory=True)
        _, _, told = option.help.partition(" (default")
        [flag] = [each for each in fields[option.key].metadata if isinstance(each, Flag)]
        if flag.unset is not None:
            assert not value and told == f": {flag.unset})", "words stand for nothing else"
        elif isinstance(value, bool):
            assert told == f": {'on' if value else 'off'})"
        elif isinstance(value, int | float | str):
            kind = type(value)
            assert kind(re.split(r"[);:]", told)[0].strip()) == value, option.key
        else:
            assert not told


def test_help_lists_each_flag_in_its_group() -> None:
    parser = ModelParser()
    add_config_arguments(parser)
    told = {
        action.dest: group.title
        for group in parser._action_groups
        for action in group._group_actions
    }
    assert {option.key: option.group for option in OPTIONS}.items() <= told.items()
    assert [g.title for g in parser._action_groups if g.title in GROUPS] == list(GROUPS)


def test_this_file_knows_every_flag() -> None:
    assert set(GIVEN) == {option.key for option in OPTIONS}


@pytest.mark.parametrize("flag", [flag for option in OPTIONS for flag in option.flags])
def test_every_spelling_of_every_flag_sets_its_key(flag: str, tmp_path: Path) -> None:
    key = next(option.key for option in OPTIONS if flag in option.flags)
    values, wanted = GIVEN[key]
    assert value_at(parse(str(tmp_path), flag, *values), key) == wanted


def test_a_switch_is_turned_off_by_its_no_form_on_the_command_line_and_in_a_file(
    tmp_path: Path,
) -> None:
    assert parse(str(tmp_path)).engine.async_scheduling is None, "left to the ranks"
    assert parse(str(tmp_path), "--no-async-scheduling").engine.async_scheduling is False
    file = tmp_path / "serve.yaml"
    file.write_text("engine:\n  model: m\n  async_scheduling: false\n")
    assert parse(str(file)).engine.async_scheduling is False
    assert parse(str(file), "--async-scheduling").engine.async_scheduling is True


def test_limits_that_are_none_are_told_by_their_flag_and_defaults_fill_what_is_unset() -> None:
    lora = parse(
        "/", "--lora-limits", "a=weight=2", "--lora-default-limits", "weight=3,max_rows=4"
    ).engine.lora
    assert lora is not None
    assert lora.limits_of("a") == LimitsConfig(weight=2, max_rows=4)
    assert lora.limits_of("b") == LimitsConfig(weight=3, max_rows=4)
    assert lora.limits_of(None) == LimitsConfig()
    for given, problem in {
        ("--lora-limits", "a"): "--lora-limits: got 'a', wanted NAME=pinned,weight=W,max_rows=N",
        ("--lora-limits", "a=pinned=", "x"): "got 'pinned=' in 'pinned='",
        ("--lora-limits", "a=weight=0"): "limits.a.weight: got '0', wanted greater than or equal",
        ("--lora-limits", "a=weigth=1"): (
            "limits.a.weigth is no setting: did you mean engine.lora.limits.a.weight?"
        ),
        ("--lora-base-limits", "x=1"): (
            "base_limits.x is no setting: there are pinned, weight, max_rows, max_queued"
        ),
        ("--lora-base-limits", "pinned"): "--lora-base-limits: pinned is for single adapters",
        ("--lora", "a=x", "b=y", "--lora-limits", "a=pinned", "b=pinned", "--max-loras", "2"): (
            "--lora-limits: 2 adapters are pinned, wanted fewer than --max-loras = 2"
        ),
    }.items():
        with pytest.raises(ConfigError) as refused:
            parse("/", *given)
        assert problem in str(refused.value)


def test_lists_take_vllms_spelling_and_ours() -> None:
    ours = parse("/", "--lora", "a=x", "--lora", "b=y")
    assert ours == parse("/", "--lora-modules", "a=x", "b=y")
    assert ours.engine.lora is not None and list(ours.engine.lora.adapters) == ["a", "b"]


def test_flags_override_a_file_and_leave_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("engine:\n  model: m\n  max_num_seqs: 3\nserver:\n  port: 1\n")
    config = parse(str(file), "--port", "2")
    assert (config.engine.max_num_seqs, config.server.port) == (3, 2)
    assert config.digest() == parse(str(file)).digest()


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (("nowhere",), "nowhere: no such folder"),
        (("nowhere.yaml",), "nowhere.yaml: cannot be read"),
        (("/", "--tp", "0"), "--tp: got '0', wanted greater than 0"),
        (("/", "--tensor-parallel-size", "two"), "--tensor-parallel-size: got 'two'"),
        (("/", "--lora", "noequals", "--lora", "=x"), "--lora: got 'noequals', wanted NAME=PATH"),
        (
            ("/", "--lora-modules", "a=x", "a=y"),
            "--lora-modules: 'a' names two adapters, x and y: give one of them another name",
        ),
        (("/", "--lora", "base=x", "--served-model-name", "base"), "'base' is a name of the base"),
        (
            ("/", "--max-loras", "4", "--max-cpu-loras", "2"),
            "--max-cpu-loras is 2, wanted at least --max-loras = 4",
        ),
        (("/", "--port", "70000"), "--port: got '70000', wanted less than or equal to 65535"),
    ],
)
def test_bad_flags_are_refused_by_name(argv: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(*argv)
    assert wanted in str(refused.value)
    assert "engine." not in str(refused.value) and "server." not in str(refused.value)


@pytest.mark.parametrize(
    "argv",
    [
        ("--lora", "a=x", "b=y", "/", "--tp", "2"),
        ("--api-key", "k", "--tp", "2", "--lora", "a=x", "/", "--lora", "b=y"),
        ("--tp", "2", "/", "--lora", "a=x", "b=y"),
        ("--lora", "a=x", "--lora=b=y", "--tp=2", "/"),
        ("--lora", "a=x", "b=y", "--tp", "2", "--lora-root", "r", "/"),
    ],
)
def test_the_model_may_stand_behind_a_flag_that_takes_several_values(argv: tuple[str, ...]) -> None:
    engine = parse(*argv).engine
    assert (engine.model, engine.tensor_parallel_size) == ("/", 2)
    assert engine.lora is not None and engine.lora.adapters == {"a": "x", "b": "y"}


def test_what_comes_from_a_file_is_named_by_its_key_and_what_comes_from_a_flag_by_that(
    tmp_path: Path,
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("engine:\n  model: m\n  block_size: 0\n  max_num_batched_tokens: 4\n")
    with pytest.raises(ConfigError) as refused:
        parse(str(file), "--port", "x", "--max-num-seqs", "8")
    assert str(refused.value).splitlines() == [
        f"{file}: engine.block_size: got 0, wanted greater than 0",
        "--port: got 'x', wanted a valid integer",
        f"{file}: engine: max_num_batched_tokens is 4, wanted at least --max-num-seqs = 8: every "
        "running row needs a token a step",
    ]


def test_a_refusal_is_one_line_on_stderr_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "nowhere"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: nowhere: no such folder")
    assert len(captured.err.splitlines()) == 1 and captured.out == ""


@pytest.mark.parametrize("output", ["/dev/full", None], ids=["full", "closed"])
def test_an_output_that_takes_nothing_is_told_in_one_line(output: str | None) -> None:
    demo = Path(__file__).resolve().parents[3] / "launch" / "demo" / "adapters" / "pirate"
    to = ">&-" if output is None else f">{output}"
    command = f"{shlex.quote(sys.executable)} -m mstar_tp inspect {shlex.quote(str(demo))} {to}"
    done = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    said = "error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == ((0, "") if output is None else (1, said))


def test_a_nul_in_a_setting_is_refused_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text('engine:\n  model: m\n  lora: {adapters: {a: "x\\0"}, roots: ["r\\0"]}\n')
    with pytest.raises(ConfigError) as refused:
        parse(str(path))
    first, second = str(refused.value).splitlines()
    assert "engine.lora.adapters" in first and "engine.lora.roots" in second
    assert "NUL" in first and "NUL" in second and "\0" not in str(refused.value)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"{VERSION}\n"
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out == f"{VERSION}\n"


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["serve"], "error: MODEL is missing: folder of the base model"),
        (["frontend", "/"], "error: --listen is missing: where ranks find this process"),
        ([], "error: COMMAND is missing: it is one of serve, frontend,"),
        (
            ["serve", "/", "--max-lora", "3"],
            "error: --max-lora is no flag of `mstar-tp serve`: d",
        ),
        (["bench", "serving", "--nope"], "error: --nope is no flag of `mstar-tp bench serving`"),
        (
            ["serve", "/", "--enable-lora"],
            "error: --enable-lora is no flag of `mstar-tp serve`: leave",
        ),
        (["serve", "/", "too-much"], "error: 'too-much' is one word too many"),
        (["no-such-command"], "error: argument COMMAND: invalid choice: 'no-such-command'"),
    ],
)
def test_a_command_line_that_is_wrong_is_told_in_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], wanted: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(argv)
    told = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2
    assert told[0].startswith(wanted) and told[1].startswith("See `mstar-tp") and len(told) == 2


def test_help_names_every_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "frontend"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        assert all(option.flags[0] in text for option in OPTIONS)
        assert "VALUE" not in text and "--port PORT" in text and "MODEL" in text
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "MSTAR_TP_SECRET" in capsys.readouterr().out


def test_a_taken_port_is_named_before_any_rank_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("serve", str(byte_level_folder(tmp_path)), "--port", port)
    assert done.returncode == 1
    assert f"port {port}" in done.stderr and "Traceback" not in done.stderr
    assert "Starting" not in done.stdout


def test_a_folder_without_a_tokenizer_and_an_open_wire_are_refused(tmp_path: Path) -> None:
    done = run("serve", str(tmp_path), "--port", "0")
    assert done.returncode == 1 and "tokenizer.json: not found" in done.stderr
    model = str(byte_level_folder(tmp_path))
    done = run("frontend", model, "--port", "0", "--listen", "tcp://0.0.0.0:0")
    assert done.returncode == 1 and "--listen" in done.stderr
    assert "Traceback" not in done.stderr


def test_starting_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import mstar_tp.cli.main, mstar_tp.frontend.supervisor; "
        "print(*sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""


def test_flags_of_peers_that_are_none_here_are_on_the_page_about_migrating() -> None:
    page = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text()
    ours = {name for option in OPTIONS for name in option.flags}
    for flag in PEERS_FLAGS:
        assert f"`{flag}" in page and flag not in ours
