"""Playing the newest checkpoint again and again while a run trains.

The workers go in rounds: all play the same checkpoint, then rank 0 publishes the newest episodes
and looks for a newer one. Each number of an episode is used once, so each has a seed of its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.acting.player import make_choice
from spmdrl.config import ConfigError
from spmdrl.episodes.format import Episode
from spmdrl.episodes.playing import Player, RecordingPlan, play_group, spaces
from spmdrl.parallel.topology import Topology, threads_per_rank
from spmdrl.parallel.world import World
from spmdrl.runtime.checkpoint import Checkpointer
from spmdrl.runtime.files import read_json
from spmdrl.runtime.models import describe_checkpoint, load_model
from spmdrl.runtime.signals import StopRequest

if TYPE_CHECKING:
    from spmdrl.types import EnvSpec

__all__ = ["Follower", "is_training", "wait_for_checkpoint"]

POLL_S = 1.0


def is_training(run_dir: Path) -> bool:
    """As the run itself says; one that was killed cannot."""
    return read_json(run_dir / "status.json").get("state") == "running"


def wait_for_checkpoint(run_dir: Path) -> None:
    """Until there is one, or the run has ended without."""
    keeper = Checkpointer(run_dir / "checkpoints", keep=1)
    said = False
    while not keeper.steps() and is_training(run_dir):
        if not said:
            print(f"waiting for the first checkpoint in {run_dir}", flush=True)
            said = True
        time.sleep(POLL_S)


@dataclass
class Loaded:
    update: int
    path: Path
    player: Player


class Follower:
    """One worker. All make the same calls, and decide by what rank 0 has found."""

    def __init__(
        self,
        plan: RecordingPlan,
        run_dir: Path,
        keep: int,
        world: World,
        topology: Topology,
        stop: StopRequest,
    ):
        """`plan.episodes` is how many are played, 0 for as many as the run lasts."""
        self._plan, self._run_dir, self._keep = plan, run_dir, keep
        self._world, self._stop = world, stop
        self._threads = threads_per_rank(topology)
        self._keeper = Checkpointer(run_dir / "checkpoints", keep=1)
        self._unusable: set[int] = set()
        self._loaded: Loaded | None = None
        self._choice: Callable[..., Any] | None = None
        self._kept: list[Episode] = []
        self._about: dict[str, Any] = {}
        self.played = 0

    def run(self) -> None:
        """Until the run has ended and its last checkpoint was played, or a request to stop."""
        self._about = self._plan.about | {"workers": self._world.size}
        if self._world.is_root:
            self._about["spaces"] = spaces(self._plan.config)
        over = False
        while not over:
            goes_on = is_training(self._run_dir)  # asked first: what it saved before is played
            self._round()
            enough = 0 < self._plan.episodes <= self.played
            is_last = not goes_on and self._newest() is None
            over = self._agree(self._stop.signal is not None or enough or is_last)
        self._publish(growing=False)

    def _agree(self, wish: bool) -> bool:
        """Whether anybody was asked to stop, or rank 0 has seen the end."""
        wishes = self._world.gather_json([self._stop.signal is not None, wish])
        return wishes[0][1] or any(asked for asked, _ in wishes)

    # -- one round

    def _round(self) -> None:
        from spmdrl.envs import make_env

        config = replace(self._plan.config, seed=self._plan.config.eval.seed)
        group = self._group()
        env = make_env(config, group, self._threads)
        try:
            loaded = self._load(env.spec)
            mine = play_group(
                self._plan, env, loaded.player, group, self._world.rank, loaded.update
            )
        finally:
            env.close()
        everyone = self._world.gather_json([episode.to_json() for episode in mine])
        new = [Episode.from_json(row) for rows in everyone for row in rows]
        self.played += len(new)
        self._kept = sorted(self._kept + new, key=lambda e: e.id)[-self._keep :]
        self._publish(growing=True)
        if self._world.is_root:
            mean = sum(e.episode_return for e in new) / len(new)
            print(f"{self.played} episodes, update {loaded.update}: return {mean:.1f}", flush=True)

    def _group(self) -> range:
        """This worker's numbers: the next ones, side by side with the others'."""
        size = self._plan.config.eval.num_envs
        start = self.played + size * self._world.rank
        return range(start, start + size)

    def _publish(self, growing: bool) -> None:
        if self._world.is_root and self._loaded is not None:
            self._plan.feed.publish(self._about | {"growing": growing}, self._kept)

    # -- checkpoints

    def _newest(self) -> int | None:
        """Rank 0's view: the newest that has not been loaded yet and is not known to be damaged."""
        now = self._loaded.update if self._loaded else -1
        new = [step for step in self._keeper.steps() if step > now and step not in self._unusable]
        return new[-1] if new else None

    def _load(self, spec: EnvSpec) -> Loaded:
        """The newest checkpoint that every worker could read and verify."""
        world = self._world
        while True:
            mine = [self._newest(), is_training(self._run_dir)] if world.is_root else None
            step, may_come = world.broadcast_json(mine)
            if step is None and self._loaded is not None:
                return self._loaded
            if step is None and may_come:
                time.sleep(POLL_S)
                continue
            if step is None:
                raise ConfigError(f"{self._run_dir} has no intact checkpoint to play")
            found, reason = self._try(step, spec)
            failed = [why for why in world.gather_json(reason) if why]
            if found is not None and not failed:
                self._loaded = found
                return found
            self._unusable.add(step)  # or gone: the run keeps only the newest
            if world.is_root and self._keeper.path(step).exists():
                print(f"update {step} is left out: {failed[0]}", flush=True)

    def _try(self, step: int, spec: EnvSpec) -> tuple[Loaded | None, str]:
        path, played = self._keeper.path(step), self._plan.config.eval
        try:
            policy, variables = load_model(self._plan.config, spec, path)
            about = describe_checkpoint(path)
        except (ConfigError, OSError) as error:
            return None, str(error)
        if self._choice is None:
            self._choice = make_choice(policy, played.deterministic, played.seed)
        self._about["checkpoint"] = about
        return Loaded(step, path, Player(policy, functools.partial(self._choice, variables))), ""
