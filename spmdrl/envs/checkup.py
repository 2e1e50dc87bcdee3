"""Whether an environment does what it declares: made, reset and stepped, and what was seen.

    python -m spmdrl.envs.checkup

is a child process (see `child`) that is asked by the fields of an `EnvConfig`: an environment can
end the process that steps it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import numpy as np

from spmdrl.config import Config, ConfigError, EnvConfig
from spmdrl.envs import make_env
from spmdrl.envs.child import serve
from spmdrl.types import ActionSpace, EnvSpec, Obs, TimeStep

__all__ = ["Checkup", "check", "random_actions"]

ENVS = 2


@dataclasses.dataclass(frozen=True)
class Checkup:
    """What an environment is and what it did in a few random steps."""

    id: str
    refused: str = ""  # the reason, where it cannot be used
    wrong: str = ""  # what contradicts the declared spaces
    note: str = ""  # what a user should know
    observation: str = ""
    action: str = ""
    reward: tuple[float, float] = (0.0, 0.0)  # smallest and largest
    episodes: int = 0
    steps_per_second: float = 0.0

    @property
    def sound(self) -> bool:
        return not self.refused and not self.wrong


def check(env: EnvConfig, steps: int = 20, compiled: bool = True) -> Checkup:
    """`compiled` also compares the compiled step with the plain one, bit for bit."""
    try:
        answers, spec, rate = play(env, steps)
    except ConfigError as error:
        return Checkup(env.id, refused=str(error))
    rewards = np.stack([a.reward for a in answers])
    wrong, note = disagreement(spec, answers), ""
    if not wrong and compiled:
        wrong = compiled_disagreement(env, answers)
    if wrong and not same(play(env, steps)[0], answers):
        # The simulator itself: nothing to compare the compiled step with.
        wrong, note = "", "not reproducible: the same seed and actions bring something else"
    return Checkup(
        id=env.id,
        wrong=wrong,
        note=note,
        observation=describe_observation(spec),
        action=describe_action(spec.action),
        reward=(float(rewards.min()), float(rewards.max())),
        episodes=int(sum(a.episode_over.sum() for a in answers)),
        steps_per_second=rate,
    )


def play(env: EnvConfig, steps: int) -> tuple[list[TimeStep], EnvSpec, float]:
    """The answers to random actions, what was declared, and steps per second."""
    batch = make_env(Config(env=env), range(ENVS), threads=1)
    try:
        obs, answers, rng = batch.reset(), [], np.random.default_rng(0)
        start = time.perf_counter()
        for _ in range(steps):
            batch.send(random_actions(batch.spec.action, obs, rng))
            answers.append(batch.recv())
            obs = answers[-1].obs
        return answers, batch.spec, ENVS * steps / (time.perf_counter() - start)
    finally:
        batch.close()


def random_actions(space: ActionSpace, obs: Obs, rng: np.random.Generator) -> np.ndarray:
    """As a policy gives them; where a mask says what is allowed, only that."""
    rows = len(next(iter(obs.values())) if isinstance(obs, dict) else obs)
    if space.kind == "box":
        return rng.uniform(-1.0, 1.0, (rows, int(np.prod(space.shape)))).astype(np.float32)
    scores = rng.random((rows, sum(space.nvec)))
    if isinstance(obs, dict) and "action_mask" in obs:
        scores = np.where(np.asarray(obs["action_mask"]).reshape(rows, -1) > 0, scores, -1.0)
    parts = np.split(scores, np.cumsum(space.nvec)[:-1], axis=1)
    chosen = np.stack([part.argmax(1) for part in parts], axis=1).astype(np.int32)
    return chosen[:, 0] if space.kind == "discrete" else chosen


# ---------------------------------------------------------------------------------------------
# Does it do what it says?


def disagreement(spec: EnvSpec, answers: list[TimeStep]) -> str:
    """The first thing that an answer has otherwise than declared, or nothing."""
    for answer in answers:
        parts = answer.obs if isinstance(answer.obs, dict) else {"": answer.obs}
        for name, part in spec.parts.items():
            x = np.asarray(parts[name])
            if x.dtype != part.dtype or x.shape[1:] != tuple(part.shape):
                return f"{name or 'observation'} is {x.dtype}{x.shape[1:]}, not {part}"
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                return f"{name or 'observation'} is not finite"
        if not np.isfinite(answer.reward).all():
            return "a reward is not finite"
    return ""


def compiled_disagreement(env: EnvConfig, expected: list[TimeStep]) -> str:
    """Whether the same actions in one compiled program bring anything else."""
    import jax

    batch = make_env(Config(env=env), range(ENVS), threads=1)
    try:
        with jax.enable_x64(batch.needs_x64):
            xla = batch.xla()
            if xla is None:
                return ""
            obs, rng = batch.reset(), np.random.default_rng(0)
            step, handle = jax.jit(xla.step), xla.handle
            for t, answer in enumerate(expected):
                actions = random_actions(batch.spec.action, obs, rng)
                handle, found = step(handle, actions)
                found = jax.tree.map(np.asarray, found)
                if not same(found, answer):
                    return f"the compiled step differs from the plain one at step {t}"
                obs = found.obs
        return ""
    finally:
        batch.close()


def same(a: Any, b: Any) -> bool:
    import jax

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(flushed(x), flushed(y), equal_nan=True) for x, y in pairs)


def flushed(x: np.ndarray) -> np.ndarray:
    """Compiled programs round numbers below 1e-38 to 0, numpy does not."""
    if x.dtype.kind != "f":
        return x.astype(np.float64)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, 0.0, x)


# ---------------------------------------------------------------------------------------------
# In words


def describe_observation(spec: EnvSpec) -> str:
    words = [
        f"{name or 'observation'} {part.kind} {'x'.join(map(str, part.shape))}"
        for name, part in spec.parts.items()
    ]
    return "; ".join(words)


def describe_action(space: ActionSpace) -> str:
    if space.kind == "box":
        return f"box {'x'.join(map(str, space.shape))}"
    if space.kind == "discrete":
        return f"{space.nvec[0]} choices"
    return f"{len(space.nvec)} x {max(space.nvec)} choices at most"


def _answer(wanted: dict[str, Any]) -> dict[str, Any]:
    return dataclasses.asdict(check(EnvConfig(**wanted)))


if __name__ == "__main__":
    sys.exit(serve(_answer))
