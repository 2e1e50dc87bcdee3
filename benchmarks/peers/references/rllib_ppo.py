"""PPO of RLlib, on its new API stack with PyTorch.

    python rllib_ppo.py --envs 8                            # a minute, mostly until Ray has started

`--runners 0` samples in the main process; otherwise that many processes share the environments.
"""

from __future__ import annotations

import argparse

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from work import GAE_LAMBDA, GAMMA, MAX_GRAD_NORM, SEED, VALUE_COEF, Clock, Work, read_work


def make_config(work: Work, runners: int) -> PPOConfig:
    model = DefaultModelConfig(
        fcnet_hiddens=list(work.hidden), fcnet_activation="tanh", vf_share_layers=False
    )
    return (
        PPOConfig()
        .environment(work.env)
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=work.envs // max(1, runners),
            rollout_fragment_length=work.steps,
        )
        .training(
            train_batch_size_per_learner=work.batch,
            minibatch_size=work.minibatch,
            num_epochs=work.epochs,
            lr=work.lr,
            gamma=GAMMA,
            lambda_=GAE_LAMBDA,
            clip_param=work.clip,
            vf_clip_param=work.clip,
            entropy_coeff=work.entropy,
            vf_loss_coeff=VALUE_COEF,
            grad_clip=MAX_GRAD_NORM,
            use_kl_loss=False,
        )
        .rl_module(model_config=model)
        .debugging(seed=SEED)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runners", type=int, default=2)
    work, args = read_work(parser)
    ray.init(include_dashboard=False, log_to_driver=False)
    algorithm = make_config(work, args.runners).build_algo()
    where = f"{args.runners} runner processes" if args.runners else "sampling in the main process"
    clock, before = Clock(where), 0
    for _ in range(work.all_updates):
        result = algorithm.train()
        # What was really sampled, which an automatic reset may change.
        total = int(result["num_env_steps_sampled_lifetime"])
        clock.update(total - before)
        before = total
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
