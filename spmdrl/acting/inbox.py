"""The learner's end of the line: models go out, the rollouts of its actors come in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from spmdrl.acting.action_log import ActionLog
from spmdrl.acting.messages import (
    StateForm,
    blank_state,
    model_form,
    named_model,
    rollout_form,
    trace_rollout,
)
from spmdrl.acting.source import Episodes, Source, episodes_of
from spmdrl.acting.stepped import Stopwatch
from spmdrl.acting.traffic import Traffic
from spmdrl.config import Config
from spmdrl.nets.policy import Policy
from spmdrl.parallel.courier import Courier
from spmdrl.parallel.guards import finite_inputs
from spmdrl.parallel.mesh import on_device
from spmdrl.parallel.placement import env_axis, rollout_specs
from spmdrl.parallel.roles import Layout
from spmdrl.parallel.topology import LaunchError
from spmdrl.parallel.wire import BYE, END, STOP, ModelHeader, RolloutHeader, WireError
from spmdrl.parallel.world import World, name_ranks
from spmdrl.trees import leaves_by_name
from spmdrl.types import Array, EnvSpec, Obs, Rollout, TrainState

__all__ = ["Inbox", "Introduction"]

ROOMS = 2  # of models: one on its way, one being filled


@dataclass(frozen=True)
class Introduction:
    """What the actors have told about their environments, which a learner never makes."""

    spec: EnvSpec
    first_obs: Obs
    state: StateForm
    saves_envs: bool
    description: str
    hosts: Sequence[str]  # of every rank
    forms: Sequence[tuple[int, int]]  # fingerprints of every rank's messages; 0 of a learner's


class Inbox(Source):
    """The environments of this learner's actors.

    Rollout n is taken when all of them have sent it. The rooms of one rollout are filled again
    only after everything in them was copied.
    """

    phase: ClassVar[str] = "wait"

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        policy: Policy,
        world: World,
        layout: Layout,
        told: Introduction,
        run: int,
    ):
        self._config, self._mesh, self._world, self._run = config, mesh, world, run
        self._told, self._policy = told, policy
        self.spec, self.ids = told.spec, layout.ids(world.rank)
        self._actors = layout.actors_of(world.rank)
        self._parts = [layout.ids(rank) for rank in self._actors]
        self.watch, self._traffic = Stopwatch(), Traffic(len(self._actors), config.lag)
        self._named: dict[str, np.ndarray] = {}
        self._next = 0  # rollout to be taken
        self._here: list[set[int]] = [set() for _ in self._actors]
        self._gone: set[int] = set()  # actors that have said goodbye
        self._sending = [0] * ROOMS
        self._said_end, self._waiting = False, False
        self._courier: Courier | None = None
        self.renew(generation=0)

    @property
    def description(self) -> str:
        hosts = {self._told.hosts[rank] for rank in self._actors}
        mine = f"of {len(self._actors)} actor(s) on {len(hosts)} host(s)"
        rollouts = sum(form.nbytes for form in self._forms)
        sizes = f"{rollouts:,} bytes each, models {self._models.nbytes:,}"
        return f"{mine}, {self._told.description}; {sizes}"

    @property
    def saves_envs(self) -> bool:
        return self._told.saves_envs

    @property
    def first_obs(self) -> Obs:
        return self._told.first_obs

    # -- start

    def begin(self, state: TrainState, step: int, over: bool) -> None:
        """Post the receives, then send the models of the rollouts that come next."""
        self._make_rooms(state)
        self._courier = Courier(self._world.program_comm)
        self._next, lag = step, self._config.lag
        for number in range(step, step + lag + 1):
            for k in range(len(self._actors)):
                self._expect(k, number)
        self._world.meet()  # no message shall come before its receive is posted
        models = [*state.behind, (state.params, state.obs_moments)]
        self._said_end = over
        for version, model in enumerate(models, start=step - lag):
            if version >= 0:
                self._send(version, model, flags=END if over and version == step else 0)

    def _make_rooms(self, state: TrainState) -> None:
        """Everything that messages will ever need, in the forms that the actors have too."""
        model = (state.params, state.obs_moments)
        blank = blank_state(self._policy, self.spec, len(self.ids))
        self._rollout, ended = trace_rollout(self._config, self._policy, model, blank)
        self._models = model_form(*model)
        self._forms = [
            rollout_form(self._rollout, ended, self._told.state, len(part)) for part in self._parts
        ]
        for rank, form in zip(self._actors, self._forms, strict=True):
            mine = (self._models.fingerprint, form.fingerprint)
            if mine != tuple(self._told.forms[rank]):
                raise LaunchError(
                    f"rank {rank}, an actor on {self._told.hosts[rank]}, has other networks or "
                    "observations than its learner; do both have the same code?"
                )
        rooms = self._config.lag + 1
        self._rooms_in = [[form.room() for _ in range(rooms)] for form in self._forms]
        self._rooms_out = [self._models.room() for _ in range(ROOMS)]

    # -- messages

    def _expect(self, k: int, number: int) -> None:
        rooms = self._rooms_in[k]
        room = rooms[number % len(rooms)]

        def arrived(nbytes: int) -> None:
            header = RolloutHeader.read(room)
            if header.flags & BYE and self._said_end:
                self._gone.add(k)
                return
            self._check(k, number, header, nbytes)
            self.stop_asked = self.stop_asked or bool(header.flags & STOP)
            self._here[k].add(number)

        assert self._courier is not None
        self._courier.receive(room, self._actors[k], arrived)

    def _check(self, k: int, number: int, header: RolloutHeader, nbytes: int) -> None:
        ids, version = self._parts[k], max(0, number - self._config.lag)
        found = (header.run, header.number, header.version, header.first, header.count, nbytes)
        due = (self._run, number, version, ids.start, len(ids), self._forms[k].nbytes)
        names = ("run", "rollout", "model", "first environment", "environments", "bytes")
        wrong = [
            f"{name} {a} instead of {b}"
            for name, a, b in zip(names, found, due, strict=True)
            if a != b
        ]
        if wrong:
            raise WireError(f"{self._name(k)} has sent {', '.join(wrong)}")

    def _name(self, k: int) -> str:
        rank = self._actors[k]
        return f"rank {rank}, an actor on {self._told.hosts[rank]},"

    def _send(self, version: int, model: Any, flags: int) -> None:
        """To all actors, from one room."""
        assert self._courier is not None
        slot = version % ROOMS
        self._courier.wait(lambda: self._sending[slot] == 0)
        room, mine = self._rooms_out[slot], on_device(model, self._mesh.local_devices[0])
        named = {name: np.asarray(x) for name, x in named_model(*mine).items()}
        self._models.write(room, named)
        room[: ModelHeader.SIZE] = ModelHeader(self._run, version, flags).pack()
        self._sending[slot] = len(self._actors)
        for rank in self._actors:
            self._courier.send(room, rank, lambda nbytes: self._sent(slot))

    def _sent(self, slot: int) -> None:
        self._sending[slot] -= 1

    # -- one update

    def collect(self, state: TrainState, key: Array) -> tuple[Rollout, Episodes]:
        """Wait for the rollout of every actor; the next ones may fill its rooms afterwards."""
        number, started = self._next, time.perf_counter()
        self._traffic.ready.append(min(len(here) for here in self._here))
        self._wait(lambda: all(number in here for here in self._here))
        self._traffic.waited(time.perf_counter() - started)
        rooms = [rooms[number % len(rooms)] for rooms in self._rooms_in]
        headers = [RolloutHeader.read(room) for room in rooms]
        for header in headers:
            self.watch.add({"env": header.env_s, "inference": header.inference_s})
        self._traffic.note(headers, [form.nbytes for form in self._forms])
        parts = [form.views(room) for form, room in zip(self._forms, rooms, strict=True)]
        self._last = _side_by_side(parts, "rollout/")
        ended = _side_by_side(parts, "ended/")
        self._named = _side_by_side(parts, "state/")
        self._log.add(self.spec.action, [part["rollout/action"] for part in parts])
        self._next = number + 1
        for k, here in enumerate(self._here):
            here.discard(number)
            self._expect(k, number + self._config.lag + 1)
        return self._placed(self._as_rollout(self._last)), episodes_of(self.ids, ended)

    def _wait(self, ready: Callable[[], bool]) -> None:
        assert self._courier is not None
        self._waiting = True
        self._courier.wait(ready)
        self._waiting = False

    def _as_rollout(self, named: Mapping[str, np.ndarray]) -> Rollout:
        structure, names = jax.tree.structure(self._rollout), leaves_by_name(self._rollout)
        rollout: Rollout = jax.tree.unflatten(structure, [named[name] for name in names])
        return rollout

    def _placed(self, rollout: Rollout) -> Rollout:
        """On this learner's devices, each with its environments."""
        if self._mesh.size == 1:
            return jax.device_put(rollout, self._mesh.local_devices[0])

        def place(spec: Any, part: Any) -> Any:
            return jax.device_put(part, NamedSharding(self._mesh, spec))

        is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
        placed: Rollout = jax.tree.map(place, rollout_specs(), rollout, is_leaf=is_spec)
        return placed

    def publish(self, state: TrainState, stopping: bool, last: bool) -> None:
        """The new model, and whether it is the last."""
        ends = stopping or last
        self._said_end = ends
        flags = (END if ends else 0) | (STOP if stopping and not last else 0)
        self._send(self._next, (state.params, state.obs_moments), flags)

    # -- what a checkpoint keeps

    def renew(self, generation: int) -> None:
        """The actors do it by themselves, before the same rollout."""
        replays = self._config.checkpoint.envs == "replay" and not self.saves_envs
        self._log = ActionLog(len(self.ids), wanted=replays)

    def named_state(self) -> dict[str, np.ndarray]:
        """After the last rollout that was taken, whatever the actors have done since."""
        if self._named:
            return self._named
        return {
            name: np.zeros((len(self.ids), *shape), dtype)
            for name, (shape, dtype) in self._told.state.items()
        }

    def take_actions(self) -> np.ndarray:
        return self._log.take(keep_last=False)

    def replay(self, actions: np.ndarray, named: dict[str, np.ndarray]) -> None:
        """The actors do it."""

    def place(self, named: dict[str, np.ndarray]) -> None:
        """The actors do it."""

    # -- for the log

    def waits_for(self) -> str:
        late = [
            rank
            for k, rank in enumerate(self._actors)
            if k not in self._gone and self._next not in self._here[k]
        ]
        if not late or not self._waiting:
            return ""
        hosts = ", ".join(sorted({self._told.hosts[rank] for rank in late}))
        what = "the goodbye" if self._said_end else f"rollout {self._next}"
        plural = "actors" if len(late) > 1 else "an actor"
        return f"{what} of {name_ranks(late)}, {plural} on {hosts}"

    def blame(self) -> str:
        guilty = []
        for rank, part in zip(self._actors, self._parts, strict=True):
            cut = slice(part.start - self.ids.start, part.stop - self.ids.start)
            mine = {
                name: x[cut] if env_axis(name.partition("/")[0]) == 0 else x[:, cut]
                for name, x in self._last.items()
            }
            observed, rewarded, _ = finite_inputs(self._as_rollout(mine), np)
            if not (observed and rewarded):
                guilty.append(f"rank {rank}, an actor on {self._told.hosts[rank]}")
        return " and ".join(guilty)

    def row(self, seconds: float) -> dict[str, float]:
        row = self._traffic.row(seconds, self._actors)
        return row | {"roles/params_bytes": float(self._models.nbytes)}

    def advice(self) -> str:
        return self._traffic.advice()

    def close(self) -> None:
        """Wait until every actor has said goodbye: then nothing is under way."""
        if self._courier is not None:
            self._wait(lambda: len(self._gone) == len(self._actors))
            self._wait(lambda: not any(self._sending))
            self._courier.close()
            self._courier = None


def _side_by_side(parts: Sequence[Mapping[str, np.ndarray]], prefix: str) -> dict[str, np.ndarray]:
    """The arrays of all actors with that prefix, as new ones: their rooms are filled again."""
    found = {}
    for name in parts[0]:
        if name.startswith(prefix):
            bare = name.removeprefix(prefix)
            axis = {"state/": 0, "ended/": 1}.get(prefix, env_axis(bare.partition("/")[0]))
            found[bare] = np.concatenate([part[name] for part in parts], axis=axis)
    return found
