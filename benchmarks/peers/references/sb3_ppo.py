"""PPO of Stable-Baselines3, or of SBX, which is the same interface over JAX.

    python sb3_ppo.py --envs 8                              # some seconds
    python sb3_ppo.py --library sbx --env HalfCheetah-v4 --steps 2048 --epochs 10 --minibatches 32

On the CPU, as the documentation of Stable-Baselines3 advises for networks without convolutions.
Observations and rewards of MuJoCo are normalised by VecNormalize, as spmdrl's configs do.
SBX does not clip the value's change; all else is the same.
"""

from __future__ import annotations

import argparse
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize
from work import GAE_LAMBDA, GAMMA, MAX_GRAD_NORM, SEED, VALUE_COEF, Clock, Work, read_work

MUJOCO = ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")


class Report(BaseCallback):
    """One line an update: the next rollout starts when the update before it is done."""

    def __init__(self, clock: Clock, steps: int):
        super().__init__()
        self.clock, self.steps, self.rollouts = clock, steps, 0

    def _on_rollout_start(self) -> None:
        if self.rollouts:
            self.clock.update(self.steps)
        else:
            self.clock.start()
        self.rollouts += 1

    def _on_training_end(self) -> None:
        self.clock.update(self.steps)

    def _on_step(self) -> bool:
        return True


def make_env(work: Work, vector: str) -> VecEnv:
    kinds: dict[str, Any] = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}
    # Forked workers share the memory of the libraries; the default start method would load
    # PyTorch anew in each of them.
    options = {"start_method": "fork"} if vector == "subproc" else {}
    env = make_vec_env(
        work.env, work.envs, seed=SEED, vec_env_cls=kinds[vector], vec_env_kwargs=options
    )
    return VecNormalize(env, gamma=GAMMA) if work.env.startswith(MUJOCO) else env


def make_model(library: str, work: Work, env: VecEnv) -> Any:
    if library == "sbx":
        from sbx import PPO

        own: dict[str, Any] = {}
    else:
        from stable_baselines3 import PPO

        own = {"clip_range_vf": work.clip}
    return PPO(
        "MlpPolicy",
        env,
        learning_rate=lambda left: left * work.lr,
        n_steps=work.steps,
        batch_size=work.minibatch,
        n_epochs=work.epochs,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        clip_range=work.clip,
        ent_coef=work.entropy,
        vf_coef=VALUE_COEF,
        max_grad_norm=MAX_GRAD_NORM,
        policy_kwargs={"net_arch": {"pi": list(work.hidden), "vf": list(work.hidden)}},
        seed=SEED,
        device="cpu",
        **own,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=["sb3", "sbx"], default="sb3")
    parser.add_argument("--vector", choices=["dummy", "subproc"], default="dummy")
    work, args = read_work(parser)
    env = make_env(work, args.vector)
    model = make_model(args.library, work, env)
    report = Report(Clock(f"{args.vector} vector environment"), work.batch)
    model.learn(work.batch * work.all_updates, callback=report)
    env.close()


if __name__ == "__main__":
    main()
