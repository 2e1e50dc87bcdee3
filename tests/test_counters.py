"""Beyond 2^31 steps everything counts on."""

from __future__ import annotations

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config, ConfigError, EnvConfig, OptimConfig
from spmdrl.learning.optimizer import learning_rate
from spmdrl.runtime.checkpoint import Checkpointer, Snapshot, read_snapshot, write_snapshot
from spmdrl.runtime.clock import Rate
from spmdrl.runtime.logger import TensorBoardWriter
from spmdrl.runtime.validate import MOST_UPDATES, validate
from tests.children import succeed, train_command

LONG = Config(
    total_steps=2**45, env=EnvConfig(num_envs=1024), algo=Ppo(num_steps=64),
    optim=OptimConfig(lr_schedule="linear"),
)  # fmt: skip
FAR = 2**29  # updates, of 65,536 steps each


def test_steps_are_counted_without_a_limit(tmp_path):
    row = Rate(LONG, FAR - 1).row(FAR, 1.0)
    assert row["progress/steps"] == FAR * 65_536 == 2**45
    assert json.loads(json.dumps(row)) == row
    writer = TensorBoardWriter(tmp_path, LONG)
    writer.write(row)
    writer.close()


def test_updates_are_counted_in_32_bits_and_more_are_refused():
    validate(LONG)
    most = replace(LONG, total_steps=MOST_UPDATES * LONG.batch_size)
    validate(most)
    with pytest.raises(ConfigError, match=r"more than 2147483646; nearest: \d+"):
        validate(replace(most, total_steps=most.total_steps + LONG.batch_size))


def test_the_schedule_of_a_long_run_ends_where_it_should():
    half = learning_rate(LONG, jnp.asarray(LONG.num_updates // 2, jnp.int32))
    assert float(half) == pytest.approx(LONG.optim.lr / 2, rel=1e-6)
    last = learning_rate(LONG, jnp.asarray(LONG.num_updates - 1, jnp.int32))
    assert 0.0 <= float(last) < 1e-6 * LONG.optim.lr


def test_a_checkpoint_of_a_late_update_is_found(tmp_path):
    keeper = Checkpointer(tmp_path / "checkpoints", 2)
    for step in (99_999_999, MOST_UPDATES - 1, MOST_UPDATES):
        keeper.save(Snapshot(step, {}, {"segments": []}))
    assert keeper.steps() == [MOST_UPDATES - 1, MOST_UPDATES]
    found = keeper.restore(lambda text: None)
    assert found is not None
    assert found.step == MOST_UPDATES


@pytest.mark.slow
def test_a_run_goes_on_beyond_two_to_the_31_steps(tmp_path):
    """A short run whose checkpoint is moved to where 2^31 steps lie behind it."""
    batch, late = 8 * 16, 2**31 // (8 * 16) - 1
    words = [
        "--env.num-envs", 8, "--algo.num-steps", 16, "--checkpoint.envs", "fresh",
        "--log.panel", "off", "--log.tensorboard", "--run-dir", tmp_path / "run",
    ]  # fmt: skip
    succeed(*train_command(*words, "--total-steps", 2 * batch)[1:])
    folder = tmp_path / "run" / "checkpoints"
    old = read_snapshot(folder / "update-00000002")
    meta = old.meta | {"step": late}
    write_snapshot(folder / f"update-{late:08d}", Snapshot(late, old.arrays, meta))
    succeed(*train_command(*words, "--total-steps", (late + 3) * batch)[1:])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["progress/steps"] for row in rows][-3:] == [2**31, 2**31 + batch, 2**31 + 2 * batch]
    assert [row["progress/update"] for row in rows][-1] == late + 3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] == 2**31 + 2 * batch
