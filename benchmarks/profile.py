"""Where the time of one training iteration goes, part by part.

    python benchmarks/profile.py configs/cartpole.py configs/pong.py

Each part is compiled and timed alone, on the same shapes, so that the sum can be held against the
whole iteration. Medians over repeats; writes benchmarks/results/profile.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from spmdrl.acting.actors import act, draw_noise
from spmdrl.acting.collector import Collector
from spmdrl.config import Config, load
from spmdrl.envs import make_env
from spmdrl.learning.stages import (
    Learner,
    apply_gradient,
    begin,
    gradient_sums,
    moment_sums,
    prepare,
    prepared_specs,
)
from spmdrl.learning.update import init_train_state, make_optimizer, make_update
from spmdrl.nets import make_policy
from spmdrl.nets.policy import variables_of
from spmdrl.parallel.mesh import local_devices, make_mesh, replicate
from spmdrl.parallel.placement import rollout_specs
from spmdrl.parallel.sync import make_grad_sync
from spmdrl.parallel.topology import cores
from spmdrl.parallel.world import World
from spmdrl.runtime.rundir import versions

OUT = Path(__file__).with_name("results") / "profile.md"


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(call())  # compiles
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        with jax.transfer_guard("disallow"):  # what moves unasked would be timed, too
            jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


class Parts:
    """The pieces of an iteration, each ready to be timed."""

    def __init__(self, config: Config):
        self.config = config
        self.mesh = make_mesh(local_devices(1))
        self.sync = make_grad_sync(config.sync, World(), 1)
        ids = range(config.env.num_envs)
        self.collector = Collector(config, partial(make_policy, config), self.mesh, ids, cores(), 1)
        self.policy = self.collector.policy
        key = jax.random.PRNGKey(0)
        state = init_train_state(config, self.policy, self.collector.spec, key)
        self.state, self.key = replicate((state, key), self.mesh)
        self.rollout, _ = self.collector.collect(self.state, self.key)
        self.learner = Learner(config, self.policy, make_optimizer(config), self.sync, 1)

    def sharded(self, function: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)
        )

    def collect(self) -> Any:
        return self.collector.collect(self.state, self.key)[0]

    def simulate(self) -> Callable[[], None]:
        """The same number of steps with constant actions and no policy."""
        env = make_env(self.config, range(self.config.env.num_envs), cores())
        env.reset()
        action = np.asarray(self.rollout.action)[0]

        def steps() -> None:
            for _ in range(self.config.algo.num_steps):
                env.send(action)
                env.recv()

        return steps

    def infer(self) -> Callable[[], Any]:
        """T steps of the policy inside one program, without an environment."""
        num_steps, state, rollout = self.config.algo.num_steps, self.state, self.rollout
        variables = variables_of(state.params, state.obs_moments)

        def steps(variables: Any, obs: Any, first: Any, key: Any) -> Any:
            noise = draw_noise(self.policy, key, state.step, rollout.env_ids, num_steps)

            def step(now: Any, noise_t: Any) -> Any:
                obs, total = now  # a new observation each time, or XLA would compute it once
                _, _, *thought = act(self.policy, 1, variables, (), obs, first, noise_t)
                total += sum(x.sum() for x in jax.tree.leaves(thought))
                return (jnp.roll(obs, 1, axis=-1), total), None

            return jax.lax.scan(step, (obs, 0.0), noise)[0]

        compiled = jax.jit(steps)
        return lambda: compiled(variables, rollout.last_obs, rollout.last_first, self.key)

    def learn(self) -> dict[str, Callable[[], Any]]:
        learner, add = self.learner, self.sync.in_step
        rows, prep = rollout_specs(), prepared_specs()

        def prepare_all(state: Any, rollout: Any, key: Any) -> Any:
            sums = add(moment_sums(learner, state, rollout), None)
            prepared, partial_sums = prepare(learner, state, rollout, key, sums)
            return prepared, add(partial_sums, sums)

        prepare_of = self.sharded(prepare_all, (P(), rows, P()), (prep, P()))
        prepared, advantages = prepare_of(self.state, self.rollout, self.key)
        gradient_of = self.sharded(
            lambda p, r, q, a: add(gradient_sums(learner, p, r, q, a), None),
            (P(), rows, prep, P()),
            P(),
        )
        progress = replicate(begin(self.state), self.mesh)
        total = gradient_of(progress, self.rollout, prepared, advantages["powers"])
        apply_of = jax.jit(lambda p, g: apply_gradient(learner, p, g))
        return {
            "prepare": lambda: prepare_of(self.state, self.rollout, self.key),
            "gradient": lambda: gradient_of(progress, self.rollout, prepared, advantages["powers"]),
            "apply": lambda: apply_of(progress, total),
        }

    def update(self) -> Callable[[], Any]:
        update = make_update(self.config, self.policy, self.sync, self.mesh)
        copy = jax.jit(lambda s: jax.tree.map(lambda x: x + 0, s))
        return lambda: update(copy(self.state), self.rollout, self.key)  # the state is donated


def profile(path: str, repeats: int) -> list[str]:
    config = load([path])
    parts = Parts(config)
    count = config.algo.epochs * config.algo.minibatches
    learn = parts.learn()
    ms = {
        "collect": median_ms(parts.collect, repeats),
        "env": median_ms(parts.simulate(), repeats),
        "infer": median_ms(parts.infer(), repeats),
        "update": median_ms(parts.update(), repeats),
    } | {name: median_ms(call, repeats) for name, call in learn.items()}
    whole = ms["collect"] + ms["update"]
    rate = config.batch_size / whole * 1e3

    def row(name: str, value: float) -> str:
        return f"| {name} | {value:.2f} | {value / whole:.0%} |"

    return [
        f"\n### {config.env.id}, {config.env.num_envs} environments x {config.algo.num_steps} "
        f"steps, {config.algo.epochs} x {config.algo.minibatches} minibatches",
        "",
        "| part | ms | of the iteration |",
        "|---|---|---|",
        row("**collect** (one rollout)", ms["collect"]),
        row("simulation alone, Python API", ms["env"]),
        row("inference alone, compiled loop", ms["infer"]),
        row("**update** (one compiled call)", ms["update"]),
        row("prepare: advantages, order", ms["prepare"]),
        row(f"gradient x {count}, called one by one", ms["gradient"] * count),
        row(f"apply x {count}, called one by one", ms["apply"] * count),
        row(f"**whole iteration** ({rate:,.0f} steps/s)", whole),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    found = versions()
    lines = [
        "Made by `python benchmarks/profile.py " + " ".join(args.configs) + "` on "
        f"{cores()} cores; jax {found['jax']}, envpool {found['envpool']}. The parts are timed "
        "alone, so they need not add up to the compiled whole."
    ]
    for path in args.configs:
        lines += profile(path, args.repeats)
        print("\n".join(lines[-11:]), flush=True)
    OUT.write_text("\n".join(lines) + "\n")
    print(f"\nwritten to {OUT}")


if __name__ == "__main__":
    main()
