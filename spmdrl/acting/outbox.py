"""The actor's end of the line: models come in, rollouts go out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from spmdrl.parallel.courier import Courier
from spmdrl.parallel.wire import (
    BLOCK,
    BYE,
    END,
    STOP,
    Form,
    ModelHeader,
    RolloutHeader,
    WireError,
)

__all__ = ["Outbox"]

ROOMS = 2  # of rollouts: one on its way, one being filled


class Outbox:
    """Rollout n wants the model of version max(0, n - lag), and nothing else.

    As many models can be here as the learner can be ahead, lag + 1: a receive is always posted
    before its message is sent.
    """

    def __init__(
        self,
        courier: Courier,
        learner: int,
        run: int,
        ids: range,
        lag: int,
        models: Form,
        rollouts: Form,
    ):
        self._courier, self._learner, self._run = courier, learner, run
        self._ids, self._lag = ids, lag
        self._models, self._rollouts = models, rollouts
        self._rooms_in = [models.room() for _ in range(lag + 1)]
        self._rooms_out = [rollouts.room() for _ in range(ROOMS)]
        self._here: set[int] = set()  # versions that have arrived and are still needed
        self._sending: set[int] = set()  # numbers of the rollouts under way
        self._flags = 0  # of the last model
        self._send_s = 0.0

    def begin(self, step: int) -> None:
        """Post the receives of the models from which rollout `step` and later ones are made."""
        first = self.version(step)
        for version in range(first, first + self._lag + 1):
            self._expect(version)

    def version(self, number: int) -> int:
        return max(0, number - self._lag)

    def _expect(self, version: int) -> None:
        room = self._rooms_in[version % len(self._rooms_in)]

        def arrived(nbytes: int) -> None:
            header = ModelHeader.read(room)
            if (header.run, header.version, nbytes) != (self._run, version, self._models.nbytes):
                raise WireError(
                    f"rank {self._learner}, the learner, has sent model {header.version} of run "
                    f"{header.run:08x} in {nbytes} bytes; model {version} of run {self._run:08x} "
                    f"in {self._models.nbytes} bytes was due"
                )
            self._here.add(version)
            self._flags |= header.flags

        self._courier.receive(room, self._learner, arrived)

    @property
    def ended(self) -> bool:
        """Whether the learner wants no more rollouts."""
        return bool(self._flags & END)

    @property
    def stopped(self) -> bool:
        """Whether that is before the end of the run."""
        return bool(self._flags & STOP)

    def model(self, number: int) -> dict[str, np.ndarray] | None:
        """Wait for the model that collects this rollout, a copy; None: no more are wanted."""
        version = self.version(number)
        self._courier.wait(lambda: self.ended or version in self._here)
        if self.ended:
            return None
        views = self._models.views(self._rooms_in[version % len(self._rooms_in)])
        return {name: view.copy() for name, view in views.items()}  # jax may use it in place

    def release(self, number: int) -> None:
        """This rollout is collected: make room for a later model."""
        if number >= self._lag and not self.ended:
            self._here.discard(number - self._lag)
            self._expect(number + 1)

    def send(
        self,
        number: int,
        rollout: Mapping[str, Any],
        ended: Mapping[str, np.ndarray],
        state: Mapping[str, np.ndarray],
        stop: bool,
        seconds: Mapping[str, float],
    ) -> None:
        """Hand a rollout to the courier; waits only for the one before the last to be gone."""
        started = time.perf_counter()
        self._courier.wait(lambda: number - ROOMS not in self._sending)
        room = self._rooms_out[number % ROOMS]
        named = {f"rollout/{name}": np.asarray(x) for name, x in rollout.items()}
        named |= {f"ended/{name}": np.asarray(x) for name, x in ended.items()}
        named |= {f"state/{name}": np.asarray(x) for name, x in state.items()}
        self._rollouts.write(room, named)
        header = RolloutHeader(
            run=self._run,
            number=number,
            version=self.version(number),
            first=self._ids.start,
            count=len(self._ids),
            flags=STOP if stop else 0,
            env_s=seconds.get("env", 0.0),
            inference_s=seconds.get("inference", 0.0),
            collect_s=seconds.get("collect", 0.0),
            idle_s=seconds.get("wait", 0.0),
            send_s=self._send_s,
        )
        room[: header.SIZE] = header.pack()
        self._dispatch(room, number)
        self._send_s = time.perf_counter() - started

    def _dispatch(self, room: np.ndarray, number: int) -> None:
        self._sending.add(number)
        self._courier.send(room, self._learner, lambda nbytes: self._sending.discard(number))

    def farewell(self, number: int) -> None:
        """Wait for the learner's last word, say goodbye, and leave nothing under way."""
        self._courier.wait(lambda: self.ended)
        first, count = self._ids.start, len(self._ids)
        bye = RolloutHeader(self._run, number, self.version(number), first, count, BYE)
        self._courier.wait(lambda: not self._sending)
        room = self._rooms_out[0][: 2 * BLOCK]
        room[:] = bye.pack()
        self._dispatch(room, number)
        self._courier.wait(lambda: not self._sending)
        self._courier.close()


def placed(named: Mapping[str, np.ndarray], template: Any, device: jax.Device) -> Any:
    """The arrays of a message in the template's structure, on the device."""
    structure = jax.tree.structure(template)
    return jax.device_put(jax.tree.unflatten(structure, list(named.values())), device)
