"""What a run is: frozen dataclasses, and how they are read.

A config file is Python that defines `config = Config(...)` or `get_config()`; every field can be
overridden on the command line by its name. Nothing here imports jax, so bad input is answered at
once. Public names: `Config` and its parts, `load`, `ConfigError`, `to_json`, `from_json`.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import re
import runpy
import sys
import traceback
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75


class ConfigError(ValueError):
    """Bad input: the message names the field, the value and the nearest valid choice."""


@dataclass(frozen=True)
class EnvConfig:
    id: str = "CartPole-v1"
    """Environment id, such as CartPole-v1, Pong-v5 or Ant-v4."""
    num_envs: int = 8
    """Environments in the whole run, over all ranks and devices."""
    backend: Literal["envpool", "gymnasium"] = "envpool"
    """Who simulates: envpool (C++ threads) or any registered Gymnasium environment."""
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Passed to the environment's constructor, for example episodic_life True."""
    threads: int = 0
    """Simulation threads of each rank; 0 takes the cores divided by the ranks on this machine."""
    reward: Literal["none", "sign", "abs_one", "soft_asymmetric"] = "none"
    """Reward transform for learning; reported returns are always the raw ones."""
    normalize_obs: bool = False
    """Centre and scale observations by their running moments."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return."""
    obs_clip: float = 10.0
    """Bound of a normalised observation."""
    reward_clip: float = 10.0
    """Bound of a normalised reward."""


@dataclass(frozen=True)
class NetConfig:
    torso: Literal["auto", "mlp", "nature_cnn"] = "auto"
    """auto takes the MLP for vectors and the Nature CNN for images."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the MLP's layers."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the MLP; the CNN always uses relu."""
    shared: bool = False
    """One torso for policy and value, or one each."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions."""
    conv: Literal["auto", "matmul", "xla"] = "auto"
    """How convolutions are computed; auto takes matmul on CPU and xla elsewhere."""


@dataclass(frozen=True)
class AlgoConfig:
    num_steps: int = 128
    """Steps of each environment in one rollout."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Generalised advantage estimation's lambda."""
    epochs: int = 4
    """Passes over each rollout."""
    minibatches: int = 4
    """Minibatches in a pass; each takes the same number of steps from every environment."""
    clip_eps: float = 0.2
    """Bound of the probability ratio."""
    clip_schedule: Literal["constant", "linear"] = "constant"
    """linear goes to 0 at the end of the run."""
    clip_value: bool = True
    """Clip the value update by clip_eps too."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    normalize_advantage: Literal["none", "minibatch", "batch"] = "minibatch"
    """Over which rows advantages are centred and scaled."""
    target_kl: float | None = None
    """Stop the passes over a rollout when the approximate KL exceeds this."""


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 2.5e-4
    """Adam's learning rate."""
    lr_schedule: Literal["constant", "linear"] = "linear"
    """linear goes to 0 at the end of the run."""
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    adam_eps: float = 1e-5
    max_grad_norm: float = 0.5
    """Global norm to which gradients are clipped."""


@dataclass(frozen=True)
class SyncConfig:
    strategy: Literal["allreduce", "gather", "jax"] = "allreduce"
    """How ranks learn together: averaged gradients (MPI), rollouts gathered on rank 0, or
    jax.distributed."""
    deterministic: bool = False
    """The same bits on every topology, at some cost in speed."""
    shards: int = 8
    """With deterministic: fixed groups of environments whose gradients are added in a fixed
    order; at least two per device."""
    check_every: int = 100
    """Updates between two comparisons of the ranks' parameters."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a gradient that is not finite does: end the run, or be left out."""
    max_skips: int = 10
    """With skip: the run ends after so many in a row."""
    phase_timeout_s: float = 300.0
    """A collect or update phase that lasts longer ends the run with a stack dump of every rank."""
    start_timeout_s: float = 600.0
    """The same for start-up and compilation."""


@dataclass(frozen=True)
class LogConfig:
    every: int = 1
    """Updates between two rows of metrics."""
    window: int = 100
    """Episodes in the reported mean return."""
    panel: Literal["auto", "on", "off"] = "auto"
    """Live panel; auto shows it on a terminal and prints plain lines elsewhere."""
    tensorboard: bool = False
    """Also write TensorBoard files (needs the extra `tb`)."""
    wandb: str | None = None
    """Also log to this Weights & Biases project (needs the extra `wandb`)."""
    all_ranks: bool = False
    """Print the log lines of every rank, not only those of rank 0."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 50
    """Updates between two checkpoints; 0 saves only at the end."""
    keep: int = 3
    """How many of the newest checkpoints stay on disk, besides the best."""
    envs: Literal["replay", "fresh"] = "replay"
    """On resume: bring the environments to exactly where they were by repeating their actions, or
    start new episodes."""
    renew_every: int = 2000
    """Updates after which every run makes new environments, so that a replay stays short."""


@dataclass(frozen=True)
class EvalConfig:
    episodes: int = 100
    """Episodes played by `python -m spmdrl.evaluate`."""
    num_envs: int = 16
    """Environments played at the same time."""
    deterministic: bool = True
    """Take the most likely action, or sample."""
    seed: int = 12345
    """Seed of the evaluation's environments."""
    max_steps: int = 200_000
    """Steps of each environment after which the evaluation gives up."""


@dataclass(frozen=True)
class Config:
    """PPO training run. Sizes are global: more ranks change the speed, not what is learned."""

    run_dir: str | None = None
    """Where everything goes; an existing run goes on. By default a new folder under runs/."""
    name: str = ""
    """Name of the run; by default that of the config file."""
    seed: int = 1
    """Everything random derives from it."""
    total_steps: int = 500_000
    """Environment steps of the whole run."""
    nprocs: int | Literal["auto"] = 1
    """Ranks to start on this machine; auto: one a core."""
    devices: int = 0
    """Devices of each rank; 0 takes one on CPU and all visible ones on GPU."""
    overlap: bool = False
    """Collect the next rollout while learning from this one, with the parameters of one update
    before. Changes what is learned; for simulators that keep an accelerator waiting, which then
    learns while the processor acts."""
    restart: bool = False
    """Move an existing run directory aside and begin anew, instead of going on."""

    env: EnvConfig = field(default_factory=EnvConfig)
    net: NetConfig = field(default_factory=NetConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def batch_size(self) -> int:
        """Environment steps in one rollout, over the whole run."""
        return self.env.num_envs * self.algo.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.algo.minibatches

    @property
    def num_updates(self) -> int:
        return self.total_steps // self.batch_size


# ---------------------------------------------------------------------------------------------
# Reading


def load(argv: Sequence[str]) -> Config:
    """The config named by the first argument, changed by the flags after it."""
    path, flags = _split(argv)
    default = _execute(path) if path else Config()
    if path and not default.name:
        default = dataclasses.replace(default, name=Path(path).stem)
    if path is None and not _asks_for_help(flags):
        raise ConfigError(
            "the first argument must be a config file; for example: "
            "python -m spmdrl.train configs/cartpole.py"
        )
    _check_flags(flags)
    import tyro  # not needed by those who only read a saved config

    prog = f"python -m spmdrl.train {path or 'CONFIG.py'}"
    return tyro.cli(Config, default=default, args=list(flags), prog=prog)


def _split(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    if argv and not argv[0].startswith("-"):
        return argv[0], list(argv[1:])
    return None, list(argv)


def _asks_for_help(flags: Sequence[str]) -> bool:
    return "-h" in flags or "--help" in flags


def _check_flags(flags: Sequence[str]) -> None:
    """Two mistakes for which tyro names no remedy: a right name in the wrong part of the config,
    and a value after a yes-or-no field."""
    types_of = _field_types(Config)
    words = [part for flag in flags for part in flag.split("=", 1)]
    for flag, value in itertools.pairwise([*words, "--"]):
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name.startswith("env.options"):
            continue
        elsewhere = [k for k in types_of if k.rpartition(".")[2] == name.rpartition(".")[2]]
        if name not in types_of and elsewhere:
            choices = " or ".join("--" + k.replace("_", "-") for k in elsewhere)
            raise ConfigError(f"there is no field {flag}; did you mean {choices}?")
        if types_of.get(name) is bool and not value.startswith("-"):
            part, dot, last = flag.removeprefix("--").rpartition(".")
            raise ConfigError(
                f"{name} takes no value, but {value!r} follows it; write {flag} for yes and "
                f"--{part}{dot}no-{last} for no"
            )


def _execute(path: str) -> Config:
    file = Path(path)
    if not file.is_file():
        what = "is not a file" if file.exists() else "does not exist"
        raise ConfigError(f"config file {path} {what}{_similar_file(file)}")
    sys.path.insert(0, str(file.resolve().parent))  # a variant imports its base by name
    try:
        names = runpy.run_path(path)
        config = names["get_config"]() if "get_config" in names else names.get("config")
    except Exception as error:
        raise ConfigError(f"config file {path} failed: {_explain(error, file)}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(config, Config):
        raise ConfigError(
            f"config file {path} must define `config = Config(...)` or `get_config()` that "
            f"returns one; found {type(config).__name__}"
        )
    check_types(config)
    return config


def _explain(error: Exception, file: Path) -> str:
    """Type, text and line of the config file, and the field that a wrong name resembles."""
    text = f"{type(error).__name__}: {error}"
    folder = str(file.resolve().parent)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if str(Path(f.filename).resolve().parent) == folder]
    if lines and not isinstance(error, SyntaxError):  # which says its line itself
        text += f" ({lines[-1].filename}, line {lines[-1].lineno})"
    wrong = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    known = {name.rpartition(".")[2] for name in _field_types(Config)}
    return text + (suggest(wrong[1], known) if wrong else "")


def _similar_file(file: Path) -> str:
    folder = file.parent if file.parent.is_dir() else Path("configs")
    names = [str(p) for p in sorted(folder.glob("*.py"))]
    close = difflib.get_close_matches(str(file), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


# ---------------------------------------------------------------------------------------------
# As JSON: what rank 0 sends to the others, and what a run directory keeps


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(text: str) -> Config:
    return _build(Config, json.loads(text))


def _build(cls: Any, values: dict[str, Any]) -> Any:
    """The dataclass from its dict; an unknown field is an error, a missing one its default."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for name in values.keys() - known:
        raise ConfigError(f"unknown field {name!r} in {cls.__name__}{suggest(name, known)}")
    built = {}
    for name, value in values.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            built[name] = _build(hint, value)
        else:
            built[name] = tuple(value) if isinstance(value, list) else value
    return cls(**built)


def flatten(config: Config) -> dict[str, Any]:
    """{"env.id": ..., "seed": ...}: every field by its command-line name."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": item for key, item in value.items()})
        else:
            flat[name] = value
    return flat


def _field_types(cls: Any) -> dict[str, Any]:
    """{"env.id": str, ...}: the type of every field by its command-line name."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= {f"{name}.{key}": inner for key, inner in _field_types(hint).items()}
        else:
            found[name] = hint
    return found


def suggest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else ""


def check_types(part: Any, prefix: str = "") -> None:
    """The command line is checked by tyro; a config file can assign anything."""
    for name, hint in typing.get_type_hints(type(part)).items():
        value = getattr(part, name)
        if not _fits(value, hint):
            choices = [str(c) for c in typing.get_args(hint) if typing.get_origin(hint) is Literal]
            rule = f"one of {', '.join(choices)}" if choices else _type_name(hint)
            close = suggest(str(value), choices) if choices else ""
            raise ConfigError(f"{prefix}{name} is {value!r}, but must be {rule}{close}")
        if dataclasses.is_dataclass(hint):
            check_types(value, f"{prefix}{name}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, args[1]) for item in value.values())
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def _type_name(hint: Any) -> str:
    return str(hint) if typing.get_args(hint) else hint.__name__
