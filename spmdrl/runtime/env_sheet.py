"""A sheet about an environment: what it declares, what networks see, what happens in random play.

    python -m spmdrl.runtime.env_sheet

is the child process of `ask_for_sheet`: an environment can end the process that makes it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spmdrl.acting.player import PlayedStep
from spmdrl.config import Config, ConfigError, from_json, to_json
from spmdrl.envs.child import ANSWER_S, Child, serve
from spmdrl.envs.errors import EnvError
from spmdrl.parallel.topology import cores
from spmdrl.runtime.evaluation import Finished

if TYPE_CHECKING:
    from spmdrl.envs.base import EnvBatch

__all__ = ["Played", "Sheet", "ask_for_sheet", "make_sheet"]

FEWEST = 2  # steps that are timed, however long they take


@dataclass(frozen=True)
class Played:
    """What was seen in random play."""

    num_envs: int
    steps: int  # of each environment
    steps_per_second: float  # of all together
    reward: tuple[float, float]  # smallest and largest
    episodes: int
    length: tuple[int, int]  # of whole episodes, shortest and longest
    returns: tuple[float, float]  # lowest and highest
    wrong: str  # what contradicts the declared spaces


@dataclass(frozen=True)
class Sheet:
    """Everything that `spmdrl envs` shows of an environment."""

    env_id: str
    backend: str
    family: str
    observation: tuple[str, ...]
    action: tuple[str, ...]
    networks_see: str
    action_kind: str
    time_limit: int | None
    options: dict[str, str]
    played: Played


def ask_for_sheet(config: Config, seconds: float) -> Sheet:
    """From a process of its own; ConfigError for a refusal, EnvError for a crash or a hang."""
    with Child(__name__) as child:
        said = child.ask({"config": to_json(config), "seconds": seconds}, ANSWER_S + 2 * seconds)
    if "refused" in said:
        raise ConfigError(said["refused"])
    if "fault" in said:
        raise EnvError(f"env.id {config.env.id}: {said['fault']}", said["details"])
    if "crashed" in said:
        raise EnvError(f"env.id {config.env.id}: its process gave no sheet: {said['crashed']}")
    return Sheet(**said | {"played": Played(**said["played"])})


def make_sheet(config: Config, seconds: float) -> Sheet:
    """In this process."""
    from spmdrl.envs import make_env
    from spmdrl.envs.checkup import describe_action
    from spmdrl.envs.facts import facts_of
    from spmdrl.envs.ids import check_id
    from spmdrl.nets import make_policy
    from spmdrl.nets.describe import describe

    env = config.env
    check_id(env)
    batch = make_env(config, range(env.num_envs), env.threads or cores())
    try:
        facts = facts_of(env, batch)
        make_policy(config, batch.spec)  # what no network can be made for is refused here
        return Sheet(
            env_id=env.id,
            backend=env.backend,
            networks_see=describe(config, batch.spec),
            action_kind=describe_action(batch.spec.action),
            played=play(batch, seconds),
            **vars(facts),
        )
    finally:
        batch.close()


# ---------------------------------------------------------------------------------------------
# Random play


def play(batch: EnvBatch, seconds: float) -> Played:
    """Random actions for so long; what the first step compiles or loads is not timed."""
    from spmdrl.envs.checkup import disagreement

    finished, steps, clock, wrong = Finished(batch.num_envs), 0, 0.0, ""
    low, high = np.inf, -np.inf
    until = np.inf
    for step, took in random_steps(batch):
        if steps == 0:
            until = time.perf_counter() + seconds
        else:
            clock += took
        steps += 1
        finished.add(step)
        wrong = wrong or disagreement(batch.spec, [step.answer])
        rewards = step.answer.reward[step.valid]
        low, high = rewards.min(initial=low), rewards.max(initial=high)
        if steps > FEWEST and time.perf_counter() >= until:
            break
    episodes = [episode for found in finished.episodes for episode in found]
    returns, lengths = [score for score, _ in episodes] or [0.0], [n for _, n in episodes] or [0]
    return Played(
        num_envs=batch.num_envs,
        steps=steps,
        steps_per_second=batch.num_envs * (steps - 1) / clock,
        reward=(float(low), float(high)),
        episodes=len(episodes),
        length=(min(lengths), max(lengths)),
        returns=(min(returns), max(returns)),
        wrong=wrong,
    )


def random_steps(batch: EnvBatch) -> Iterator[tuple[PlayedStep, float]]:
    """Steps without an end, and the seconds that the simulator took for each.

    Where a mask says what is allowed, actions are only that.
    """
    from spmdrl.envs.checkup import random_actions

    rng, obs = np.random.default_rng(0), batch.reset()
    resetting = np.zeros(batch.num_envs, bool)
    while True:
        action = random_actions(batch.spec.action, obs, rng)
        started = time.perf_counter()
        batch.send(action)
        answer = batch.recv()
        took = time.perf_counter() - started
        yield PlayedStep(obs, action, answer, ~resetting), took
        obs, resetting = answer.obs, answer.terminated | answer.truncated


def _answer(wanted: dict[str, Any]) -> dict[str, Any]:
    sheet = make_sheet(from_json(wanted["config"]), wanted["seconds"])
    return dataclasses.asdict(sheet)


if __name__ == "__main__":
    sys.exit(serve(_answer))
