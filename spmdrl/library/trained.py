"""A trained policy as a function: `policy = spmdrl.load(run_dir)`, then `policy(obs)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmdrl.acting.player import make_chooser
from spmdrl.config import Config, own_code
from spmdrl.envs.actions import to_env_action
from spmdrl.nets import Policy
from spmdrl.runtime.consent import Consent, bring_code
from spmdrl.runtime.models import find_checkpoint, load_model
from spmdrl.runtime.provenance import read_code
from spmdrl.runtime.rundir import read_run
from spmdrl.runtime.spaces import read_spaces
from spmdrl.types import EnvSpec

__all__ = ["TrainedPolicy", "load"]


class CallConsent(Consent):
    """What to write where consent is missing."""

    @property
    def with_trust(self) -> str:
        return f"{self.command}, trust=True)"

    @property
    def with_config(self) -> str:
        return f'{self.command}, config="FILE.py")'


def load(
    run_dir: str | Path,
    checkpoint: str | int = "latest",
    trust: bool = False,
    config: str | Path | None = None,
) -> TrainedPolicy:
    """The policy of a run as of a checkpoint: "latest", "best" or an update's number.

    Needs neither MPI nor the environments. Runs without a spaces.json have to make one of them;
    where that or the network is the user's own, `trust` and `config` are as those of `spmdrl
    evaluate`.
    """
    saved, place = read_run(run_dir), find_checkpoint(Path(run_dir), str(checkpoint))
    spec = read_spaces(Path(run_dir))
    if spec is None or own_code.own_network(saved.net.torso):
        command = f"spmdrl.load({str(run_dir)!r}"
        consent = CallConsent(None if config is None else str(config), trust, command)
        bring_code(saved, read_code(run_dir), run_dir, consent)
    return TrainedPolicy(saved, spec or _spec_of_environment(saved), place)


def _spec_of_environment(config: Config) -> EnvSpec:
    from spmdrl.envs import make_env

    env = make_env(config, range(1))
    env.close()
    return env.spec


class TrainedPolicy:
    """Observations in, actions out.

    Takes one observation or a batch, an array or a dict of arrays, and answers with actions as the
    environment takes them. Noise and memory go from call to call until `reset`.
    """

    def __init__(self, config: Config, spec: EnvSpec, checkpoint: Path):
        self.config, self.spec, self.checkpoint = config, spec, checkpoint
        self._policy, self._variables = load_model(config, spec, checkpoint)
        self._choosers: dict[bool, Callable[..., Any]] = {}
        self.reset(config.eval.seed)

    @property
    def params(self) -> Any:
        """The network's parameters, as Flax has them."""
        return self._variables["params"]

    @property
    def network(self) -> Policy:
        """For programs of your own: `network.apply`, `network.dist`; see `spmdrl.nets.policy`."""
        return self._policy

    @property
    def variables(self) -> Any:
        """Parameters and observation moments: the first argument of `network.apply`."""
        return self._variables

    def export(self, folder: str | Path, platforms: tuple[str, ...] = ("cpu",)) -> Path:
        """Write it as one program for serving, which needs jax and nothing of this package."""
        from spmdrl.library.export import export

        return export(self, folder, platforms)

    def reset(self, seed: int | None = None) -> None:
        """The next call begins new episodes, and the noise of this seed, if one is given."""
        if seed is not None:
            self._seed, self._choosers = seed, {}
        self._time, self._carry, self._rows = 0, None, 0

    def __call__(self, obs: Any, deterministic: bool | None = None, first: Any = None) -> Any:
        """The actions for these observations.

        `deterministic` takes the most likely ones, else they are sampled; by default as the run's
        `eval.deterministic` says. `first` marks observations that begin an episode, which only a
        policy with memory needs.
        """
        batch, is_single = self._batch(obs)
        rows = len(jax.tree.leaves(batch)[0])
        begins = self._begins(rows, first)
        mode = self.config.eval.deterministic if deterministic is None else deterministic
        ids, now = np.arange(rows, dtype=np.int32), np.int32(self._time)
        self._carry, action = self._chooser(mode)(self._carry, batch, begins, ids, now)
        self._time += 1
        answer = to_env_action(self.spec.action, np.asarray(action), np)
        return answer[0] if is_single else answer

    def _begins(self, rows: int, first: Any) -> np.ndarray:
        """Which rows begin an episode: all of them after a reset, else those that are said to."""
        if self._carry is None or rows != self._rows:
            self._carry, self._rows = self._policy.initial_carry(rows), rows
            return np.ones(rows, bool)
        return np.zeros(rows, bool) if first is None else np.broadcast_to(first, (rows,))

    def _chooser(self, deterministic: bool) -> Callable[..., Any]:
        if deterministic not in self._choosers:
            made = make_chooser(self._policy, self._variables, deterministic, self._seed)
            self._choosers[deterministic] = made
        return self._choosers[deterministic]

    def _batch(self, obs: Any) -> tuple[Any, bool]:
        """The observations as rows, and whether there was only one."""
        parts = self.spec.parts
        given = {"": obs} if "" in parts else dict(obs)
        if set(given) != set(parts):
            raise ValueError(f"observations have {sorted(given)}, the policy takes {sorted(parts)}")
        arrays = {name: np.asarray(given[name], part.dtype) for name, part in parts.items()}
        is_single = all(arrays[name].shape == part.shape for name, part in parts.items())
        if is_single:
            arrays = {name: array[None] for name, array in arrays.items()}
        for name, part in parts.items():
            if arrays[name].shape[1:] != part.shape or arrays[name].ndim != len(part.shape) + 1:
                where = f" of {name!r}" if name else ""
                raise ValueError(
                    f"observations{where} have shape {np.shape(given[name])}; the policy takes "
                    f"{part.shape}, or a batch of those"
                )
        return (arrays[""] if "" in parts else arrays), is_single
