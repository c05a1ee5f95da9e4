"""Pins what can be told of ``launch/`` without the systems that its files are for: every path,
flag and extra that they name is there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from mstar_tp.config import ServeConfig
from mstar_tp.config.server_flags import add_config_arguments, config_from_args

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
SOURCES = sorted(path for path in LAUNCH.iterdir() if path.is_file())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse_and_ask_for_extras_that_exist(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name in re.findall(r"^ensure_venv (\w+)", script.read_text(), re.MULTILINE):
        assert name in extras


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_files_that_are_named_exist(source: Path) -> None:
    for name in re.findall(r"\b(?:launch|scripts|docs)/[\w/.-]*\w", source.read_text()):
        assert (ROOT / name).exists(), name


def test_the_image_copies_what_there_is_and_serves_with_flags_that_there_are() -> None:
    text = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ")
    for words in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for name in shlex.split(words)[:-1]:
            assert (ROOT / name).exists(), name
    assert "torch==" in (ROOT / "constraints.txt").read_text(), "what the image greps for"
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert not {"mstar_tp", "launch", "pyproject.toml", "constraints.txt"} & set(left_out)
    for flags in re.findall(r"mstar-tp (?:#\s+)?serve (/models\S.*)$", text, re.MULTILINE):
        assert served(flags).server.host == "0.0.0.0"


def test_the_leader_worker_set_asks_for_as_many_gpus_as_it_has_ranks() -> None:
    group, service = yaml.safe_load_all((LAUNCH / "leader_worker_set.yaml").read_text())
    template = group["spec"]["leaderWorkerTemplate"]
    pod = template["workerTemplate"]["spec"]
    [container] = pod["containers"]
    config = served(container["args"][0].partition("torchrun_nodes.sh ")[2])
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert config.engine.tensor_parallel_size == gpus * template["size"]
    assert pod["terminationGracePeriodSeconds"] > config.server.shutdown_grace_s
    [port] = container["ports"]
    assert port["containerPort"] == config.server.port
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def served(flags: str) -> ServeConfig:
    """What the flags of ``mstar-tp serve`` say, of a model that is here."""
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    words = shlex.split(flags.replace("/models/base", str(ROOT / "launch" / "demo" / "model")))
    return config_from_args(parser.parse_args(words))


@pytest.mark.parametrize("name", ["torchrun_cpu.sh", "torchrun_nodes.sh"])
def test_ctrl_c_reaches_the_frontend_alone(name: str, tmp_path: Path) -> None:
    """A terminal sends SIGINT to its whole foreground group. torchrun would end its ranks at once,
    in the middle of their requests; the frontend is what ends them. Any extra's stamp will do.
    """
    # In Python, as the real ones: a script's background process in bash cannot trap SIGINT.
    waits = """import os, pathlib, signal, sys
def stop(number, frame):
    with open(os.environ["SEEN"], "a") as seen: print(NAME, file=seen)
    os._exit(0)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(os.environ["UP"] + NAME).touch()
"""
    programs = {
        "python": f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n',
        "mstar-tp": f"#!{sys.executable}\nNAME = 'frontend'\n{waits}signal.pause()\n",
        "torchrun": f"#!{sys.executable}\nNAME = 'ranks'\n{waits}"
        "while not os.path.exists(os.environ['SEEN']):\n    os.sched_yield()\n",
    }
    (tmp_path / "bin").mkdir()
    for program, text in programs.items():
        file = tmp_path / "bin" / program
        file.write_text(text)
        file.chmod(0o755)
    pinned = b"".join((ROOT / file).read_bytes() for file in ("pyproject.toml", "constraints.txt"))
    stamp = hashlib.sha256(pinned + str(ROOT).encode()).hexdigest()
    (tmp_path / ".mstar-tp-demo").write_text(f"{stamp}\n")
    seen, up = tmp_path / "seen", tmp_path / "up"
    there = {"HEAD": "127.0.0.1", "NODES": "1", "NODE_RANK": "0", "IFACE": "lo"}
    there |= {"VIRTUAL_ENV": str(tmp_path), "SEEN": str(seen), "UP": str(up)}
    there |= {"PYTHONPATH": str(ROOT), "MSTAR_TP_SECRET": "sixteen characters"}
    with subprocess.Popen(
        [str(LAUNCH / name), str(LAUNCH / "serving.yaml")],
        cwd=ROOT,
        env=os.environ | there,
        process_group=0,
    ) as script:
        while not all(Path(f"{up}{part}").exists() for part in ("frontend", "ranks")):
            assert script.poll() is None
            os.sched_yield()
        os.killpg(script.pid, signal.SIGINT)
        assert script.wait() == 0
    assert set(seen.read_text().split()) == {"frontend"}
