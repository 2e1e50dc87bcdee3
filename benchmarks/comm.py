"""What the ranks' talking costs for one update: allreduce, gather and jax.distributed.

    python benchmarks/comm.py                       # 2 and 4 ranks, about five minutes
    python benchmarks/comm.py --ranks 2 --repeats 5

allreduce and jax send the gradient of every minibatch (16 here); gather sends the rollout to rank 0
once and the parameters back once. The functions are the trainer's own, packing included; computing
is not. Writes benchmarks/results/comm.json, .md and .png.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import (
    Spread,
    about_spread,
    arguments,
    in_turns,
    machine,
    made_by,
    new_figure,
    number,
    progress,
    save,
    spread,
    table,
)

from spmdrl.parallel.process import prepare_process
from spmdrl.parallel.spawn import mpirun_command
from spmdrl.parallel.topology import cores, detect
from spmdrl.parallel.world import MpiWorld

MINIBATCHES = 16  # 4 epochs x 4
# Widths of the two hidden layers of the separate policy and value networks.
HIDDEN = {"9k": 64, "1M": 702, "10M": 2231}
STEPS, OBS = 128, {"vector": ((4,), "float32"), "image": ((4, 84, 84), "uint8")}
# Steps of the whole run in one rollout; the ranks share them.
ROLLOUTS = [("vector", 1024), ("vector", 16384), ("vector", 131072), ("image", 1024),
            ("image", 4096)]  # fmt: skip


# ---------------------------------------------------------------------------------------------
# By formula


def allreduce_bytes(params: int) -> int:
    """What one rank hands to MPI for the gradients of an update."""
    return 4 * params * MINIBATCHES


def rollout_bytes(kind: str, steps: int) -> int:
    """Of a whole rollout: each step, then what each environment has once."""
    envs = steps // STEPS
    shape, dtype = OBS[kind]
    obs = math.prod(shape) * (4 if dtype == "float32" else 1)
    floats, flags, action = 4, 4, 4  # four float32, four booleans, an int32
    return steps * (obs + 4 * floats + flags + action) + envs * (obs + 1 + 4)


def model_bytes(params: int) -> int:
    """Parameters, the update's number, and the count of the unused observation moments."""
    return 4 * params + 4 + 4


def network_bytes(ranks: int, params: int) -> int:
    """What the allreduces must send at least, over all links together."""
    return 2 * (ranks - 1) * allreduce_bytes(params)


# ---------------------------------------------------------------------------------------------
# One rank


class MeteredWorld(MpiWorld):
    """Counts the bytes of the arrays that a rank hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0

    def gather_rows(self, array: Any) -> Any:
        self.passed += array.nbytes
        return super().gather_rows(array)

    def broadcast(self, array: Any) -> Any:
        self.passed += array.nbytes
        return super().broadcast(array)


class Ways:
    """The trainer's three ways to learn together, with arrays of the right shapes."""

    def __init__(self, world: MeteredWorld):
        from spmdrl.runtime.loop import run_mesh

        self.world = world
        self.local, self.everywhere = run_mesh(_config(64)), run_mesh(_config(64, "jax"))
        self.states = {name: _state(width) for name, width in HIDDEN.items()}

    def params(self, name: str) -> int:
        import jax

        return sum(x.size for x in jax.tree.leaves(self.states[name].params))

    def gradients(self, strategy: str, name: str, flat: bool = False) -> Callable[[], Any]:
        """All minibatches' sums in one compiled loop, as in the update; `flat` joins the arrays."""
        import jax
        import numpy as np
        from jax.sharding import PartitionSpec as P

        from spmdrl.parallel.mesh import replicate
        from spmdrl.parallel.sync import make_grad_sync

        mesh = self.everywhere if strategy == "jax" else self.local
        sync = make_grad_sync(_config(64, strategy).sync, self.world, 1)
        params = self.states[name].params
        if flat:
            params = np.concatenate([x.ravel() for x in jax.tree.leaves(params)])
        params = replicate(params, mesh)

        def add(tree: Any, _: None) -> Any:
            return sync.in_step(jax.tree.map(lambda x: x[None], tree), tree), None

        def update(tree: Any) -> Any:
            return jax.lax.scan(add, tree, length=MINIBATCHES)[0]

        call = jax.jit(
            jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        )
        return lambda: jax.block_until_ready(call(params))

    def to_root(self, kind: str, steps: int) -> Callable[[], Any]:
        import jax

        from spmdrl.parallel.gather import gather_rollout

        rollout = _rollout(kind, steps // STEPS // self.world.size)
        return lambda: jax.block_until_ready(gather_rollout(self.world, self.local, rollout))

    def from_root(self, name: str) -> Callable[[], Any]:
        import jax

        from spmdrl.parallel.gather import share_model
        from spmdrl.parallel.mesh import replicate

        state = replicate(self.states[name], self.local)
        return lambda: jax.block_until_ready(share_model(self.world, self.local, state))


def _config(width: int, strategy: str = "allreduce") -> Any:
    from spmdrl.config import AlgoConfig, Config, EnvConfig, NetConfig, SyncConfig

    return Config(
        env=EnvConfig(id="CartPole-v1", num_envs=8),
        net=NetConfig(hidden=(width, width)),
        algo=AlgoConfig(num_steps=STEPS, epochs=4, minibatches=4),
        sync=SyncConfig(strategy=strategy),
    )


def _policy(config: Any) -> tuple[Any, Any]:
    import numpy as np

    from spmdrl.nets import make_policy
    from spmdrl.types import ActionSpace, EnvSpec

    action = ActionSpace("discrete", (), np.dtype(np.int32), nvec=(2,))
    spec = EnvSpec((4,), np.dtype(np.float32), action)
    return make_policy(config, spec), spec


def _state(width: int) -> Any:
    """A train state of tiny numbers, which 16 sums over the ranks leave finite."""
    import jax
    import numpy as np

    from spmdrl.learning.update import init_train_state

    config = _config(width)
    key = jax.random.PRNGKey(0)
    shapes = jax.eval_shape(lambda: init_train_state(config, *_policy(config), key))
    return jax.tree.map(lambda x: np.full(x.shape, 1e-12, x.dtype), shapes)


def _rollout(kind: str, envs: int) -> Any:
    import jax.numpy as jnp

    from spmdrl.types import Rollout

    shape, dtype = OBS[kind]
    step = {name: jnp.zeros((STEPS, envs)) for name in
            ("log_prob", "value", "reward", "discounted_return")}  # fmt: skip
    step |= {name: jnp.zeros((STEPS, envs), bool) for name in
             ("first", "terminated", "truncated", "valid")}  # fmt: skip
    return Rollout(
        obs=jnp.zeros((STEPS, envs, *shape), dtype),
        action=jnp.zeros((STEPS, envs), jnp.int32),
        last_obs=jnp.zeros((envs, *shape), dtype),
        last_first=jnp.zeros(envs, bool),
        carry=(), last_carry=(),
        env_ids=jnp.zeros(envs, jnp.int32),
        **step,
    )  # fmt: skip


def bytes_of_real_update(world: MeteredWorld) -> int:
    """What the trainer's own CartPole update hands to mpi4jax, read from its program."""
    import jax

    from spmdrl.learning.update import make_update
    from spmdrl.parallel.mesh import replicate
    from spmdrl.parallel.sync import make_grad_sync
    from spmdrl.runtime.loop import run_mesh

    config = _config(HIDDEN["9k"])
    mesh = run_mesh(config)
    policy, _ = _policy(config)
    update = make_update(config, policy, make_grad_sync(config.sync, world, 1), mesh)
    arguments = _state(HIDDEN["9k"]), _rollout("vector", 4), jax.random.PRNGKey(0)
    return _allreduced(jax.make_jaxpr(update)(*(replicate(a, mesh) for a in arguments)).jaxpr)


def _allreduced(jaxpr: Any) -> int:
    """Bytes of all allreduces in a program; those in a loop count as often as it turns."""
    total = 0
    for step in jaxpr.eqns:
        if "allreduce" in step.primitive.name:
            total += step.invars[0].aval.size * step.invars[0].aval.dtype.itemsize
        inner = [getattr(p, "jaxpr", p) for p in step.params.values()]
        turns = step.params.get("length", 1)
        total += turns * sum(_allreduced(p) for p in inner if hasattr(p, "eqns"))
    return total


def work(repeats: int, out: Path) -> None:
    """All cases on this rank; rank 0 writes what came out."""
    topology = detect()
    prepare_process(topology, 1)
    world = MeteredWorld()
    from spmdrl.runtime.session import start_jax_distributed

    start_jax_distributed(topology, world)
    ways = Ways(world)
    cases: dict[str, Callable[[], Any]] = {}
    for name in HIDDEN:
        cases[f"allreduce {name}"] = ways.gradients("allreduce", name)
        cases[f"jax {name}"] = ways.gradients("jax", name)
        cases[f"jax-flat {name}"] = ways.gradients("jax", name, flat=True)
        cases[f"model {name}"] = ways.from_root(name)
    for kind, steps in ROLLOUTS:
        cases[f"rollout {kind} {steps}"] = ways.to_root(kind, steps)
    passed = {case: _bytes_passed(world, call) for case, call in cases.items()}  # compiles too
    order = in_turns(list(cases), repeats)
    times: dict[str, list[float]] = {case: [] for case in cases}
    for case in progress(order, f"{world.size} ranks") if world.is_root else order:
        times[case].append(_seconds(world, cases[case]))
    answer = {
        "ms": {case: [1e3 * s for s in values] for case, values in times.items()},
        "passed": passed,
        "params": {name: ways.params(name) for name in HIDDEN},
        "real_update": bytes_of_real_update(world),
    }
    if world.is_root:
        out.write_text(json.dumps(answer))


def _bytes_passed(world: MeteredWorld, call: Callable[[], Any]) -> int:
    """By the arrays that this rank hands over; allreduces are read from the traced program."""
    from spmdrl.parallel import mpi

    traced: list[int] = []
    own = mpi.allreduce_after

    def counted(flat: Any, earlier: Any, comm: Any = None) -> Any:
        traced.append(flat.size * flat.dtype.itemsize)
        return own(flat, earlier, comm)

    world.passed, mpi.allreduce_after = 0, counted
    try:
        call()
    finally:
        mpi.allreduce_after = own
    # The loop's body is traced once, or more often, but always with the same size.
    return world.passed + (max(traced) * MINIBATCHES if traced else 0)


def _seconds(world: MeteredWorld, call: Callable[[], Any]) -> float:
    """Until the last rank is done."""
    import numpy as np

    world.barrier()
    start = time.perf_counter()
    call()
    return float(world.table(np.array([time.perf_counter() - start])).max())


# ---------------------------------------------------------------------------------------------
# All ranks together


def measure(ranks: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        # mpi4py ends all ranks when one of them fails; by itself MPI would wait for ever.
        worker = [sys.executable, "-m", "mpi4py", __file__, "--worker", str(out)]
        command = [*mpirun_command(ranks), *worker, "--repeats", str(repeats)]
        subprocess.run(command, check=True)
        return json.loads(out.read_text())


def check_bytes(found: dict[str, Any], ranks: int) -> None:
    """The formulas against what was passed; an error, not a note, where they differ."""
    expected = {}
    for name, params in found["params"].items():
        expected[f"allreduce {name}"] = allreduce_bytes(params)
        expected[f"model {name}"] = model_bytes(params)
    for kind, steps in ROLLOUTS:
        expected[f"rollout {kind} {steps}"] = rollout_bytes(kind, steps) // ranks
    for case, count in expected.items():
        if found["passed"][case] != count:
            raise AssertionError(f"{case}: {found['passed'][case]} bytes passed, not {count}")


def crossover(sizes: Sequence[float], gather: Sequence[float], other: float) -> tuple[float, bool]:
    """Rollout bytes at which gather costs as much as `other`, and whether that was in range.

    Straight lines between the measured points, the outermost ones going on; 0 where gather is
    dearer for the smallest rollout already and its line does not come down to `other`.
    """
    points = list(zip(sizes, gather, strict=True))
    pairs = list(itertools.pairwise(points))
    for (x0, y0), (x1, y1) in pairs:
        if y0 <= other <= y1:
            return x0 + (x1 - x0) * (other - y0) / (y1 - y0) if y1 > y0 else x0, True
    (x0, y0), (x1, y1) = pairs[0] if other < gather[0] else pairs[-1]
    if y1 <= y0:
        return (0.0 if other < gather[0] else math.inf), False
    return max(0.0, x0 + (x1 - x0) * (other - y0) / (y1 - y0)), False


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """Medians by policy and rollout, and the crossovers."""
    medians = {case: spread(values) for case, values in found["ms"].items()}
    rollouts = sorted((rollout_bytes(k, s), f"rollout {k} {s}") for k, s in ROLLOUTS)
    summary: dict[str, Any] = {"ms": medians, "policies": {}}
    for name in HIDDEN:
        model = medians[f"model {name}"].median
        gather = [(size, medians[case].median + model) for size, case in rollouts]
        sizes, ms = zip(*gather, strict=True)
        at = {w: crossover(sizes, ms, medians[f"{w} {name}"].median) for w in ("allreduce", "jax")}
        summary["policies"][name] = {"gather": gather, "crossover": at}
    return summary


def report(results: dict[str, Any], head: str) -> str:
    lines = [head, ""]
    for ranks, result in results.items():
        lines += [
            f"### {ranks} ranks" + _crowded(int(ranks)),
            "",
            _table_of_ms(int(ranks), result),
            "",
        ]
        lines += [_table_of_gather(int(ranks), result), "", _table_of_crossovers(result), ""]
    lines += [_about_bytes(results)]
    return "\n".join(lines)


def _crowded(ranks: int) -> str:
    return f" on {cores()} cores, so that they take turns" if ranks > cores() else ""


def _pretty(found: Spread) -> str:
    return f"{number(found.median)} ({number(found.low)}–{number(found.high)})"


def _table_of_ms(ranks: int, result: dict[str, Any]) -> str:
    rows = []
    for name, params in result["found"]["params"].items():
        ms = result["summary"]["ms"]
        cells = [_pretty(ms[f"{way} {name}"]) for way in ("allreduce", "jax", "jax-flat", "model")]
        sizes = [allreduce_bytes(params), network_bytes(ranks, params)]
        rows.append([f"{params:,}", *(f"{size / 1e6:,.2f}" for size in sizes), *cells])
    header = ["parameters", "MB a rank hands over, allreduce", "MB over all links", "allreduce, ms",
              "jax, ms", "jax with one joined array, ms",
              "gather: parameters back, ms"]  # fmt: skip
    return table(header, rows)


def _table_of_gather(ranks: int, result: dict[str, Any]) -> str:
    rows = []
    for kind, steps in ROLLOUTS:
        ms, size = result["summary"]["ms"][f"rollout {kind} {steps}"], rollout_bytes(kind, steps)
        rows.append([f"{steps:,} {kind}s", f"{size / 1e6:,.2f}",
                     f"{size * (ranks - 1) / ranks / 1e6:,.2f}", _pretty(ms)])  # fmt: skip
    return table(["rollout, steps", "MB", "MB to rank 0", "gather: rollout there, ms"], rows)


def _table_of_crossovers(result: dict[str, Any]) -> str:
    rows = []
    for name, policy in result["summary"]["policies"].items():
        cells = [_pretty_crossover(*policy["crossover"][way]) for way in ("allreduce", "jax")]
        rows.append([name, *cells])
    return table(["parameters", "allreduce is cheaper from, MB of rollout", "jax from"], rows)


def _pretty_crossover(size: float, measured: bool) -> str:
    if size == 0:
        return "always"
    return f"{number(size / 1e6)}" + ("" if measured else " (extrapolated)")


def _about_bytes(results: dict[str, Any]) -> str:
    found = next(iter(results.values()))["found"]
    small = allreduce_bytes(found["params"]["9k"])
    more = found["real_update"] - small
    repeats = len(found["ms"]["allreduce 9k"])
    return (
        "Milliseconds of one update's communication, 16 minibatches, no computing. "
        f"{about_spread(repeats)} All bytes were "
        "counted in the arrays that were passed and agree with the formulas. Gather costs the sum "
        "of its two parts. The trainer's real update of the smallest policy hands over "
        f"{found['real_update']:,} bytes: {small:,} of gradients and {more:,} of sums for losses, "
        "advantages and moments. A star in the picture: gather and allreduce cost the same."
    )


def draw(results: dict[str, Any]) -> Any:
    fig, axes = new_figure(len(HIDDEN), 14, 4.8, sharey=True)
    styles = dict(zip(results, ("-", "--"), strict=False))
    for axis, name in zip(axes, HIDDEN, strict=True):
        for ranks, style in styles.items():
            _draw_panel(axis, results[ranks]["summary"], name, ranks, style)
        axis.set(xscale="log", yscale="log", xlabel="rollout of the whole run, MB")
        params = next(iter(results.values()))["found"]["params"][name]
        axis.set_title(f"{params:,} parameters")
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.grid(alpha=0.3, which="major")
    axes[0].set_ylabel("communication of one update, ms")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=len(styles) * 3, fontsize=9)
    return fig


def _draw_panel(axis: Any, summary: dict[str, Any], name: str, ranks: str, style: str) -> None:
    policy, ms = summary["policies"][name], summary["ms"]
    sizes, gather = zip(*policy["gather"], strict=True)
    megabytes = [size / 1e6 for size in sizes]
    axis.plot(megabytes, gather, "C1o" + style, ms=4, label=f"gather, {ranks} ranks")
    for way, colour in (("allreduce", "C0"), ("jax", "C2")):
        level = ms[f"{way} {name}"].median
        axis.axhline(level, color=colour, ls=style, label=f"{way}, {ranks} ranks")
    size, measured = policy["crossover"]["allreduce"]
    if measured:
        axis.plot([size / 1e6], [ms[f"allreduce {name}"].median], "k*", ms=11, zorder=5)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--name", default="comm", help="of the written files")
    parser.add_argument("--worker", type=Path, help="(internal) run one rank")
    args = parser.parse_args()
    if args.worker:
        return work(args.repeats, args.worker)
    host, results = machine(), {}
    for ranks in args.ranks:
        found = measure(ranks, args.repeats)
        check_bytes(found, ranks)
        results[str(ranks)] = {"found": found, "summary": summarize(found)}
    data = {"machine": host, "minibatches": MINIBATCHES, "results": results}
    save(args.name, data, report(results, made_by(host)), draw(results))
    return None


if __name__ == "__main__":
    main()
