"""Pins how CPU kernels come to be: compiled once into the user's own folder, or done without."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mstar_tp.common.errors import ConfigError
from mstar_tp.kernels import build
from mstar_tp.kernels.cpu import cpu_kernels

NEEDS_COMPILER = pytest.mark.skipif(
    cpu_kernels(torch.device("cpu"), torch.float32) is None, reason="no C++ compiler"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.load_library.cache_clear()
    yield tmp_path / "cache"
    build.load_library.cache_clear()


def script_compiler(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def counting_compiler(folder: Path) -> tuple[str, Path]:
    """A compiler that makes an empty library and writes a line for each time it runs."""
    runs = folder / "runs"
    version = '[ "$1" = --version ] && echo fake 1 && exit'
    body = f'{version}\necho x >> {runs}\nfor last; do :; done\n: > "$last"'
    return script_compiler(folder / "c++", body), runs


@NEEDS_COMPILER
def test_kernels_compile_into_a_folder_of_the_users_own_and_share_torchs_threads(
    own_cache: Path,
) -> None:
    """A second OpenMP runtime would be a second team of threads on the same cores."""
    assert build.load_library() is not None
    folder = own_cache / "mstar_tp" / "kernels"
    assert len(list(folder.glob("cpu-*.so"))) == 1
    assert folder.stat().st_mode & 0o077 == 0
    code = (
        "import os, torch\n"
        "from mstar_tp.kernels.cpu import cpu_kernels\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(512, 512)\n"
        "x @ x; torch.nn.functional.silu(torch.randn(1 << 20))\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "kernels = cpu_kernels(torch.device('cpu'), torch.float32)\n"
        "kernels.gated('silu', torch.randn(512, 512))\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0"
    assert len(list(folder.glob("cpu-*.so"))) == 1, "the other process compiled its own"


@NEEDS_COMPILER
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86's processors")
@pytest.mark.parametrize("processor", ["x86-64", "skylake-avx512"])
def test_kernels_compile_for_processors_without_the_widest_arithmetic(processor: str) -> None:
    compiler = build._compiler()
    assert compiler is not None
    flags = [flag for flag in build._flags(compiler) if not flag.startswith(("-march", "-O"))]
    command = [compiler, *flags, f"-march={processor}", "-w", "-fsyntax-only"]
    run = subprocess.run(
        [*command, *map(str, build.SOURCES)], check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    compiler, runs = counting_compiler(tmp_path)
    path = build._compiled(compiler)
    path.write_bytes(b"damaged")
    assert build._compiled(compiler) == path
    assert path.read_bytes() == b"" and runs.read_text() == "x\nx\n"
    build._digest_file(path).write_bytes(b"\xff")
    assert build._compiled(compiler) == path
    assert runs.read_text() == "x\nx\nx\n"


def test_many_that_start_together_compile_once(tmp_path: Path) -> None:
    compiler, runs = counting_compiler(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(build._compiled, [compiler] * 8))
    assert len(paths) == 1 and runs.read_text() == "x\n"


def test_another_compiler_gets_a_library_of_its_own(tmp_path: Path) -> None:
    compiler, _ = counting_compiler(tmp_path)
    first = build._compiled(compiler)
    Path(compiler).write_text(Path(compiler).read_text().replace("fake 1", "fake 2"))
    assert build._compiled(compiler) != first


def test_without_a_compiler_torch_runs_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert build.load_library() is None
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = script_compiler(
        tmp_path / "c++", "[ $1 = --version ] || { echo no disk >&2; exit 1; }"
    )
    monkeypatch.setattr(shutil, "which", lambda name: broken)
    with caplog.at_level(logging.WARNING):
        assert build.load_library() is None
    assert "no disk" in caplog.text


@pytest.mark.parametrize("stream", ["", " >&2"])
def test_a_compiler_may_speak_another_encoding(
    stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    latin = script_compiler(tmp_path / "c++", f"printf 'd\\351faut\\n'{stream}\n[ $1 = --version ]")
    monkeypatch.setattr(shutil, "which", lambda name: latin)
    with caplog.at_level(logging.WARNING):
        assert build.load_library() is None
    assert "could not compile the CPU kernels" in caplog.text


def test_a_user_without_a_home_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(shutil, "which", lambda name: counting_compiler(tmp_path)[0])
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.WARNING):
        assert build.load_library() is None
    assert "set HOME or XDG_CACHE_HOME" in caplog.text


def test_a_folder_others_can_write_is_not_trusted(
    own_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = own_cache / "mstar_tp" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(OSError, match="is not this user's alone"):
        build._compiled(counting_compiler(tmp_path)[0])


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTAR_TP_CPU_KERNELS", "0")
    assert build.load_library() is None
    build.load_library.cache_clear()
    monkeypatch.setenv("MSTAR_TP_CPU_KERNELS", "yes")
    with pytest.raises(ConfigError, match="MSTAR_TP_CPU_KERNELS is 'yes', wanted 0 or 1"):
        build.load_library()
