"""Which configs can work on how many ranks and devices, and what to say about those that cannot."""

from __future__ import annotations

import importlib.util

from spmdrl.config import Config, ConfigError, OptimConfig, own_code
from spmdrl.config.rules import check_fields
from spmdrl.parallel.roles import layout_of

__all__ = ["check_extras", "nearest_multiples", "validate"]

MOST_UPDATES = 2**31 - 2  # counted in 32 bits; steps of the environments are not


def validate(config: Config, size: int = 1, devices: int = 1) -> None:
    """Raise ConfigError for values that cannot work on `size` ranks of `devices` devices."""
    check_fields(config)
    _check_optimizer(config.optim)
    _check_run(config)
    _check_memory(config)
    learning = config.learners or size
    _check_minibatches(config, learning * devices)
    _check_topology(config, learning, devices)
    _check_roles(config, size)


def check_extras(config: Config) -> None:
    """Raise ConfigError where the config asks for an optional package that is not installed, or for
    a network that is nowhere to be found."""
    if network := own_code.own_network(config.net.torso):
        own_code.check_module(network, "net.torso")
    wanted = {
        "log.tensorboard": ("tensorboardX", "tb", config.log.tensorboard),
        "log.wandb": ("wandb", "wandb", config.log.wandb),
    }
    for name, (package, extra, asked) in wanted.items():
        if asked and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{name} needs the package {package}, which is not installed; install it with "
                f"uv sync --extra {extra} or pip install '.[{extra}]'"
            )


def _check_optimizer(optim: OptimConfig) -> None:
    """A field of another optimiser that was set by hand would have no effect."""
    uses = {"adam": ("adam",), "adamw": ("adam", "adamw")}.get(optim.name, (optim.name,))
    for name, default in vars(OptimConfig()).items():
        owner = name.partition("_")[0]
        belongs = owner in ("adam", "adamw", "rmsprop", "sgd") and owner not in uses
        if belongs and getattr(optim, name) != default:
            raise ConfigError(
                f"optim.{name} has no effect with optim.name {optim.name}; "
                f"use --optim.name {owner} or leave it out"
            )


def _check_run(config: Config) -> None:
    if config.num_updates < 1:
        raise ConfigError(
            f"total_steps {config.total_steps} is less than one rollout "
            f"(env.num_envs {config.env.num_envs} x algo.num_steps {config.algo.num_steps} = "
            f"{config.batch_size}); nearest: {config.batch_size}"
        )
    if config.num_updates > MOST_UPDATES:
        raise ConfigError(
            f"total_steps {config.total_steps} are {config.num_updates} updates of "
            f"{config.batch_size} steps, more than {MOST_UPDATES}; nearest: "
            f"{MOST_UPDATES * config.batch_size}"
        )
    _check_schedule(config)


def _check_schedule(config: Config) -> None:
    if config.schedule_steps and config.schedule_steps < config.batch_size:
        raise ConfigError(
            f"schedule_steps {config.schedule_steps} is less than one rollout of "
            f"{config.batch_size} steps; nearest: {config.batch_size}"
        )
    decays = config.optim.lr_schedule != "constant"
    if decays and config.schedule_updates < config.num_updates:
        raise ConfigError(
            f"schedule_steps {config.schedule_steps} is less than total_steps "
            f"{config.total_steps}: the learning rate would be 0 for the rest of the run; leave it "
            "out to stretch the schedule, or use --optim.lr-schedule constant"
        )


def _check_minibatches(config: Config, num_devices: int) -> None:
    algo, envs = config.algo, config.env.num_envs
    if config.learns_from == "steps":
        if algo.num_steps % algo.minibatches:
            steps = nearest_multiples(algo.num_steps, algo.minibatches)
            parts = nearest_divisors(algo.num_steps, algo.minibatches)
            raise ConfigError(
                f"algo.num_steps {algo.num_steps} is not divisible by algo.minibatches "
                f"{algo.minibatches}; nearest: {steps}; or algo.minibatches {parts}"
            )
        return
    groups = config.sync.shards if config.sync.deterministic else num_devices
    blocks = groups * algo.minibatches
    if envs % blocks:
        raise ConfigError(
            f"env.num_envs {envs} is not divisible by algo.minibatches {algo.minibatches} on each "
            f"of {groups} {'shards' if config.sync.deterministic else 'devices'}, as minibatches "
            f"of whole environments need; nearest: {nearest_multiples(envs, blocks)}"
        )


def _check_memory(config: Config) -> None:
    bptt, steps = config.net.bptt, config.algo.num_steps
    if bptt and steps % bptt:
        divisors = [n for n in range(1, steps + 1) if steps % n == 0]
        below = max(n for n in divisors if n <= bptt)
        above = min((n for n in divisors if n > bptt), default=steps)
        raise ConfigError(
            f"net.bptt {bptt} does not divide algo.num_steps {steps}; nearest: {below}, {above}"
        )


def _check_roles(config: Config, size: int) -> None:
    """A single rank is whoever uses a trained policy, or is about to start the others."""
    ranks = size if size > 1 else config.learners + config.actors
    if size > 1 or config.actors or not config.learners:
        layout_of(config, ranks)


def _check_topology(config: Config, size: int, devices: int) -> None:
    envs, num_devices = config.env.num_envs, size * devices
    uneven_ok = devices == 1 and config.sync.strategy != "jax" and envs >= size
    if envs % num_devices and not uneven_ok:
        raise ConfigError(
            f"env.num_envs {envs} is not divisible by {size} ranks x {devices} devices = "
            f"{num_devices}; nearest: {nearest_multiples(envs, num_devices)}"
        )
    if config.sync.deterministic:
        _check_shards(config, size, devices)


def _check_shards(config: Config, size: int, devices: int) -> None:
    envs, shards, num_devices = config.env.num_envs, config.sync.shards, size * devices
    if envs % shards:
        raise ConfigError(
            f"env.num_envs {envs} is not divisible by sync.shards {shards}; "
            f"nearest: {nearest_multiples(envs, shards)}"
        )
    # With gather rank 0 learns from all shards, so the ranks may have unequal numbers of them.
    even = shards % num_devices == 0 or (config.sync.strategy == "gather" and devices == 1)
    if not even or shards < 2 * num_devices:
        nearest = max(2 * num_devices, num_devices * round(shards / num_devices))
        raise ConfigError(
            f"sync.shards {shards} must be a multiple of {size} ranks x {devices} devices, with "
            f"at least two per device; nearest: {nearest}"
        )


def nearest_multiples(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return ", ".join(str(n) for n in (below, below + divisor) if n > 0)


def nearest_divisors(value: int, wanted: int) -> str:
    """The numbers around `wanted` by which the value can be divided."""
    divisors = [n for n in range(1, value + 1) if value % n == 0]
    below = [n for n in divisors if n < wanted][-1:]
    return ", ".join(map(str, below + [n for n in divisors if n > wanted][:1]))
