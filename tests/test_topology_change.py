"""A checkpoint of four ranks resumes on any other topology as it would have on its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from spmdrl.verify import difference
from tests.children import CARTPOLE, succeed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZES = [
    "--env.num-envs", "32", "--algo.num-steps", "32", "--total-steps", str(32 * 32 * 6),
    "--checkpoint.every", "3", "--log.panel", "off",
]  # fmt: skip
LAST = "checkpoints/update-00000006"


def train(run_dir: Path, *flags: str) -> Path:
    succeed("-m", "spmdrl.train", CARTPOLE, *SIZES, *flags, "--run-dir", run_dir)
    return run_dir


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """A whole run of four ranks, with and without fixed shards."""
    folder = tmp_path_factory.mktemp("four")
    train(folder / "plain", "--nprocs", "4")
    train(folder / "same-bits", "--nprocs", "4", "--sync.deterministic")
    return folder


def cut(run: Path, copy: Path) -> Path:
    """The run as a kill after update 3 would have left it."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / LAST)
    (copy / "summary.json").unlink()
    return copy


TOPOLOGIES = {
    "1 x 1": [],
    "2 x 1": ["--nprocs", "2"],
    "1 x 2": ["--devices", "2"],
    "2 x 2": ["--nprocs", "2", "--devices", "2"],
}


@pytest.mark.parametrize("flags", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_same_bits_in_deterministic_mode(four_ranks, flags, tmp_path):
    before = four_ranks / "same-bits"
    after = train(cut(before, tmp_path / "run"), "--sync.deterministic", *flags)
    assert "resumed at update 3 of 6" in (after / "log.txt").read_text()
    ours, theirs = (json.loads((d / "summary.json").read_text()) for d in (after, before))
    assert ours["params_sha256"] == theirs["params_sha256"]
    assert ours["episode_return_mean"] == theirs["episode_return_mean"]
    assert (ours["world_size"], theirs["world_size"]) == (2 if "--nprocs" in flags else 1, 4)


def test_to_rounding_otherwise(four_ranks, tmp_path):
    before = four_ranks / "plain"
    after = train(cut(before, tmp_path / "run"))
    assert difference(after / LAST, before / LAST) <= 1e-5
