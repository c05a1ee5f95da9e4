"""Pins that the examples in ``launch/`` for several machines serve, on two machines that share
nothing but a network, and that streams outlive a rank of the other machine.

What Kubernetes and Slurm would do is stood in for: LeaderWorkerSet sets three variables in each
pod, ``srun`` runs a command on each node.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from support.failure_kit import GUARD_S, MODEL, TOKENS, Stream, until
from support.machines_kit import INTERFACE, Machine, Machines, needs_machines
from support.processes import Process, family

ROOT = Path(__file__).parents[2]
FLAGS = f"{MODEL} --served-model-name base --tp 2 --dtype float32 --max-model-len 256 --device cpu"
ENV = {"VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1"}
SECRET = "known to both machines alone"
COMMANDS = ({"temperature": 0}, {"temperature": 0.8, "seed": 3})


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    # Machines without a way out can install nothing, and those of an image need not.
    install = f"source {ROOT}/launch/lib.sh && ensure_venv"
    subprocess.run(["bash", "-c", install], env={**os.environ, **ENV}, check=True)
    with Machines(2) as made:
        yield made.all


def command(process: Process) -> str:
    return Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def stop(process: subprocess.Popen[bytes], inside: str) -> None:
    """By SIGTERM to the outermost process below it that runs ``inside``; it ends in order, and
    nothing of it is left.
    """
    below = family(process.pid)
    asked = [
        one for one in below if command(one).startswith("bash ") and f"{inside} " in command(one)
    ]
    asked[0].send(signal.SIGTERM)
    assert process.wait(GUARD_S) == 0
    assert all(one.wait_gone(GUARD_S) for one in below)


def serving(machine: Machine, process: subprocess.Popen[bytes]) -> str:
    def settled() -> bool:
        return "Serving base on " in machine.said() or process.poll() is not None

    until(settled)
    assert process.poll() is None, machine.said()
    return f"http://{machine.address}:8000"


def a_rank(agent: subprocess.Popen[bytes]) -> Process:
    return next(one for one in family(agent.pid) if " -u -m mstar_tp.worker " in command(one))


@needs_machines
def test_pods_of_a_leader_worker_set_serve_together_and_streams_outlive_a_rank(
    machines: list[Machine],
) -> None:
    group, service = yaml.safe_load_all((ROOT / "launch/leader_worker_set.yaml").read_text())
    assert (
        group["metadata"]["name"] == service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/name"]
    )
    template = group["spec"]["leaderWorkerTemplate"]
    [container] = template["workerTemplate"]["spec"]["containers"]
    [script] = container["args"]
    script, count = re.subn(r"/models/base --tp 16\b", FLAGS, script)
    assert count == 1
    pods = []
    for number, machine in enumerate(machines):
        env = {
            **ENV,
            "MSTAR_TP_SECRET": SECRET,
            "LWS_LEADER_ADDRESS": machines[0].name,
            "LWS_GROUP_SIZE": str(template["size"]),
            "LWS_WORKER_INDEX": str(number),
        }
        pods.append(machine.start(*container["command"], script, env=env, cwd=ROOT))
    url = serving(machines[0], pods[0])
    assert "over gloo: rank 1 is on another machine" in machines[0].said() + machines[1].said()
    wanted = [Stream(url, model="base", **body).outcome() for body in COMMANDS]
    assert wanted[0][1]["completion_tokens"] == TOKENS
    streams = [Stream(url, model="base", **body) for body in COMMANDS]
    for stream in streams:
        stream.at(10)
    a_rank(pods[1]).send(signal.SIGKILL)
    assert [stream.outcome() for stream in streams] == wanted
    until(lambda: httpx.get(f"{url}/health").status_code == 200)
    stop(pods[0], "launch/torchrun_nodes.sh")
    assert pods[1].wait(GUARD_S) == 0, machines[1].said()


@needs_machines
def test_a_slurm_job_serves_and_ends_in_order(machines: list[Machine], tmp_path: Path) -> None:
    """``scontrol`` names the nodes, ``srun`` runs its command on each and passes SIGTERM on."""
    for machine in machines:
        machine.log.unlink(missing_ok=True)
    names = " ".join(machine.name for machine in machines)
    tool(
        tmp_path / "scontrol",
        f"""test "$*" = 'show hostnames nodes' && printf '%s\\n' {names}""",
    )
    steps = [
        f'SLURM_NODEID={number} TMPDIR={machine.scratch} {shlex.join(machine.command())} "$@" '
        f">> {machine.log} 2>&1 & pids+=($!)"
        for number, machine in enumerate(machines)
    ]
    tool(
        tmp_path / "srun",
        """shift; pids=(); trap 'for pid in "${pids[@]}"; do pkill -TERM -P "$pid"; done' TERM""",
        *steps,
        'for pid in "${pids[@]}"; do while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done; done',
        'for pid in "${pids[@]}"; do wait "$pid" || exit; done',
    )
    env = {**os.environ, **ENV, "IFACE": INTERFACE, "SLURM_JOB_NODELIST": "nodes"}
    env |= {"SLURM_SUBMIT_DIR": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = tmp_path / "slurm_script"  # as Slurm does: a copy, from another folder
    script.write_bytes((ROOT / "launch/slurm.sbatch").read_bytes())
    job = subprocess.Popen(
        ["bash", str(script), *FLAGS.split(), "--host", "0.0.0.0"], env=env, cwd=tmp_path
    )
    try:
        url = serving(machines[0], job)
        asked = Stream(url, model="base", temperature=0)
        asked.at(10)
        stop(job, str(script))
        assert asked.outcome()[2:] == (None, "[DONE]"), "a running request was cut"
    finally:
        job.kill()
    assert not list(ROOT.glob(".mstar-tp-secret.*"))


def tool(path: Path, *lines: str) -> None:
    path.write_text("\n".join(("#!/usr/bin/env bash", *lines, "")))
    path.chmod(0o755)
