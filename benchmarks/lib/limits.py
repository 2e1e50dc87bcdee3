"""What bounds the speed of training, each limit measured alone: the workers of throughput.py.

One worker has both cores, or two workers have one core each and half of the environments. They wait
on their standard input, so all limits of a case can be measured in turns within the same minutes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

import numpy as np

from benchmarks.lib.common import ROOT
from benchmarks.lib.ranks import Topology, prepare_process
from spmdrl.config import Config, load

__all__ = ["CHUNKS", "Bounds", "Crew", "harmonic", "products"]

PATIENCE_S = 20  # with a worker that should end
SCAN = 128  # steps of raw envpool in one compiled call
CHUNKS = (32, 256)  # images in one matrix product; a roof takes the faster
# Rows of an image, inputs and outputs of each layer of the Nature CNN as a matrix product:
# 20 x 20 patches of 8 x 8 x 4, 9 x 9 of 4 x 4 x 32, 7 x 7 of 3 x 3 x 64, then 3136 to 512.
LAYERS = ((400, 256, 32), (81, 512, 64), (49, 576, 64), (1, 3136, 512))

Call = Callable[[], Any]


def harmonic(*rates: float) -> float:
    """The rate of doing one thing after the other."""
    return 1 / sum(1 / rate for rate in rates)


def products(images: int, outputs: int) -> list[tuple[int, int, int]]:
    """`(m, k, n)` of all matrix products in a pass forward and backward; `outputs` of the heads."""
    found = []
    for place, (rows, k, n) in enumerate([*LAYERS, (1, LAYERS[-1][2], outputs)]):
        m = images * rows
        found += [(m, k, n), (k, m, n)]  # forward, and the gradient of the weights
        if place > 0:
            found.append((m, n, k))  # the gradient of the layer's input; images need none
    return found


@dataclass(frozen=True)
class Bounds:
    """Whose limits a worker measures: the config of a case, and its share of it."""

    config: str
    envs: int  # of the whole case
    steps: int
    workers: int
    place: int = 0

    def read(self) -> Config:
        share = str(self.envs // self.workers)
        path = str(ROOT / "configs" / f"{self.config}.py")
        return load([path, "--env.num-envs", share, "--algo.num-steps", str(self.steps)])

    @property
    def topology(self) -> Topology:
        """As in a training run, so that the same settings are made for XLA."""
        return Topology(self.place, self.workers, self.place, self.workers)


# ---------------------------------------------------------------------------------------------
# Inside of a worker


class Worker:
    """Builds what it is asked for and says how many environment steps a second it makes."""

    def __init__(self, bounds: Bounds):
        self._bounds, self._config = bounds, bounds.read()
        self._calls: dict[str, tuple[Call, float]] = {}  # and the steps of one call
        self._env: Any = None

    def prepare(self, what: str) -> float:
        """Compiles, and runs it once."""
        side, _, way = what.partition(" ")
        call = {"raw": self._raw, "learn": self._learn, "roof": self._roof}[side](way)
        call[0]()
        self._calls[what] = call
        return 0.0

    def measure(self, what: str, seconds: float) -> float:
        """Fails if anything moves between host and device unasked: that would be timed, too."""
        import jax

        call, steps = self._calls[what]
        start, done = time.perf_counter(), 0.0
        with jax.transfer_guard("disallow"):
            while (passed := time.perf_counter() - start) < seconds or done == 0:
                call()
                done += steps
        return done / passed

    def _raw(self, way: str) -> tuple[Call, float]:
        """envpool itself, without anything of ours around it, with actions drawn beforehand."""
        from benchmarks.lib.assembly import make_env, random_actions

        count, bounds = self._config.env.num_envs, self._bounds
        if self._env is None:
            threads = 1 if bounds.workers > 1 else 2
            first = bounds.place * count
            self._env = make_env(self._config, range(first, first + count), threads)
            self._env.reset()
        actions = random_actions(self._env.spec.action, SCAN, count)
        make = raw_scan if way == "xla" else raw_loop
        return make(self._env.pool, actions), SCAN * count

    def _learn(self, _: str) -> tuple[Call, float]:
        from benchmarks.lib.assembly import update_alone

        return update_alone(self._config), self._config.batch_size

    def _roof(self, way: str) -> tuple[Call, float]:
        chunk = int(way)
        return matrix_products(products(chunk, outputs=7)), chunk / self._config.algo.epochs


def raw_loop(pool: Any, actions: np.ndarray) -> Call:
    def steps() -> None:
        for action in actions:
            pool.step(action)

    return steps


def raw_scan(pool: Any, actions: np.ndarray) -> Call:
    import jax

    from benchmarks.lib.assembly import without_effect

    wide = actions.dtype == np.float64  # MuJoCo's compiled form takes nothing else
    with jax.enable_x64(wide):
        handle, _, _, step = pool.xla()
        step = without_effect(step)

        def one(handle: Any, action: Any) -> tuple[Any, Any]:
            handle, answer = step(handle, action)
            return handle, answer[1]  # the rewards: something must be read

        run = jax.jit(lambda handle, actions: jax.lax.scan(one, handle, actions)[1])
        handle, there = jax.device_put((handle, actions))

    def steps() -> None:
        with jax.enable_x64(wide):
            jax.block_until_ready(run(handle, there))

    return steps


def matrix_products(shapes: Sequence[tuple[int, int, int]]) -> Call:
    """All products once. Results go where those of the call before were: nothing is allocated."""
    import jax
    import jax.numpy as jnp

    factors = [(jnp.full((m, k), 0.5), jnp.full((k, n), 0.5)) for m, k, n in shapes]
    run = jax.jit(
        lambda _, factors: [a @ b for a, b in factors], donate_argnums=0, keep_unused=True
    )
    results = [[jnp.zeros((m, n)) for m, _, n in shapes]]

    def call() -> None:
        results.append(jax.block_until_ready(run(results.pop(), factors)))

    return call


def serve(bounds: Bounds, answers: IO[str]) -> None:
    """A line in, a number out, until the other side closes."""
    prepare_process(bounds.topology, 1)
    worker = Worker(bounds)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "prepare":
            found = worker.prepare(order["what"])
        else:
            found = worker.measure(order["what"], order["seconds"])
        answers.write(f"{found}\n")
        answers.flush()


# ---------------------------------------------------------------------------------------------
# On the outside


class Crew:
    """One worker on all the cores, or one on each; their rates are added."""

    def __init__(self, config: str, envs: int, steps: int, workers: int, cores: Sequence[int]):
        self.workers = workers
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        self._children: list[subprocess.Popen[str]] = []
        for place in range(workers):
            mine = cores if workers == 1 else [cores[place % len(cores)]]
            words = json.dumps(asdict(Bounds(config, envs, steps, workers, place)))
            command = ["taskset", "-c", ",".join(map(str, mine)),
                       sys.executable, "-m", "benchmarks.lib.limits", words]  # fmt: skip
            self._children.append(
                subprocess.Popen(
                    command, cwd=ROOT, text=True, stderr=self._log,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
            )  # fmt: skip

    def prepare(self, what: str) -> None:
        self._ask({"do": "prepare", "what": what})

    def measure(self, what: str, seconds: float) -> float:
        return sum(self._ask({"do": "measure", "what": what, "seconds": seconds}))

    def _ask(self, order: dict[str, Any]) -> list[float]:
        """Of all workers at the same time."""
        for child in self._children:
            assert child.stdin
            child.stdin.write(json.dumps(order) + "\n")
            child.stdin.flush()
        return [self._answer(child, order) for child in self._children]

    def _answer(self, child: subprocess.Popen[str], order: dict[str, Any]) -> float:
        assert child.stdout
        line = child.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{order} failed:\n{self._log.read().decode()[-3000:]}")
        return float(line)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: Any) -> None:
        for child in self._children:
            assert child.stdin
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()  # the end of its orders; it leaves its caches in order
        for child in self._children:
            try:
                child.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._log.close()


def main() -> None:
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        raise SystemExit(__doc__)
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not an answer
    serve(Bounds(**json.loads(sys.argv[1])), answers)


if __name__ == "__main__":
    main()
