"""Playing a checkpoint for a recording: one episode of every environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmdrl.acting.player import make_chooser, play_steps
from spmdrl.config import Config, ConfigError
from spmdrl.episodes.feeds import Feed
from spmdrl.episodes.format import Episode, describe_spec, encode, named_obs
from spmdrl.runtime.consent import Consent
from spmdrl.runtime.models import load_model

if TYPE_CHECKING:
    from spmdrl.acting.player import PlayedStep
    from spmdrl.envs.base import EnvBatch
    from spmdrl.nets import Policy
    from spmdrl.types import EnvSpec, Obs

__all__ = ["Player", "RecordingPlan", "load_player", "play_group", "spaces"]


@dataclass(frozen=True)
class RecordingPlan:
    """What rank 0 has found out and every worker needs."""

    config: Config
    checkpoint: Path
    feed: Feed
    episodes: int
    about: dict[str, Any]
    """What the index says besides the episodes. Known from the start: a training run that is still
    under way may delete the checkpoint before the last episode is over."""
    consent: Consent

    @property
    def out(self) -> str:
        return self.feed.address

    @property
    def groups(self) -> list[range]:
        """Episodes that are played together. They depend on nothing but the options: a network's
        last bits can differ with the number of rows it computes at once."""
        size = self.config.eval.num_envs
        starts = range(0, self.episodes, size)
        return [range(start, min(start + size, self.episodes)) for start in starts]


class EpisodeBuffer:
    """Rows of one environment until its episode is over."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, step: PlayedStep, i: int) -> None:
        answer = step.answer
        self._rows.append(
            {name: np.array(x[i]) for name, x in named_obs("obs", step.obs).items()}
            | {
                "action": step.action[i],
                "reward": answer.reward[i],
                "terminated": answer.terminated[i],
                "truncated": answer.truncated[i],
                "valid": step.valid[i],
            }
        )

    def finish(self, last_obs: Obs, i: int) -> dict[str, np.ndarray]:
        columns = {name: np.stack([row[name] for row in self._rows]) for name in self._rows[0]}
        self._rows = []
        last = {name: np.array(x[i]) for name, x in named_obs("last_obs", last_obs).items()}
        return columns | last


class Player(NamedTuple):
    policy: Policy
    choose: Callable[..., Any]


def play_group(
    plan: RecordingPlan,
    env: EnvBatch,
    player: Player,
    group: range,
    worker: int,
    update: int | None = None,
) -> list[Episode]:
    """One episode of every environment, each handed over as soon as it is done."""
    from spmdrl.envs.base import env_seeds

    limit, seeds = plan.config.eval.max_steps, env_seeds(plan.config.eval.seed, group)
    buffers = {i: EpisodeBuffer() for i in range(len(group))}
    written: list[Episode] = []
    for step in play_steps(env, *player, group, limit):
        for i, buffer in list(buffers.items()):
            buffer.add(step, i)
            if step.answer.episode_over[i]:
                arrays = buffers.pop(i).finish(step.answer.obs, i)
                episode, data = encode(worker, group[i], seeds[i], arrays, update)
                plan.feed.add(episode, data)
                written.append(episode)
        if not buffers:
            return written
    late = [group[i] for i in buffers]
    raise ConfigError(
        f"{len(late)} episodes, the first of them {late[0]}, did not end within {limit} steps; "
        f"raise --max-steps. The recording in {plan.out} is unfinished: delete it"
    )


def load_player(plan: RecordingPlan, spec: EnvSpec) -> Player:
    played = plan.config.eval
    policy, variables = load_model(plan.config, spec, plan.checkpoint)
    return Player(policy, make_chooser(policy, variables, played.deterministic, played.seed))


def spaces(config: Config) -> dict[str, Any]:
    from spmdrl.envs import make_env

    env = make_env(config, range(1), threads=1)
    found = describe_spec(env.spec)
    env.close()
    return found
