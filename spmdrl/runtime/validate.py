"""Which configs can work, and what to say about those that cannot.

Public names: `validate`, `check_extras`, `nearest_multiples`.
"""

from __future__ import annotations

import importlib.util

from spmdrl.config import Config, ConfigError, check_types, flatten


def validate(config: Config, size: int = 1, devices: int = 1) -> None:
    """Raise ConfigError for values that cannot work on `size` ranks of `devices` devices."""
    check_types(config)
    _check_ranges(config)
    _check_sizes(config, size, devices)


def check_extras(config: Config) -> None:
    """Raise ConfigError where the config asks for an optional package that is not installed."""
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


def _check_ranges(config: Config) -> None:
    def need(name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise ConfigError(f"{name} is {flat[name]!r}, but must be {rule}")

    flat = flatten(config)
    at_least_1 = [
        "total_steps", "env.num_envs", "algo.num_steps", "algo.epochs",
        "algo.minibatches", "sync.shards", "sync.check_every", "sync.max_skips", "log.every",
        "log.window", "checkpoint.keep", "checkpoint.renew_every", "eval.episodes",
        "eval.num_envs", "eval.max_steps",
    ]  # fmt: skip
    for name in at_least_1:
        need(name, flat[name] >= 1, "at least 1")
    need("nprocs", config.nprocs == "auto" or config.nprocs >= 1, "at least 1, or auto")
    for name in ["devices", "env.threads", "checkpoint.every"]:
        need(name, flat[name] >= 0, "0 or more")
    for name in ["algo.gamma", "algo.gae_lambda"]:
        need(name, 0.0 <= flat[name] <= 1.0, "between 0 and 1")
    for name in ["optim.adam_b1", "optim.adam_b2"]:
        need(name, 0.0 <= flat[name] < 1.0, "at least 0 and below 1")
    positive = [
        "optim.lr", "optim.adam_eps", "optim.max_grad_norm", "algo.clip_eps", "env.obs_clip",
        "env.reward_clip", "sync.phase_timeout_s", "sync.start_timeout_s",
    ]  # fmt: skip
    for name in positive:
        need(name, 0.0 < flat[name] < float("inf"), "above 0 and finite")
    for name in ["algo.entropy_coef", "algo.value_coef"]:
        need(name, 0.0 <= flat[name] < float("inf"), "0 or more and finite")
    for name in ["seed", "eval.seed"]:
        need(name, 0 <= flat[name] < 2**31, "from 0 to 2147483647")
    need("net.log_std_init", abs(config.net.log_std_init) < float("inf"), "finite")
    need("net.hidden", all(width >= 1 for width in config.net.hidden), "widths of at least 1")
    need("algo.target_kl", config.algo.target_kl is None or config.algo.target_kl > 0, "above 0")


def _check_sizes(config: Config, size: int, devices: int) -> None:
    steps, minibatches = config.algo.num_steps, config.algo.minibatches
    if steps % minibatches:
        raise ConfigError(
            f"algo.num_steps {steps} does not divide by algo.minibatches {minibatches}; "
            f"nearest: {nearest_multiples(steps, minibatches)}"
        )
    envs, places = config.env.num_envs, size * devices
    uneven_ok = devices == 1 and config.sync.strategy != "jax" and envs >= size
    if envs % places and not uneven_ok:
        raise ConfigError(
            f"env.num_envs {envs} does not divide by {size} ranks x {devices} devices = {places}; "
            f"nearest: {nearest_multiples(envs, places)}"
        )
    if config.num_updates < 1:
        raise ConfigError(
            f"total_steps {config.total_steps} is less than one rollout "
            f"(env.num_envs {envs} x algo.num_steps {steps} = {config.batch_size}); "
            f"nearest: {config.batch_size}"
        )
    if config.overlap and config.sync.strategy != "allreduce":
        raise ConfigError(
            f"overlap does not go with sync.strategy {config.sync.strategy}, which occupies all "
            "ranks until the update is done; take --sync.strategy allreduce"
        )
    if config.sync.deterministic:
        _check_shards(config, size, devices)


def _check_shards(config: Config, size: int, devices: int) -> None:
    envs, shards, places = config.env.num_envs, config.sync.shards, size * devices
    if envs % shards:
        raise ConfigError(
            f"env.num_envs {envs} does not divide by sync.shards {shards}; "
            f"nearest: {nearest_multiples(envs, shards)}"
        )
    # With gather rank 0 learns from all shards, so the ranks may have unequal numbers of them.
    even = shards % places == 0 or (config.sync.strategy == "gather" and devices == 1)
    if not even or shards < 2 * places:
        raise ConfigError(
            f"sync.shards {shards} must be a multiple of {size} ranks x {devices} devices, with "
            f"at least two per device; nearest: {max(2 * places, places * round(shards / places))}"
        )


def nearest_multiples(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return ", ".join(str(n) for n in (below, below + divisor) if n > 0)
