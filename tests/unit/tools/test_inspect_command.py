"""Pins ``mstar-tp inspect`` and ``check``: every kind of problem gives its line, a fault in one
block hides none in another, sizes are those of the objects that serve, headers alone are read, and
what a pipe gets is plain text.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mstar_tp.cli.main import main
from mstar_tp.common.errors import CheckpointError
from mstar_tp.lora.device.slot_weights import SlotWeights
from mstar_tp.models.config.families import load_model_config
from mstar_tp.tensor_files import reader
from mstar_tp.testing.lora_files import q_pairs, random_pairs, tiny_spec, write_adapter
from mstar_tp.tools.check import findings, host_memory, render, sizes
from mstar_tp.tools.check.adapters import FileValidator, inspect_adapters, ranges
from mstar_tp.tools.check.findings import AdapterFindings, CheckReport, Finding, Inspection
from mstar_tp.tools.check.render import Page, cut

DEMO = Path(__file__).resolve().parents[3] / "launch" / "demo"
MODEL, PIRATE = DEMO / "model", DEMO / "adapters" / "pirate"
SPEC = tiny_spec()


def told(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = main([str(word) for word in argv])
    return code, capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any]]:
    code, text = told(capsys, *argv, "--json")
    return code, json.loads(text)


def texts(findings: list[dict[str, Any]], block: str) -> list[str]:
    return [finding["text"] for finding in findings if finding["block"] == block]


# ----------------------------------------------------------------------------- inspect


def test_one_adapter_is_told_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = told(capsys, "inspect", PIRATE, "--model", MODEL, "--tp", 2, "--digests")
    assert code == 0 and "\x1b" not in text
    for wanted in (
        "PEFT, BF16",
        "84 tensors, 328.4 KiB",
        "8 (alpha 16, scaling 2)",
        "CPU copy      444.0 KiB a rank at --tp 2",
        "a slot        555.8 KiB a rank at --max-lora-rank 16",
        "self_attn.q_proj  layers 0-5  rank 8",
    ):
        assert wanted in text
    assert text.splitlines()[-1] == "ok: servable"
    code, alone = as_json(capsys, "inspect", PIRATE)
    assert code == 0 and alone["model"] is None and alone["slot_bytes"] is None
    (found,) = alone["adapters"]
    assert (found["ranks"], found["alphas"], found["host_bytes"]) == ([8], [16.0], None)


def test_a_folder_of_adapters_is_told_row_by_row_the_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b", "a"):
        write_adapter(tmp_path / name, q_pairs(SPEC))
    write_adapter(tmp_path / "z", q_pairs(SPEC), use_dora=True, r=0)
    save_file({"x": torch.ones(1)}, tmp_path / "lone.safetensors")
    (tmp_path / "logs").mkdir()
    code, text = told(capsys, "inspect", tmp_path)
    lines = text.splitlines()
    assert code == 1
    assert sum(line.startswith("error: ") for line in lines[:2]) == 2, "one line an adapter"
    assert "use_dora" in lines[1] and "(and 1 more of this adapter: --all shows them)" in lines[1]
    assert "1 folders hold nothing of an adapter: logs" in text
    rows = [line.split()[0] for line in lines if line.endswith(("fine", "refused"))]
    assert rows == ["lone.safetensors", "z", "a", "b"]
    assert lines[-1].startswith("not servable: 2 of 4 adapters refused (4 adapters checked in ")
    _, text = told(capsys, "inspect", tmp_path, "--all")
    assert text.count("error: adapter 'z'") == 2


def test_a_model_folder_is_told_and_a_place_with_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = as_json(capsys, "inspect", MODEL, "--tp", 2)
    assert code == 0 and found["model"]["architecture"] == "LlamaForCausalLM"
    names = [target["name"] for target in found["model"]["targets"]]
    assert {"self_attn.qkv_proj", "mlp.down_proj", "lm_head"} < set(names)
    code, text = told(capsys, "inspect", MODEL, "--tp", 4)
    assert code == 1 and "choose --tensor-parallel-size" in text
    assert "(this model can be split over 1, 2)" in text
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert "no such file or folder" in capsys.readouterr().err
    for flag in (["--tp", "0"], ["--max-lora-rank", "x"], ["--no-such"]):
        with pytest.raises(SystemExit) as refused:
            main(["inspect", str(MODEL), *flag])
        assert refused.value.code == 2


def test_odd_names_are_told_and_a_folder_that_cannot_be_read_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = os.fsdecode(b"\xff\x1b[31m\n")
    for name in (odd, "fine"):
        write_adapter(tmp_path / name, q_pairs(SPEC))
    (tmp_path / "shut").mkdir()
    real = os.listdir

    def listdir(path: Any) -> list[str]:
        if Path(path).name == "shut":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    code, found = as_json(capsys, "inspect", tmp_path)
    assert code == 1 and {adapter["name"] for adapter in found["adapters"]} == {
        odd, "fine", "shut",
    }  # fmt: skip
    (refusal,) = texts(found["problems"], "adapters")
    assert refusal == f"adapter 'shut': {tmp_path / 'shut'}: Permission denied"
    _, text = told(capsys, "inspect", tmp_path)
    assert "\\udcff\\x1b[31m\\n  PEFT" in text and "\x1b" not in text
    code = main(["inspect", str(tmp_path / ("x" * 300))])
    err = capsys.readouterr().err
    assert code == 1 and err.endswith("cannot be looked at: File name too long\n")


def test_headers_alone_are_read_unless_digests_are_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    real = os.preadv

    def counted(fd: int, buffers: list[Any], offset: int) -> int:
        reads.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(reader.os, "preadv", counted)
    assert main(["inspect", str(PIRATE), "--model", str(MODEL)]) == 0
    assert reads == []
    capsys.readouterr()
    _, found = as_json(capsys, "inspect", PIRATE, "--model", MODEL, "--digests")
    assert reads and len(found["adapters"][0]["digest"]) == 32


# ----------------------------------------------------------------------------- check

SERVE = ("--lora", f"pirate={PIRATE}", "--port", 0)


def test_what_would_start_is_found_fine_with_the_bytes_that_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, one = as_json(capsys, "check", MODEL, *SERVE, "--max-loras", 3, "--num-kv-pages", 80)
    assert code == 0 and one["problems"] == []
    memory = one["memory"]
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        held = sum(math.prod(file.get_slice(key).get_shape()) * 2 for key in file.keys())
    config = json.loads((MODEL / "config.json").read_text())
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    assert one["model"]["weight_bytes"] == [pytest.approx(held, rel=0.1)], "and rotary tables"
    assert memory["kv_bytes"] == [2 * 80 * 16 * heads * head_dim * 2 * layers]
    assert memory["cpu_cache_bytes"] == one["adapters"][0]["host_bytes"]
    code, two = as_json(capsys, "check", MODEL, *SERVE, "--tp", 2, "--max-loras", 3)
    assert code == 0 and len(two["memory"]["weight_bytes"]) == 2
    assert two["memory"]["weight_bytes"][0] < 0.7 * memory["weight_bytes"][0]


@pytest.mark.parametrize("tp", [1, 2])
def test_slots_are_sized_as_they_are_on_the_device(tp: int) -> None:
    slots = SlotWeights(
        SPEC, rank=0, world_size=tp, device=torch.device("cpu"), dtype=torch.float16
    )
    held = 0
    for target in SPEC.targets:
        weights = slots.layer(target.name, 0)._target
        held += sum(t.nbytes for t in (weights.a_NLMI, weights.b_NLKO, weights.bias_NLO))
    small = 1024  # tables of ranks and of slices
    assert held <= sizes.slot_bytes(SPEC, 0, tp, torch.float16) <= held + small


def test_faults_in_every_block_are_all_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSTAR_TP_LOG_LEVEL", "loud")
    monkeypatch.setenv("MSTAR_TP_CPU_KERNELS", "perhaps")
    monkeypatch.setenv("MSTAR_TP_SHARED_MEMORY", "yes")
    model = broken_model(tmp_path / "model")
    bad = write_adapter(tmp_path / "bad", q_pairs(SPEC), use_dora=True, bias="all")
    file = tmp_path / "serve.yaml"
    (tmp_path / "run.rank0").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = {
            "model": str(model),
            "tensor_parallel_size": 4,
            "max_modellen": 3,
            "max_model_len": 10**6,
            "record": str(tmp_path / "run"),
            "lora": {"max_loras": "many", "adapters": {"bad": str(bad), "gone": "/nowhere"}},
        }
        server = {"port": taken.getsockname()[1], "hots": "x"}
        file.write_text(json.dumps({"engine": engine, "server": server}))
        code, found = as_json(capsys, "check", file)
    problems = found["problems"]
    assert code == 1 and not found["ok"]
    assert texts(problems, "config") == [
        f"{file}: engine.lora.max_loras: got 'many', wanted a valid integer",
        f"{file}: engine.max_modellen is no setting: did you mean engine.max_model_len?",
        f"{file}: server.hots is no setting: did you mean server.host?",
    ]
    assert [text.partition(" is ")[0] for text in texts(problems, "environment")] == [
        "MSTAR_TP_LOG_LEVEL",
        "MSTAR_TP_CPU_KERNELS",
        "MSTAR_TP_SHARED_MEMORY",
    ]
    told_model = "\n".join(texts(problems, "model"))
    for wanted in (
        "'model.norm.weight', which the architecture",
        "'model.layers.0.mlp.up_proj.weight', which the architecture",
        "'model.layers.1.mlp.up_proj.weight' is [3, 4], wanted",
        "holds 'stray.bias', 'stray.weight', which",
        "choose --tensor-parallel-size",
        "tokenizer.json: not found",
    ):
        assert wanted in told_model
    adapters = "\n".join(texts(problems, "adapters"))
    for wanted in ("use_dora", "bias is 'all'", "adapter 'gone': /nowhere: no such folder"):
        assert wanted in adapters
    assert "--max-model-len is 1000000" in texts(problems, "memory")[0]
    assert any("cannot listen on 127.0.0.1 port" in text for text in texts(problems, "server"))
    assert any("run.rank0 exists already" in text for text in texts(problems, "server"))
    assert sorted(path.name for path in tmp_path.glob("run.*")) == ["run.rank0"]
    _, text = told(capsys, "check", file)
    lines = text.splitlines()
    last_error = max(at for at, line in enumerate(lines) if line.startswith("error: "))
    assert all(line.startswith(("error: ", "note: ")) for line in lines[:last_error])
    assert lines[-1].startswith("not servable: 2 of 2 adapters refused, ")


def test_tokenizers_that_adapters_ship_are_judged_as_the_start_judges_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("good", "other", "damaged", "plain"):
        shutil.copytree(PIRATE, tmp_path / name)
    tree = json.loads((MODEL / "tokenizer.json").read_text())
    (tmp_path / "good" / "tokenizer.json").write_text(json.dumps(tree))
    words = tree["model"]["vocab"]
    first, second = list(words)[10:12]
    words[first], words[second] = words[second], words[first]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tree))
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    lora = [f"{name}={tmp_path / name}" for name in ("good", "other", "damaged", "plain")]
    code, report = as_json(capsys, "check", MODEL, "--lora", *lora, "--port", 0)
    found = {problem["adapter"]: problem["text"] for problem in report["problems"]}
    assert code == 1 and set(found) == {"other", "damaged"}
    assert "save the base model's tokenizer, or none" in found["other"]
    refused = {findings["name"] for findings in report["adapters"] if findings["refusals"]}
    assert refused == {"other", "damaged"}


def broken_model(folder: Path) -> Path:
    """The demo model with keys missing, misshapen and added, and no tokenizer."""
    folder.mkdir()
    shutil.copy(MODEL / "config.json", folder)
    tensors = load_file(MODEL / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(3, 4)
    tensors |= {"stray.weight": torch.ones(1), "stray.bias": torch.ones(1)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_folder_that_is_none_and_a_file_that_is_no_yaml_are_problems_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text("engine: [")
    for name, wanted in (("nowhere", "no such folder"), ("x.yaml", "cannot be read as YAML")):
        code, found = as_json(capsys, "check", tmp_path / name)
        assert code == 1 and wanted in found["problems"][0]["text"]
    with pytest.raises(SystemExit) as refused:
        main(["check", str(MODEL), "--no-such"])
    assert refused.value.code == 2


def test_what_does_not_fit_and_what_is_open_to_everybody_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 10000 kB\nMemAvailable: 5000 kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "CGROUP_LIMIT", tmp_path / "none")
    roots = ("--lora-root", tmp_path / "none")
    few = ("--num-kv-pages", 64, "--kv-offloading-size", 0, "--max-loras", 1)
    code, found = as_json(capsys, "check", MODEL, *SERVE, *few, "--host", "0.0.0.0", *roots)
    assert code == 0
    notes = "\n".join(note["text"] for note in found["notes"])
    for wanted in ("MiB is free now", "--api-key asks", "--admin-key asks", "no such folder"):
        assert wanted in notes
    code, found = as_json(capsys, "check", MODEL, *SERVE, "--num-kv-pages", 4000)
    assert code == 1 and "of RAM, which has 9.8 MiB: lower" in texts(found["problems"], "memory")[0]
    bytes_ = ("--max-cpu-lora-bytes", 10)
    code, found = as_json(capsys, "check", MODEL, *SERVE, *few, *bytes_)
    assert code == 1 and "raise --max-cpu-lora-bytes" in texts(found["problems"], "adapters")[0]


# ----------------------------------------------------------------------------- the answers


def test_the_json_has_these_keys_and_no_others() -> None:
    """Whoever reads it relies on them: add to this list, and take nothing away."""
    wanted = {
        Inspection: "ok path tensor_parallel_size max_lora_rank max_lora_saved_rows model "
        "slot_bytes adapters problems notes seconds",
        CheckReport: "ok source problems notes model memory adapters seconds",
        Finding: "block text adapter",
        AdapterFindings: "name path format files file_bytes tensors dtypes ranks alphas scalings "
        "targets host_bytes digest refusals notes",
        findings.TargetFindings: "name layers num_modules ranks kind",
        findings.ModelFindings: "path architecture dtype num_layers hidden_size vocab_size "
        "max_position tensor_parallel_size weight_bytes targets",
        findings.ModelTarget: "name layers in_features out_features kind",
        findings.MemoryFindings: "device weight_bytes kv_bytes slot_bytes cpu_cache_bytes "
        "kv_host_bytes num_kv_pages max_model_len device_total device_free host_total host_free",
    }
    for kind, keys in wanted.items():
        assert " ".join(field.name for field in msgspec.structs.fields(kind)) == keys
    assert findings.BLOCKS == ("config", "environment", "model", "adapters", "memory", "server")


def many(count: int) -> Inspection:
    name = "customer-{:04d}-an-adapter-trained-on-support-tickets-of-the-last-quarter"
    adapters = tuple(
        AdapterFindings(
            name=name.format(n),
            path="x",
            format="PEFT",
            files=1,
            file_bytes=40 << 20,
            dtypes=("BF16",),
            ranks=(8,),
            scalings=(2.0,),
            refusals=("it is broken",) if n % 10 == 3 else (),
        )
        for n in range(count)
    )
    refused = [adapter for adapter in adapters if adapter.refusals]
    return Inspection(
        ok=not refused,
        path="x",
        tensor_parallel_size=1,
        max_lora_rank=16,
        max_lora_saved_rows=64,
        model=None,
        slot_bytes=None,
        adapters=adapters,
        problems=tuple(
            Finding(block="adapters", text=f"adapter {a.name!r}: it is broken", adapter=a.name)
            for a in refused
        ),
        notes=(),
        seconds=0.5,
    )


@pytest.mark.parametrize("count", [2, 20, 1000])
@pytest.mark.parametrize("width", [40, 80, 200, None])
def test_reports_keep_to_the_page_and_to_what_can_be_read(count: int, width: int | None) -> None:
    lines = [line.text for line in render.inspection(many(count), Page(width))]
    assert len(lines) < 100
    if width is not None:
        assert max(len(line) for line in lines if "checked in" not in line) <= max(width, 79)
    rows = [line for line in lines if line.endswith(("fine", "refused"))]
    assert len(rows) == min(count, 20)
    assert width == 40 or len(set(rows)) == len(rows), "told apart"
    if width is None:
        assert not any("…" in line for line in lines)
    if count == 1000:
        assert rows[0].startswith("customer") and rows[0].endswith("refused")
        assert "and 980 more, 80 of them refused: --all shows every line" in lines
        assert "error: and 80 more of 80 adapters: --all shows them" in lines
        full = render.inspection(many(count), Page(width, everything=True))
        assert sum(line.text.endswith(("fine", "refused")) for line in full) == 1000
        assert sum(line.text.startswith("error: ") for line in full) == 100
    assert ("error" in lines[0]) == (count > 3)


def test_names_are_cut_in_their_middle_and_layers_told_as_ranges() -> None:
    assert cut("abcdefghij", 10) == "abcdefghij"
    assert cut("abcdefghij", 5) == "ab…ij" and cut("abcdefghij", 1) == "…"
    assert ranges([3, 0, 1, 2, 7]) == "0-3,7" and ranges([]) == ""


def test_progress_is_plain_lines_where_nobody_watches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_adapter(tmp_path / "0", random_pairs(SPEC, rank=2, seed=0))
    for number in range(1, 120):
        (tmp_path / str(number)).mkdir()
        for file in one.iterdir():
            os.link(file, tmp_path / str(number) / file.name)
    assert main(["inspect", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err and "\r" not in captured.err
    lines = captured.err.splitlines()
    assert len(lines) == 10 and lines[-1] == "checked 120 of 120 adapters"
    assert captured.out.splitlines()[-1].startswith("ok: 120 adapters checked in ")
    validator = FileValidator(max_rank=16, max_saved_rows=64)
    done: list[int] = []
    folders = [(str(n), str(tmp_path / str(n))) for n in range(120)]
    found = inspect_adapters(validator, folders, progress=lambda n, total: done.append(n))
    assert [findings.name for findings in found] == [name for name, _ in folders]
    assert done == list(range(1, 121))


def test_every_key_of_config_json_that_is_at_fault_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"hidden_size": "wide", "num_hidden_layers": 0, "hidden_act": "sine"}
    config |= {"quantization_config": {"quant_method": "awq"}, "num_key_value_heads": 4}
    del config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, found = as_json(capsys, "inspect", tmp_path)
    assert code == 1
    where = f"{tmp_path / 'config.json'}: "
    told = [
        text.removeprefix(where).partition(" is ")[0] for text in texts(found["problems"], "model")
    ]
    assert sorted(told) == [
        "hidden_act",
        "hidden_size",
        "num_hidden_layers",
        "quantization_config says the weights are quantised (awq), which",
        "vocab_size",
    ]
    with pytest.raises(CheckpointError) as refused:
        load_model_config(tmp_path)
    assert str(refused.value) == texts(found["problems"], "model")[0]
    config |= {"hidden_size": 192, "num_hidden_layers": 6, "hidden_act": "silu"}
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 1024}))
    _, found = as_json(capsys, "inspect", tmp_path)
    assert "num_key_value_heads is 4, wanted a divisor" in found["problems"][0]["text"]
