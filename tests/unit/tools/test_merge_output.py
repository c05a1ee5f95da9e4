"""Pins what a merge writes and what it refuses: whole or not at all, and nothing before all is
checked. The arithmetic is compared with PEFT's in tests/parity/test_merge.py.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mstar_tp.cli.main import main
from mstar_tp.cli.tool_flags import parse_size, parse_weights
from mstar_tp.common.errors import ConfigError
from mstar_tp.engine.offline_spec import offline_spec
from mstar_tp.tensor_files.writer import TensorWriter
from mstar_tp.testing.lora_files import q_pairs, write_adapter
from mstar_tp.testing.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 model in several shards with files around it, and an adapter."""
    torch.set_num_threads(1)  # so that a fork can compute
    folder = tmp_path_factory.mktemp("made")
    model = make_tiny_model(folder / "model", "llama", dtype=torch.bfloat16, max_shard_size="60KB")
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "LICENSE").write_text("yours")
    (model / "optimizer.pt").write_text("not this")
    (model / "README.md").write_text("nor this")
    (model / "adapter_config.json").write_text("{}")
    write_adapter(folder / "x", q_pairs(offline_spec(model)))
    return folder


def run(made: Path, out: Path, *flags: str) -> int:
    return main(["merge", str(made / "model"), str(made / "x"), "--out", str(out), *flags])


def test_a_merged_folder_is_a_model_folder(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder may be filled
    assert run(made, out, "--max-shard-size", "70KB") == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"wrote {out}: ") and "2 of 21 tensors changed" in said.out
    assert "merging: " in said.err
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*shards, "model.safetensors.index.json", "config.json", "generation_config.json",
         "tokenizer.json", "chat_template.jinja", "LICENSE"]
    )  # fmt: skip
    before: dict[str, torch.Tensor] = {}
    for path in (made / "model").glob("*.safetensors"):
        before |= load_file(path)
    for name in shards:
        assert (out / name).stat().st_size < 75_000
        with safe_open(out / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for key in file.keys():
                tensor = file.get_tensor(key)
                changed = not torch.equal(tensor, before.pop(key))
                assert tensor.dtype == torch.bfloat16 and changed == ("q_proj" in key)
    assert not before
    assert os.listdir(tmp_path) == ["out"]
    assert out.stat().st_mode & 0o777 == tmp_path.stat().st_mode & 0o777 | 0o055


def test_dtype_casts_every_tensor_and_says_so_in_the_config(made: Path, tmp_path: Path) -> None:
    assert run(made, tmp_path / "out", "--dtype", "float16") == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


def test_nothing_is_replaced_but_a_model_by_force(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    for flags, said in (
        ((), "is not empty: choose another --out, or add --force"),
        (("--force",), "has no config.json, so --force does not replace it"),
    ):
        assert run(made, out, *flags) == 1
        assert said in capsys.readouterr().err
        assert os.listdir(out) == ["thesis.txt"]
    (out / "config.json").write_text("{}")
    assert run(made, out, "--force") == 0
    assert "thesis.txt" not in os.listdir(out) and os.listdir(tmp_path) == ["out"]
    for place, said in (
        (made / "model", "holds the input"),
        (made, "holds the input"),
        (made / "model" / "config.json", "is a file"),
        (tmp_path / "no" / "out", "no such folder: create it"),
    ):
        assert run(made, place, "--force") == 1
        assert said in capsys.readouterr().err
    assert (made / "x").is_dir() and not (tmp_path / "no").exists()


def test_a_full_disk_is_told_before_and_during_the_writing(
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
        assert run(made, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "has 1.0 kB free, and the result takes" in said and "make room" in said

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorWriter, "write", full)
    assert run(made, tmp_path / "out") == 1
    assert "the disk is full: make room or choose another --out" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_merge_that_is_interrupted_leaves_nothing(
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, calls = TensorWriter.write, []

    def interrupted(signum: signal.Signals) -> Callable[..., None]:
        def once(self: TensorWriter, *args: Any) -> None:
            calls.append(os.listdir(tmp_path))
            if len(calls) == 5:
                os.kill(os.getpid(), signum)
            write(self, *args)

        return once

    monkeypatch.setattr(TensorWriter, "write", interrupted(signal.SIGINT))
    assert run(made, tmp_path / "out") == 130
    assert os.listdir(tmp_path) == []
    # It had been under way, under another name.
    assert calls[4] != [] and "out" not in calls[4]
    calls.clear()
    monkeypatch.setattr(TensorWriter, "write", interrupted(signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        run(made, tmp_path / "out")
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr().err.count("stopped: nothing was written") == 2


def test_what_a_killed_merge_leaves_the_next_one_removes(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            TensorWriter.write = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            run(made, out)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".out.unfinished.")
    assert run(made, out) == 0
    assert os.listdir(tmp_path) == ["out"]


def _spoil_nan(folder: Path) -> None:
    tensors = q_pairs(offline_spec(folder.parent / "model"))
    tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"][1, 3] = torch.nan
    write_adapter(folder, tensors)


def _spoil_truncate(folder: Path) -> None:
    with open(folder / "adapter_model.safetensors", "r+b") as file:
        file.truncate(1000)


def _spoil_pickle(folder: Path) -> None:
    os.rename(folder / "adapter_model.safetensors", folder / "adapter_model.bin")


def _spoil_dora(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))


def _spoil_shape(folder: Path) -> None:
    config = json.loads((folder.parent / "model" / "config.json").read_text())
    (folder.parent / "model" / "config.json").write_text(
        json.dumps({**config, "num_attention_heads": 8})
    )


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_spoil_nan, "layers.1.self_attn.q_proj.lora_A.weight holds values that are not finite"),
        (_spoil_truncate, "it is truncated"),
        (_spoil_pickle, "mstar-tp convert"),
        (_spoil_dora, "use_dora"),
        (_spoil_shape, "q_proj"),
    ],
)
def test_what_cannot_be_merged_is_refused_before_anything_is_written(
    made: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(made, tmp_path / "spoilt")
    spoil(tmp_path / "spoilt" / "x")
    assert run(tmp_path / "spoilt", tmp_path / "out") == 1
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["spoilt"]


def test_weights_and_sizes_are_read_as_people_write_them() -> None:
    assert parse_weights(None, 2) == (1.0, 1.0)
    assert parse_weights("1,-.5", 2) == (1.0, -0.5)
    assert [parse_size(t) for t in ("5GB", "1.5 kb", "2MiB", "77")] == [
        5 * 10**9,
        1500,
        2 << 20,
        77,
    ]
    for bad in ("1", "a,b", "1,nan", ""):
        with pytest.raises(ConfigError, match="--weights"):
            parse_weights(bad, 2)
    for bad in ("", "GB", "0", "5 TB", "-1"):
        with pytest.raises(ConfigError, match="--max-shard-size"):
            parse_size(bad)
