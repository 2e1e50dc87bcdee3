"""PPO in plain PyTorch on envpool, for discrete actions: what one would write by hand on a CPU.

    python torch_ppo.py --env Pong-v5 --envs 8 --clip 0.1         # some seconds an update

The network, the batch and the loss are those of spmdrl: the Nature CNN with one torso for images,
two MLPs otherwise; clipped values; the row after an episode's end, in which envpool resets, has no
weight. envpool steps in sync mode, with as many threads as cores.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import envpool
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
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
ATARI = {"episodic_life": True, "reward_clip": True}


class ActorCritic(nn.Module):
    def __init__(self, obs_shape: tuple[int, ...], actions: int, hidden: tuple[int, ...]):
        super().__init__()
        self.is_image, self.layout = len(obs_shape) == 3, torch.contiguous_format
        self.actor_torso, width = nature_cnn() if self.is_image else mlp(obs_shape[0], hidden)
        # images share one torso
        self.critic_torso = None if self.is_image else mlp(obs_shape[0], hidden)[0]
        self.policy_head, self.value_head = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        if self.is_image:
            obs = (obs.float() / 255).contiguous(memory_format=self.layout)
        actor = self.actor_torso(obs)
        critic = actor if self.critic_torso is None else self.critic_torso(obs)
        dist = Categorical(logits=self.policy_head(actor), validate_args=False)
        return dist, self.value_head(critic)[:, 0]


def nature_cnn() -> tuple[nn.Module, int]:
    layers = [
        nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(),
    ]  # fmt: skip
    return nn.Sequential(*layers), 512


def mlp(width: int, hidden: tuple[int, ...]) -> tuple[nn.Module, int]:
    layers: list[nn.Module] = []
    for wide in hidden:
        layers += [nn.Linear(width, wide), nn.Tanh()]
        width = wide
    return nn.Sequential(*layers), width


class Rollout:
    """Time-major rows, and the environments that fill them."""

    def __init__(self, work: Work):
        options = ATARI if work.env.endswith("-v5") else {}
        size = {"num_envs": work.envs, "num_threads": CORES}
        self.env = envpool.make(work.env, env_type="gymnasium", seed=SEED, **size, **options)
        shape, rows = self.env.observation_space.shape, (work.steps, work.envs)
        kind = torch.uint8 if len(shape) == 3 else torch.float32
        self.obs = torch.zeros(work.steps + 1, work.envs, *shape, dtype=kind)
        self.action = torch.zeros(rows, dtype=torch.int64)
        self.log_prob, self.reward, self.valid = (torch.zeros(rows) for _ in range(3))
        self.terminated, self.done = torch.zeros(rows), torch.zeros(rows)
        self.value = torch.zeros(work.steps + 1, work.envs)
        self.obs[-1] = torch.as_tensor(self.env.reset()[0])
        self.was_done = torch.zeros(work.envs)

    @torch.no_grad()
    def collect(self, net: ActorCritic) -> None:
        self.obs[0] = self.obs[-1]
        for t in range(len(self.action)):
            dist, self.value[t] = net(self.obs[t])
            action = dist.sample()
            self.action[t], self.log_prob[t] = action, dist.log_prob(action)
            self.valid[t] = 1 - self.was_done
            obs, reward, terminated, truncated, _ = self.env.step(action.numpy().astype(np.int32))
            self.obs[t + 1], self.reward[t] = torch.as_tensor(obs), torch.as_tensor(reward)
            self.terminated[t] = torch.as_tensor(terminated)
            self.was_done = torch.as_tensor(terminated | truncated).float()
            self.done[t] = self.was_done
        self.value[-1] = net(self.obs[-1])[1]

    def advantages(self) -> Tensor:
        """A time limit bootstraps from the final observation, which stands in the next row."""
        found, last = torch.zeros_like(self.reward), torch.zeros(self.reward.shape[1])
        for t in reversed(range(len(found))):
            after = GAMMA * (1 - self.terminated[t]) * self.value[t + 1]
            delta = self.reward[t] + after - self.value[t]
            last = found[t] = delta + GAMMA * GAE_LAMBDA * (1 - self.done[t]) * last
        return found

    def rows(self) -> dict[str, Tensor]:
        advantage = self.advantages()
        columns = {
            "obs": self.obs[:-1], "action": self.action, "log_prob": self.log_prob,
            "value": self.value[:-1], "advantage": advantage,
            "target": advantage + self.value[:-1], "valid": self.valid,
        }  # fmt: skip
        return {name: column.flatten(0, 1) for name, column in columns.items()}


def loss(net: ActorCritic, rows: dict[str, Tensor], work: Work) -> Tensor:
    dist, value = net(rows["obs"])
    weight = rows["valid"] / rows["valid"].sum()
    mean = (weight * rows["advantage"]).sum()
    deviation = (weight * (rows["advantage"] - mean) ** 2).sum().sqrt()
    advantage = (rows["advantage"] - mean) / (deviation + 1e-8)
    ratio = (dist.log_prob(rows["action"]) - rows["log_prob"]).exp()
    clipped = ratio.clamp(1 - work.clip, 1 + work.clip)
    policy = -torch.minimum(ratio * advantage, clipped * advantage)
    bounded = rows["value"] + (value - rows["value"]).clamp(-work.clip, work.clip)
    error = torch.maximum((value - rows["target"]) ** 2, (bounded - rows["target"]) ** 2)
    return (weight * (policy + VALUE_COEF * 0.5 * error - work.entropy * dist.entropy())).sum()


def learn(net: ActorCritic, optimizer: Any, rows: dict[str, Tensor], work: Work) -> None:
    for _ in range(work.epochs):
        for chosen in torch.randperm(work.batch).split(work.minibatch):
            minibatch = {name: column[chosen] for name, column in rows.items()}
            optimizer.zero_grad()
            loss(net, minibatch, work).backward()
            nn.utils.clip_grad_norm_(net.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=CORES, help="of PyTorch")
    parser.add_argument("--channels-last", action="store_true", help="layout of images")
    work, args = read_work(parser)
    torch.manual_seed(SEED)
    torch.set_num_threads(args.threads)
    rollout = Rollout(work)
    space = rollout.env.action_space
    net = ActorCritic(tuple(rollout.obs.shape[2:]), int(space.n), work.hidden)
    if args.channels_last:
        net.layout = torch.channels_last
        net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(net.parameters(), lr=work.lr, eps=ADAM_EPS)
    clock = Clock(f"{args.threads} PyTorch and {CORES} envpool threads")
    for update in range(work.all_updates):
        for group in optimizer.param_groups:
            group["lr"] = work.lr * (1 - update / work.all_updates)
        rollout.collect(net)
        learn(net, optimizer, rollout.rows(), work)
        clock.update(work.batch)


if __name__ == "__main__":
    main()
