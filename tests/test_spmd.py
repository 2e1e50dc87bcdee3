"""The suite in tests/spmd on several devices and under MPI; plain, pytest finds it by itself."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from spmdrl.parallel.process import SAME_BITS_FLAG
from spmdrl.parallel.spawn import mpirun_command
from spmdrl.verify import TOPOLOGIES
from spmdrl.verify import main as verify
from tests.children import CARTPOLE, ROOT

SUITE = Path(__file__).with_name("spmd")
PYTEST = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-p", "no:cacheprovider", "-x"]


# Tests that have nothing to try in a layout; every other one must pass there at least once.
AGAIN = "test_the_same_run_on_one_device_gives_the_same_bits_again"
RANKS = {  # need a second rank
    "test_batches_must_have_the_same_names",
    "test_an_mpi_without_threads_serves_outside_of_jit",
}
ACCELERATOR = "test_an_accelerator_that_mpi_does_not_reach"  # needs a second device


def run(command: list[str], devices: int, folder: Path) -> list[Path]:
    """Run the suite; each rank's list of what became of its tests."""
    flags = f"--xla_force_host_platform_device_count={devices} {SAME_BITS_FLAG}"
    environment = os.environ | {"XLA_FLAGS": flags, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return sorted(folder.glob("*.xml"))


def suite(folder: Path) -> list[str]:
    """Pytest with a list a rank: the exit code alone is 0 also when every test was skipped."""
    script = f'exec "$@" --junitxml={folder}/rank-${{OMPI_COMM_WORLD_RANK:-0}}.xml'
    return ["sh", "-c", script, "sh", *PYTEST]


def passed(file: Path) -> list[str]:
    """The functions of the tests that passed, once for each set of parameters."""
    cases = ElementTree.parse(file).iter("testcase")
    return [case.attrib["name"].partition("[")[0] for case in cases if len(case) == 0]


def functions(*files: str) -> set[str]:
    """The tests of these files of the suite, read from them."""
    found = {
        node.name
        for name in files
        for node in ast.parse((SUITE / name).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert {AGAIN, ACCELERATOR, *RANKS} < found
    return found


EVERYWHERE = ("test_api.py", "test_same_run.py")  # test_mpi.py has test_world.py to run it


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_four_host_devices(tmp_path) -> None:
    (file,) = run(suite(tmp_path), 4, tmp_path)
    assert functions(*EVERYWHERE) - {AGAIN, *RANKS} <= set(passed(file))
    assert passed(file).count("test_every_layout_learns_the_same") >= 4
    assert (
        passed(file).count("test_deterministic_mode_gives_the_same_bits") == 4
    )  # 2 tasks, 2 and 4


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "devices", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.nightly)]
)
def test_under_mpirun(devices: int, tmp_path) -> None:
    files = run([*mpirun_command(2), *suite(tmp_path)], devices, tmp_path)
    assert len(files) == 2
    for file in files:
        needless = {AGAIN, ACCELERATOR} if devices == 1 else {AGAIN}
        assert functions(*EVERYWHERE, "test_meeting.py") - needless <= set(passed(file))
        assert passed(file).count("test_every_layout_learns_the_same") >= 5
        # Two tasks, allreduce and gather.
        assert passed(file).count("test_deterministic_mode_gives_the_same_bits") == 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_same_bits_on_one_core_as_on_all(tmp_path) -> None:
    """Images, whose gradients are sums over tens of thousands of places."""
    config = ROOT / "configs" / "pong.py"
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


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_verify_finds_the_same_bits_on_every_topology(capsys) -> None:
    """Among them 4 x 1, gather on 2 and on 3 ranks, and jax on 2 x 2, each by its own command."""
    sizes = ["--env.num-envs", "64", "--algo.num-steps", "32", "--sync.deterministic"]
    assert verify([CARTPOLE, "--updates", "2", *sizes]) == 0, capsys.readouterr()
    rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == len(TOPOLOGIES) >= 9  # an empty list would agree with itself
    assert all(row.split()[-2] == "yes" for row in rows)
