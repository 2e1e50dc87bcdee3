"""What a policy sees of its environments: some entries, several frames, its last action and reward.

A view needs no memory of its own. What was seen before the step, which every actor keeps anyway,
holds the older frames; so checkpoints and resuming need nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spmdrl.config import Config, ConfigError
from spmdrl.envs.actions import to_env_action
from spmdrl.envs.base import EnvBatch, XlaStep
from spmdrl.types import (
    LAST_ACTION,
    LAST_REWARD,
    ActionSpace,
    EnvSpec,
    Obs,
    ObsPart,
    TimeStep,
    channels_first,
)

__all__ = ["View", "ViewedBatch", "make_view"]

ALONE = "obs"  # name of an observation that has no parts of its own, beside what the view adds


@dataclass(frozen=True)
class View:
    """`spec` is what is seen; without any of the options it is what the environment shows."""

    spec: EnvSpec
    shown: EnvSpec  # by the environment
    observe: tuple[int, ...]
    frames: int
    last_action: bool
    last_reward: bool

    @property
    def is_plain(self) -> bool:
        return self.spec == self.shown

    def first(self, obs: Obs, xp: Any) -> Obs:
        """After a reset: the first frame again and again, and nothing done yet."""
        parts = self._parts(obs)
        rows = next(iter(parts.values())).shape[0]
        seen = {name: self._repeated(name, self._chosen(x), xp) for name, x in parts.items()}
        for name, part in self._added().items():
            seen[name] = xp.zeros((rows, *part.shape), part.dtype)
        return self._whole(seen)

    def apply(
        self, before: Obs, resetting: Any, action: Any, answer: TimeStep, xp: Any
    ) -> TimeStep:
        """The answer as it is seen; `before` is what was seen before, and `resetting` says where
        the step was a reset."""
        return answer.replace(obs=self._next(before, resetting, action, answer, xp))

    def _next(self, before: Obs, resetting: Any, action: Any, answer: TimeStep, xp: Any) -> Obs:
        old, start = self._parts(before), self._parts(self.first(answer.obs, xp))
        seen = {
            name: self._pushed(name, old.get(name), self._chosen(x), xp)
            for name, x in self._parts(answer.obs).items()
        }
        if self.last_action:
            seen[LAST_ACTION] = encoded(self.shown.action, action, xp)
        if self.last_reward:
            seen[LAST_REWARD] = xp.clip(answer.reward, -1.0, 1.0).astype(np.float32)[:, None]
        return self._whole(
            {name: where_rows(resetting, start[name], x, xp) for name, x in seen.items()}
        )

    # -- names

    def _parts(self, obs: Obs) -> dict[str, Any]:
        return dict(obs) if isinstance(obs, dict) else {ALONE: obs}

    def _whole(self, parts: dict[str, Any]) -> Obs:
        return parts[ALONE] if isinstance(self.spec.obs, ObsPart) else parts

    def _added(self) -> dict[str, ObsPart]:
        return added_parts(self.shown.action, self.last_action, self.last_reward)

    # -- single parts

    def _chosen(self, x: Any) -> Any:
        return x[:, np.asarray(self.observe)] if self.observe else x

    def _stacks(self, name: str) -> bool:
        parts = self._parts(self.shown.obs)
        return self.frames > 1 and parts[name].is_image

    def _axis(self, name: str) -> int:
        """Of the channels, in a batch."""
        return 1 if channels_first(self._parts(self.shown.obs)[name].shape) else 3

    def _repeated(self, name: str, x: Any, xp: Any) -> Any:
        if not self._stacks(name):
            return x
        return xp.concatenate([x] * self.frames, axis=self._axis(name))

    def _pushed(self, name: str, old: Any, x: Any, xp: Any) -> Any:
        if not self._stacks(name):
            return x
        axis = self._axis(name)
        kept = old[(slice(None),) * axis + (slice(x.shape[axis], None),)]
        return xp.concatenate([kept, x], axis=axis)


class ViewedBatch:
    """See `base.EnvBatch`; what is stepped from Python is seen through the view.

    A compiled step answers with what the environment shows: who compiles it has what was seen
    before in its own state, and applies the view.
    """

    def __init__(self, batch: EnvBatch, view: View):
        self.batch, self.view, self.spec = batch, view, view.spec
        self.num_envs, self.needs_x64 = batch.num_envs, batch.needs_x64

    def reset(self) -> Obs:
        self._resetting = np.zeros(self.num_envs, bool)
        self._seen = self.view.first(self.batch.reset(), np)
        return self._seen

    def send(self, action: np.ndarray) -> None:
        self._action = action
        self.batch.send(action)

    def recv(self) -> TimeStep:
        answer = self.batch.recv()
        answer = self.view.apply(self._seen, self._resetting, self._action, answer, np)
        self._seen, self._resetting = answer.obs, answer.terminated | answer.truncated
        return answer

    def xla(self) -> XlaStep | None:
        return self.batch.xla()

    def render(self) -> np.ndarray:
        return self.batch.render()

    def spaces(self) -> tuple[Any, Any]:
        return self.batch.spaces()

    def hint(self) -> str:
        return self.batch.hint()

    def close(self) -> None:
        self.batch.close()


def where_rows(rows: Any, a: Any, b: Any, xp: Any) -> Any:
    return xp.where(rows.reshape(-1, *(1,) * (b.ndim - 1)), a, b)


def encoded(space: ActionSpace, action: Any, xp: Any) -> Any:
    """One-hot choices side by side, or the numbers that the environment was given."""
    if space.kind == "box":
        given = to_env_action(space, action, xp)
        return given.reshape(given.shape[0], -1).astype(np.float32)
    choices = action.reshape(action.shape[0], -1)
    parts = [choices[:, i, None] == xp.arange(n) for i, n in enumerate(space.nvec)]
    return xp.concatenate(parts, axis=1).astype(np.float32)


def added_parts(action: ActionSpace, last_action: bool, last_reward: bool) -> dict[str, ObsPart]:
    parts = {}
    if last_action:
        width = int(np.prod(action.shape)) if action.kind == "box" else sum(action.nvec)
        parts[LAST_ACTION] = ObsPart((width,), np.dtype(np.float32), kind="history")
    if last_reward:
        parts[LAST_REWARD] = ObsPart((1,), np.dtype(np.float32), kind="history")
    return parts


# ---------------------------------------------------------------------------------------------
# From the config


def make_view(config: Config, shown: EnvSpec) -> View:
    """The view of a run; ConfigError for what its environment does not have."""
    env, net = config.env, config.net
    alone = isinstance(shown.obs, ObsPart)
    parts = {name or ALONE: part for name, part in shown.parts.items()}
    if env.observe:
        _check_observe(env.observe, shown, env.id)
        parts[ALONE] = replace(parts[ALONE], shape=(len(env.observe),))
    if env.frame_stack > 1:
        if not shown.has_image:
            raise ConfigError(f"env.frame_stack stacks images, and {env.id} gives none")
        parts = {name: _stacked(part, env.frame_stack) for name, part in parts.items()}
    added = added_parts(shown.action, net.last_action, net.last_reward)
    spec = replace(shown, obs=parts[ALONE] if alone and not added else parts | added)
    return View(spec, shown, env.observe, env.frame_stack, net.last_action, net.last_reward)


def _stacked(part: ObsPart, frames: int) -> ObsPart:
    if not part.is_image:
        return part
    axis = 0 if channels_first(part.shape) else 2
    shape = tuple(n * frames if i == axis else n for i, n in enumerate(part.shape))
    return replace(part, shape=shape)


def _check_observe(observe: tuple[int, ...], shown: EnvSpec, env_id: str) -> None:
    if not isinstance(shown.obs, ObsPart) or len(shown.obs.shape) != 1:
        raise ConfigError(f"env.observe chooses entries of a vector, which {env_id} does not give")
    count = shown.obs.shape[0]
    for entry in observe:
        if not 0 <= entry < count:
            raise ConfigError(f"env.observe {entry}: {env_id} has entries 0 to {count - 1}")
