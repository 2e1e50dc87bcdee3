"""PPO of Sample Factory (its APPO), in its default asynchronous form or in one process.

    python sample_factory_ppo.py --envs 8                   # some seconds

`--mode parallel` is the default: learner, inference and workers are processes, sampling goes on
while the learner learns, so the policy that samples is a little older than the one that learns.
`--mode serial` does one after the other in one process, like the other trainers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import gymnasium
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from work import (
    ADAM_EPS,
    GAE_LAMBDA,
    GAMMA,
    MAX_GRAD_NORM,
    SEED,
    VALUE_COEF,
    Clock,
    Work,
    read_work,
)

CORES = len(os.sched_getaffinity(0))


class Report(AlgoObserver):
    """One line for each training iteration, which takes one batch."""

    def __init__(self, clock: Clock, steps: int):
        self.clock, self.steps = clock, steps

    def on_start(self, runner: Any) -> None:
        self.clock.start()

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        self.clock.update(self.steps)


def make_env(name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> Any:
    return gymnasium.make(name, render_mode=render_mode)


def settings(work: Work, mode: str, folder: str) -> dict[str, Any]:
    serial = mode == "serial"
    workers = 1 if serial else CORES
    return {
        "algo": "APPO", "env": work.env, "experiment": "peer", "train_dir": folder,
        "device": "cpu", "seed": SEED,
        "serial_mode": serial, "async_rl": not serial, "num_workers": workers,
        "num_envs_per_worker": work.envs // workers, "worker_num_splits": 1 if serial else 2,
        "rollout": work.steps, "batch_size": work.minibatch,
        "num_batches_per_epoch": work.minibatches, "num_epochs": work.epochs,
        "train_for_env_steps": work.batch * work.all_updates,
        "use_rnn": False, "nonlinearity": "tanh", "actor_critic_share_weights": False,
        "normalize_input": False, "normalize_returns": False,
        "learning_rate": work.lr, "gamma": GAMMA, "gae_lambda": GAE_LAMBDA,
        "ppo_clip_ratio": work.clip, "ppo_clip_value": work.clip,
        "exploration_loss_coeff": work.entropy, "value_loss_coeff": VALUE_COEF,
        "max_grad_norm": MAX_GRAD_NORM, "adam_eps": ADAM_EPS,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["parallel", "serial"], default="parallel")
    work, args = read_work(parser)
    register_env(work.env, make_env)
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{name}={value}" for name, value in settings(work, args.mode, folder).items()]
        words += ["--encoder_mlp_layers", *map(str, work.hidden)]
        config = parse_full_cfg(parse_sf_args(words)[0], words)
        config, runner = make_runner(config)
        runner.register_observer(Report(Clock(f"{args.mode} mode"), work.batch))
        status = runner.init()
        if status == ExperimentStatus.SUCCESS:
            status = runner.run()
    if status != ExperimentStatus.SUCCESS:
        sys.exit(f"Sample Factory ended with status {status}")


if __name__ == "__main__":
    main()
