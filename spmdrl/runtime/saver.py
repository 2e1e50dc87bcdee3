"""What a run must save to resume exactly as if it had never stopped.

The learner's state and the actors' state are arrays. A simulator cannot save its state, so the
actions since its making are kept instead, and repeated on resume; the observation reached must
equal the saved one, bit for bit. A disk that fails for a while does not end the training.
"""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import load as load_bytes
from safetensors.numpy import save as save_bytes

from spmdrl.acting.source import Source
from spmdrl.config import Config
from spmdrl.learning.state import params_sha256
from spmdrl.parallel.mesh import on_device, replicate
from spmdrl.parallel.world import World
from spmdrl.runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    Snapshot,
    from_named,
    to_named,
    write_file,
)
from spmdrl.runtime.files import is_plain_file, make_folder
from spmdrl.runtime.logger import EpisodeStats, NullLogger
from spmdrl.types import TrainState

__all__ = ["SaveError", "Saver"]

Arrays = dict[str, np.ndarray]
MAX_FAILURES = 3  # in a row, after which training would be for nothing


class SaveError(RuntimeError):
    """Checkpoints cannot be written."""


@dataclass
class Job:
    """Everything one checkpoint needs, copied: training continues while it is written."""

    state: TrainState
    actors: Arrays
    episodes: Any
    return_mean: float | None
    evaluated: float | None


class Saver:
    """Checkpoints of one run: gathers on rank 0, writes there, and restores.

    The disk works in a thread of its own. The main thread touches `_segments` and `_unwritten`
    only after it has waited for that thread.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        mesh: Mesh,
        run_dir: Path,
        logger: NullLogger,
        everyone: World | None = None,
    ):
        """`world` are the ranks that learn, `everyone` also those that only act."""
        self._config, self._world, self._mesh, self._logger = config, world, mesh, logger
        self._everyone = everyone or world
        self._run_dir = run_dir
        self._checkpointer = Checkpointer(run_dir / "checkpoints", config.checkpoint.keep)
        self._segments: list[dict[str, Any]] = []  # of actions, since the environments were made
        self._unwritten: list[np.ndarray] = []  # actions that are in no segment yet
        self._failures = 0
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self.restored: dict[str, Any] = {}  # what the checkpoint said that the run resumed from

    @property
    def best_evaluation(self) -> float | None:
        """The highest mean return among the evaluated checkpoints."""
        return self._checkpointer.best_evaluation()

    # -- saving

    def save(
        self,
        state: TrainState,
        collector: Source,
        stats: EpisodeStats,
        must: bool = False,
        evaluated: float | None = None,
    ) -> None:
        """Every rank calls this; rank 0 writes, in the background unless it `must` be done.

        `evaluated` is the mean return of an evaluation of this state, if there was one.
        A failure is a warning, and the next call tries again; one too many raises SaveError.
        """
        actors = self._gather(collector.named_state())
        actions = self._gather({"actions": collector.take_actions()})
        if not self._world.is_root:
            return
        self._wait()
        if actions["actions"].shape[1]:
            self._unwritten.append(actions["actions"])
        mine = on_device(state, self._mesh.local_devices[0])
        host = jax.tree.map(np.array, mine)  # a copy: the next update overwrites its input
        mean = stats.row()["episode/return_mean"]
        job = Job(host, actors, stats.to_json(), mean, evaluated)
        self._writing = self._disk.submit(self._write, job)
        while must and not self._wait():
            time.sleep(1.0)
            self._writing = self._disk.submit(self._write, job)

    def _wait(self) -> bool:
        """Whether the write under way, if any, went well."""
        if self._writing is None:
            return True
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except OSError as error:
            self._failures += 1
            problem = f"no checkpoint could be written to {self._run_dir}: {error}"
            if self._failures >= MAX_FAILURES:
                raise SaveError(
                    f"{problem}; {MAX_FAILURES} failures in a row. Earlier checkpoints are intact: "
                    "make room or repair the disk, then run the same command again to resume"
                ) from error
            self._logger.warning(
                f"{problem}. Training continues (failure {self._failures} of {MAX_FAILURES} in a "
                "row that end it). Earlier checkpoints are intact"
            )
            return False
        self._failures = 0
        return True

    def _write(self, job: Job) -> None:
        host, step = job.state, int(job.state.step)
        if self._config.checkpoint.envs == "replay" and self._unwritten:
            self._add_segment(step, np.concatenate(self._unwritten, axis=1))
        meta = {
            "step": step,
            "return_mean": job.return_mean,
            "eval_return_mean": job.evaluated,
            "episodes": job.episodes,
            "segments": self._segments,
            "params_sha256": params_sha256(host.params),
        }
        arrays = {
            "params": to_named({"params": host.params, "obs_moments": host.obs_moments}),
            "learner": to_named(_without_model(host)),
            "actors": job.actors,
        }
        self._logger.flush()  # a checkpoint assumes that the rows before it are on the disk
        self._checkpointer.save(Snapshot(step, arrays, meta))
        self._drop_old_segments()

    def forget_actions(self) -> None:
        """New environments were made: the old ones' actions are no longer needed."""
        self._wait()
        self._segments, self._unwritten = [], []

    def _gather(self, named: Arrays) -> Arrays:
        """Environments of all ranks along the first axis, in order of id; empty elsewhere."""
        joined = {name: self._world.gather_rows(named[name]) for name in sorted(named)}
        return {name: array for name, array in joined.items() if array is not None}

    def _add_segment(self, step: int, actions: np.ndarray) -> None:
        folder = self._run_dir / "replay"
        make_folder(folder)
        data = save_bytes({"actions": np.ascontiguousarray(actions)})
        file = folder / f"actions-{step:08d}.safetensors"
        entry = {"file": file.name, "sha256": write_file(file, data)}
        self._segments, self._unwritten = [*self._segments, entry], []

    def _drop_old_segments(self) -> None:
        """Delete what no checkpoint on disk refers to any more."""
        used = set()
        for step in self._checkpointer.steps():
            try:
                used |= {entry["file"] for entry in self._checkpointer.meta(step)["segments"]}
            except (KeyError, TypeError):
                return  # damaged since it was written; whatever it refers to is kept
        for file in (self._run_dir / "replay").glob("actions-*.safetensors"):
            if file.name not in used:
                file.unlink()

    # -- restoring

    def restore(self, state: TrainState, collector: Source, stats: EpisodeStats) -> TrainState:
        """The state to resume from; the given one where nothing was saved yet."""
        snapshot = None
        if self._world.is_root:
            snapshot = self._checkpointer.restore(self._logger.warning, self._check_segments)
        meta = self._everyone.broadcast_json(snapshot.meta if snapshot else None)
        self._logger.rewind(0 if meta is None else meta["step"])
        if meta is None:
            return state
        self.restored = meta
        state = self._restore_learner(state, snapshot, meta["step"])
        stats.from_json(meta["episodes"])
        self._restore_actors(collector, snapshot, meta)
        self._logger.info(
            f"resumed at update {meta['step']} of {self._config.num_updates}, "
            f"parameters {meta['params_sha256'][:12]}"
        )
        return state

    def restore_actor(self, collector: Source) -> int:
        """The part of a rank that only acts, while the others `restore`; the update to begin at."""
        meta = self._everyone.broadcast_json(None)
        if meta is None:
            return 0
        self._restore_actors(collector, None, meta)
        return int(meta["step"])

    def _restore_learner(
        self, state: TrainState, snapshot: Snapshot | None, step: int
    ) -> TrainState:
        template = jax.device_get(on_device(state, self._mesh.local_devices[0]))
        model = {"params": template.params, "obs_moments": template.obs_moments}
        rest = _without_model(template)
        if snapshot is not None:
            model = from_named(model, snapshot.arrays["params"])
            rest = from_named(rest, snapshot.arrays["learner"])
        model, rest = jax.tree.map(self._world.broadcast, (model, rest))
        rest["behind"] = _listed(rest["behind"], len(template.behind))
        restored = TrainState(step=np.int32(step), **model, **rest)
        return replicate(restored, self._mesh)

    def _restore_actors(
        self, collector: Source, snapshot: Snapshot | None, meta: dict[str, Any]
    ) -> None:
        if self._config.checkpoint.envs == "fresh":
            collector.renew(generation=-meta["step"])  # new episodes, other than the first ones
            return
        if collector.saves_envs:
            collector.place(self._scatter_actors(collector, snapshot))
            return
        step, every = meta["step"], self._config.checkpoint.renew_every
        actions, self._segments = None, meta["segments"]
        if snapshot is not None:
            actions = np.concatenate([self._read_segment(e) for e in self._segments], axis=1)
        collector.renew(generation=step // every)
        if step % every == 0:
            return  # the environments are made anew here anyway
        named = self._scatter_actors(collector, snapshot)
        collector.replay(self._scatter(collector, actions), named)

    def _scatter_actors(self, collector: Source, snapshot: Snapshot | None) -> Arrays:
        """The saved state of this rank's actors."""
        names = sorted(collector.named_state())
        saved = {} if snapshot is None else snapshot.arrays["actors"]
        missing = [] if snapshot is None else [name for name in names if name not in saved]
        if missing:
            raise CheckpointError(
                f"the saved environments have no {missing[0]}; has their code changed since? "
                "--checkpoint.envs fresh resumes with new episodes"
            )
        return {name: self._scatter(collector, saved.get(name)) for name in names}

    def _check_segments(self, snapshot: Snapshot) -> None:
        if self._config.checkpoint.envs == "replay":
            try:
                for entry in snapshot.meta["segments"]:
                    self._read_segment(entry)
            except (KeyError, TypeError) as error:
                raise CheckpointError(f"its meta.json is none of ours: {error!r}") from error

    def _read_segment(self, entry: dict[str, str]) -> np.ndarray:
        file = self._run_dir / "replay" / Path(entry["file"]).name
        data = file.read_bytes() if is_plain_file(file) else b""
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise CheckpointError(
                f"{file} is damaged or missing, so the environments cannot be replayed "
                "(--checkpoint.envs fresh resumes with new episodes)"
            )
        return load_bytes(data)["actions"]

    def _scatter(self, collector: Source, array: np.ndarray | None) -> np.ndarray:
        """This rank's environments of an array that rank 0 has."""
        found = None if array is None else {"shape": array.shape, "dtype": array.dtype.str}
        form = self._everyone.broadcast_json(found)
        if array is None:
            array = np.empty(form["shape"], form["dtype"])
        mine = collector.ids
        return self._everyone.broadcast(array)[mine.start : mine.stop]


def _without_model(state: TrainState) -> dict[str, Any]:
    """What only learning needs. Without lag `behind` is empty and leaves no trace."""
    return {
        "opt_state": state.opt_state,
        "reward_moments": state.reward_moments,
        # One model alone has no number in its names, as when there could be no other.
        "behind": state.behind[0] if len(state.behind) == 1 else state.behind,
    }


def _listed(behind: Any, count: int) -> tuple[Any, ...]:
    """`behind` as the state has it."""
    return (behind,) if count == 1 else behind
