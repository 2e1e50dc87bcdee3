"""The suite in tests/spmd on several devices and under MPI; plain, pytest finds it by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.parallel.process import SAME_BITS_FLAG
from spmdrl.parallel.spawn import mpirun_command
from spmdrl.verify import TOPOLOGIES
from spmdrl.verify import main as verify

SUITE = Path(__file__).with_name("spmd")
PYTEST = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-p", "no:cacheprovider", "-x"]


def run(command: list[str], devices: int, timeout: float) -> None:
    flags = f"--xla_force_host_platform_device_count={devices} {SAME_BITS_FLAG}"
    environment = os.environ | {"XLA_FLAGS": flags, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_four_host_devices() -> None:
    run(PYTEST, devices=4, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", [1, 2])
def test_under_mpirun(devices: int) -> None:
    run([*mpirun_command(2), *PYTEST], devices, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_same_bits_on_one_core_as_on_all(tmp_path) -> None:
    """Images, whose gradients are sums over tens of thousands of places."""
    config = SUITE.parents[1] / "configs" / "pong.py"
    command = [
        sys.executable, "-m", "spmdrl.train", str(config), "--sync.deterministic",
        "--env.num-envs", "64", "--algo.num-steps", "8", "--total-steps", "512",
    ]  # fmt: skip
    hashes = set()
    one_core = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]
    for name, bound in (("one", one_core), ("all", [])):
        subprocess.run(
            [*bound, *command, "--run-dir", str(tmp_path / name)], check=True, capture_output=True
        )
        hashes.add(json.loads((tmp_path / name / "summary.json").read_text())["params_sha256"])
    assert len(hashes) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_verify_finds_the_same_bits_on_every_topology(capsys) -> None:
    """Among them 4 x 1, gather on 2 and on 3 ranks, and jax on 2 x 2, each by its own command."""
    config = str(SUITE.parents[1] / "configs" / "cartpole.py")
    sizes = ["--env.num-envs", "64", "--algo.num-steps", "32", "--sync.deterministic"]
    assert verify([config, "--updates", "2", *sizes]) == 0, capsys.readouterr()
    rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == len(TOPOLOGIES)
    assert all(row.split()[-2] == "yes" for row in rows)
