"""Episodes with a trained policy, and what they say about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spmdrl.acting.player import PlayedStep, make_chooser, play_steps
from spmdrl.config import Config, ConfigError, EvalConfig
from spmdrl.runtime.files import write_json
from spmdrl.runtime.models import load_model
from spmdrl.runtime.video import Video

if TYPE_CHECKING:  # they bring flax, and input is checked before that is loaded
    from spmdrl.envs.base import EnvBatch
    from spmdrl.nets import Policy

__all__ = [
    "EVAL_FILE", "Finished", "make_envs", "play", "play_in", "spread", "statistics", "summarize",
    "write_result",
]  # fmt: skip

EVAL_FILE = "eval.json"


class Finished:
    """`(return, length)` of the episodes that each environment has finished."""

    def __init__(self, num_envs: int):
        self._score, self._length = np.zeros(num_envs), np.zeros(num_envs, int)
        self.episodes: list[list[tuple[float, int]]] = [[] for _ in range(num_envs)]

    def add(self, step: PlayedStep) -> None:
        self._score += np.where(step.valid, step.answer.reward, 0.0)
        self._length += step.valid
        for i in np.flatnonzero(step.answer.episode_over):
            self.episodes[i].append((float(self._score[i]), int(self._length[i])))
            self._score[i], self._length[i] = 0.0, 0

    def fewest(self) -> int:
        return min(map(len, self.episodes))

    def in_turns(self, each: int) -> list[tuple[float, int]]:
        """Everybody's first, then everybody's second, and so on, up to `each` of everybody."""
        return [found[i] for i in range(each) for found in self.episodes if len(found) > i]


def play(config: Config, checkpoint: Path, frames: Video | None = None) -> list[tuple[float, int]]:
    """`(return, length)` of the evaluation's episodes, see `play_in`.

    `frames` get the first environment's first episode.
    """
    env, wanted = make_envs(config, draw=frames is not None), config.eval
    policy, variables = load_model(config, env.spec, checkpoint)
    choose = make_chooser(policy, variables, wanted.deterministic, wanted.seed)
    episodes = play_in(env, policy, choose, wanted, frames)
    env.close()
    if not episodes:
        raise ConfigError(f"no episode ended within eval.max_steps {wanted.max_steps}")
    return episodes


def make_envs(config: Config, draw: bool = False, threads: int = 1) -> EnvBatch:
    """The environments of an evaluation."""
    from spmdrl.envs import make_env

    num_envs = min(config.eval.num_envs, config.eval.episodes)
    return make_env(_played(config, draw), range(num_envs), threads)


def play_in(
    env: EnvBatch,
    policy: Policy,
    choose: Callable[..., Any],
    wanted: EvalConfig,
    frames: Video | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> list[tuple[float, int]]:
    """Every environment plays the same number of episodes: taking the first to finish would prefer
    short ones. `enough` can end it before."""
    each, finished = -(-wanted.episodes // env.num_envs), Finished(env.num_envs)
    for step in play_steps(env, policy, choose, range(env.num_envs), wanted.max_steps):
        if frames is not None and not finished.episodes[0]:
            frames.append(env.render())
        finished.add(step)
        if finished.fewest() >= each or enough():
            break
    return finished.in_turns(each)[: wanted.episodes]


def _played(config: Config, draw: bool) -> Config:
    """The environments of an evaluation have a seed of their own, and may be drawn."""
    options = dict(config.env.options) | ({"render_mode": "rgb_array"} if draw else {})
    env = dataclasses.replace(config.env, options=options)
    return dataclasses.replace(config, seed=config.eval.seed, env=env)


def summarize(
    episodes: Sequence[tuple[float, int]], config: Config, checkpoint: Path
) -> dict[str, Any]:
    """What `eval.json` holds."""
    found = statistics(episodes)
    interval = None
    if found["return_std"] is not None:
        half = 1.96 * found["return_std"] / len(episodes) ** 0.5
        interval = [found["return_mean"] - half, found["return_mean"] + half]
    return {
        "checkpoint": checkpoint.name,
        "deterministic": config.eval.deterministic,
        "seed": config.eval.seed,
        **found,
        "return_ci95": interval,
        "returns": [r for r, _ in episodes],
    }


def statistics(episodes: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """One episode has neither a deviation nor an interval."""
    returns = np.array([r for r, _ in episodes])
    return {
        "episodes": len(returns),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std(ddof=1)) if len(returns) > 1 else None,
        "length_mean": float(np.mean([n for _, n in episodes])),
    }


def write_result(run_dir: Path, result: dict[str, Any]) -> None:
    write_json(run_dir / EVAL_FILE, result)


def spread(result: dict[str, Any]) -> str:
    """`return 470.1 ± 20.3 over 20 episodes`."""
    count, std = result["episodes"], result["return_std"]
    deviation = "" if std is None else f" ± {std:.1f}"
    return (
        f"return {result['return_mean']:.1f}{deviation} over {count} "
        f"episode{'s' if count > 1 else ''}"
    )
