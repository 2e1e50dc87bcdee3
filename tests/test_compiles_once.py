"""Nothing is compiled again after the first update: on one rank, on several, after a resume."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.children import CARTPOLE, python

SIZES = ["--env.num-envs", "8", "--algo.num-steps", "16", "--net.hidden", "16", "--log.every", "1"]

LARGE = {"update", "private_update", "private_collect"}


def programs(run_dir: Path, steps: int, flags: list[str]) -> Counter[str]:
    """How often each of the two large programs was compiled."""
    words = [*SIZES, *flags, "--total-steps", steps, "--run-dir", run_dir]
    done = python("-m", "spmdrl.train", CARTPOLE, *words, JAX_LOG_COMPILES="1")
    assert done.returncode == 0, done.stderr[-3000:]
    names = re.findall(r"Finished XLA compilation of jit\((\w+)\)", done.stdout + done.stderr)
    return Counter(name for name in names if name in LARGE)


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["--nprocs", "2"], marks=pytest.mark.slow),
        pytest.param(["--devices", "2"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_each_program_is_compiled_once(flags, tmp_path):
    expected = {
        "": {"private_collect": 1, "update": 1},
        "--nprocs 2": {"private_collect": 2, "private_update": 2},
        "--devices 2": {"private_collect": 2, "update": 1},
    }[" ".join(flags)]
    assert programs(tmp_path / "run", 8 * 16 * 4, flags) == expected
    assert programs(tmp_path / "run", 8 * 16 * 8, flags) == expected  # resumed
