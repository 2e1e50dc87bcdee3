"""What a run is: frozen dataclasses, each field with its rule, its help and its default.

Nothing here imports jax, so bad input is answered at once.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from spmdrl.config.rules import (
    FINITE,
    FIXED,
    FREE,
    NAME,
    PATH,
    WINDOW,
    ConfigError,
    Count,
    Counts,
    Decay,
    NonNegative,
    Options,
    Positive,
    Range,
    Ranks,
    Seed,
    Share,
    Torso,
    Widths,
    Workers,
    at_least,
)

__all__ = [
    "EXIT_BAD_INPUT", "EXIT_FAULT", "EXIT_STOPPED", "AlgoConfig", "CheckpointConfig", "Config",
    "EnvConfig", "EvalConfig", "LogConfig", "NetConfig", "OptimConfig", "SyncConfig",
    "algorithm_class",
]  # fmt: skip

EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75


@dataclass(frozen=True)
class EnvConfig:
    id: str = "CartPole-v1"
    """Environment id, such as CartPole-v1 or Pong-v5; with gymnasium also package.module:Id-v0,
    package.module:Class and package.module:function."""
    num_envs: Count = 8
    """Environments in the whole run, over all ranks and devices."""
    backend: Literal["envpool", "gymnasium", "jax"] = "envpool"
    """Simulator: envpool (C++ threads), any Gymnasium environment, or one written in JAX."""
    options: Options = field(default_factory=dict)
    """Passed to the environment's constructor: --env.options frame_skip=4 layout='[1, 2]', values
    as in JSON, else text. On the command line they are added to those of the config file."""
    wrap: str | tuple[str, ...] = ""
    """With gymnasium: package.module:function, which is given each environment and returns it
    wrapped. Several are separated by commas; the first is the innermost."""
    threads: Annotated[int, at_least(0), FREE] = 0
    """Simulation threads per rank; 0 takes this machine's cores divided by its ranks."""
    workers: Annotated[Workers, FREE] = 0
    """With gymnasium: processes per device that step the environments, at most one for each; 0
    takes as many as there are threads. Environments that wait (network, sleep) want one each.
    inline steps them in the trainer's own process, for a debugger."""
    timeout_s: Annotated[Positive, FREE] = 60.0
    """With gymnasium: seconds that a worker process may take for a step of its environments, and
    ten times as long for making and resetting them, before the run ends and names them."""
    observe: tuple[Annotated[int, at_least(0)], ...] = ()
    """Entries of a vector observation that the agent sees; none named: all of them."""
    frame_stack: Count = 1
    """How many of the newest images the agent sees, one behind the other in the channels."""
    reward: Literal["none", "sign", "abs_one", "soft_asymmetric"] = "none"
    """Reward transform for learning; reported returns are always the raw ones."""
    normalize_obs: bool = False
    """Centre and scale vector observations by their running mean and deviation."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    obs_clip: Positive = 10.0
    """Normalised observations are clipped to plus or minus this."""
    reward_clip: Positive = 10.0
    """Normalised rewards are clipped to plus or minus this."""


@dataclass(frozen=True)
class NetConfig:
    torso: Torso = "auto"
    """mlp, nature_cnn, small_cnn, impala_resnet, or a network of your own as package.module:Class;
    auto takes an MLP for vectors, the Nature CNN for images, a small CNN below 36 x 36."""
    hidden: Widths = (64, 64)
    """Widths of the MLP's layers."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the MLP; the CNNs always use relu."""
    shared: bool = False
    """One torso shared by policy and value, instead of one each."""
    width: Count = 1
    """Multiplies the channels of impala_resnet."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Memory between torso and heads; without shared, policy and value have one each."""
    core_size: Count = 256
    """Units of the core."""
    last_action: bool = False
    """Also show the network what it did last."""
    last_reward: bool = False
    """Also show the network the last reward, clipped to plus or minus 1."""
    bptt: Annotated[int, at_least(0)] = 0
    """Steps through which a core's gradient flows back, a divisor of num_steps; 0: the rollout."""
    log_std_init: Annotated[float, FINITE] = 0.0
    """Initial log standard deviation of continuous actions."""
    policy_keys: tuple[str, ...] = ()
    """Parts of the observation that the policy sees; by default all but privileged ones."""
    value_keys: tuple[str, ...] = ()
    """Parts of the observation that the value sees; by default all."""
    symbols: tuple[str, ...] = ()
    """Images whose numbers are names: image=11,6,4 has so many in its three channels. Known for
    MiniGrid and BabyAI."""
    conv: Annotated[Literal["auto", "matmul", "xla"], FREE] = "auto"
    """How convolutions are computed; auto takes matmul on CPU and xla elsewhere."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the torsos; parameters, memory, heads, losses and optimiser stay float32."""
    matmul_precision: Literal["default", "high", "highest"] = "default"
    """Of float32 products: default lets GPUs round their inputs (TF32), highest does not."""


@dataclass(frozen=True)
class AlgoConfig:
    """What every algorithm has. A subclass adds its fields and makes the `Algorithm`."""

    num_steps: Count = 128
    """Steps per environment in one rollout."""
    gamma: Share = 0.99
    """Discount."""
    epochs: Count = 4
    """Passes over each rollout."""
    minibatches: Count = 4
    """Minibatches per pass."""

    selects: ClassVar[Literal["steps", "sequences"]] = "steps"
    """Minibatches of single steps of every environment, or of whole environments."""
    corrects_lag: ClassVar[bool] = False
    """Whether targets allow for rollouts of an older policy; said at the start of a run."""
    panel: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    """Metrics in the live panel: name, label, format."""
    plots: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Metrics that `spmdrl.plot` draws besides the usual ones: name, title."""
    metrics: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Metrics of its own, for the reference: name, meaning."""

    def __post_init__(self) -> None:
        if type(self) is AlgoConfig:
            raise ConfigError(
                "AlgoConfig is what algorithms have in common; choose one, for example "
                "algo=Ppo(...) with `from spmdrl.algos import Ppo`"
            )

    def make(self) -> Any:
        """The `spmdrl.algos.Algorithm` with these settings."""
        raise NotImplementedError


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adam", "adamw", "rmsprop", "sgd"] = "adam"
    """Optimiser; fields that begin with another one's name must stay at their defaults."""
    lr: Positive = 2.5e-4
    """Learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """linear and cosine decay to 0 at the end of the run."""
    warmup: Annotated[int, at_least(0)] = 0
    """Updates over which the learning rate rises linearly before its schedule begins."""
    max_grad_norm: Positive = 0.5
    """Gradients are clipped to this global norm."""
    adam_b1: Decay = 0.9
    """Decay of the gradient's mean, for adam and adamw."""
    adam_b2: Decay = 0.999
    """Decay of the squared gradient's mean, for adam and adamw."""
    adam_eps: Positive = 1e-5
    """Epsilon, added to the square root, for adam and adamw."""
    adamw_decay: NonNegative = 1e-4
    """Weight decay."""
    rmsprop_decay: Decay = 0.99
    """Decay of the squared gradient's mean."""
    rmsprop_eps: Positive = 0.1
    """Epsilon, which keeps the divisor away from 0."""
    rmsprop_eps_inside: bool = True
    """Add epsilon under the square root, as TensorFlow does, instead of to it, as PyTorch does."""
    rmsprop_initial: NonNegative = 1.0
    """Initial mean of the squared gradient: 1 in TensorFlow, 0 in PyTorch."""
    rmsprop_momentum: Decay = 0.0
    """Momentum of the steps, learning rate included, as in TensorFlow."""
    sgd_momentum: Decay = 0.0
    """Momentum of the gradient."""


@dataclass(frozen=True)
class SyncConfig:
    strategy: Annotated[Literal["allreduce", "gather", "jax"], FREE] = "allreduce"
    """How ranks learn together: summed gradients (MPI), rollouts on rank 0, or jax.distributed."""
    deterministic: bool = False
    """The same bits on every topology, at some cost in speed."""
    shards: Count = 8
    """With deterministic: number of fixed groups of environments, at least two per device.
    Their gradients are added in a fixed order."""
    check_every: Annotated[int, at_least(1), FREE] = 100
    """Updates between two checks that all ranks hold the same parameters."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """On a non-finite gradient: stop the run, or skip that gradient."""
    max_skips: Count = 10
    """With skip: the run ends after this many updates in a row that had to skip."""
    phase_timeout_s: Annotated[Positive, FREE] = 300.0
    """Seconds that one phase of an update may last; a longer one ends the run with a stack dump."""
    start_timeout_s: Annotated[Positive, FREE] = 600.0
    """The same for start-up, evaluations, and the first update, which compiles."""


@dataclass(frozen=True)
class LogConfig:
    every: Count = 1
    """Updates between two rows of metrics."""
    window: Annotated[int, WINDOW] = 100
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
    every: Annotated[int, at_least(0)] = 50
    """Updates between two checkpoints; 0 saves only at the end."""
    keep: Count = 3
    """How many of the newest checkpoints are kept, besides the best."""
    envs: Literal["replay", "fresh"] = "replay"
    """On resume: replay the saved actions to the exact same state, or start new episodes."""
    renew_every: Annotated[int, at_least(1), FIXED] = 2000
    """Updates after which the environments are made anew, which keeps replays short."""


@dataclass(frozen=True)
class EvalConfig:
    every: Annotated[int, at_least(0)] = 0
    """Updates between two evaluations while training, by rank 0 beside the run; 0: none."""
    episodes: Count = 100
    """Episodes of an evaluation, in training or by `python -m spmdrl.evaluate`."""
    num_envs: Count = 16
    """Environments played at the same time."""
    deterministic: bool = True
    """Take the most likely action, or sample."""
    seed: Seed = 12345
    """Seed of the evaluation's environments."""
    max_steps: Count = 200_000
    """Steps per environment after which the evaluation gives up."""


DEFAULT_ALGORITHM = "ppo"


def algorithm_class(name: str) -> type[AlgoConfig]:
    """The algorithm of that name: a file of `spmdrl.algos` holds a class of the same name."""
    module = importlib.import_module(f"spmdrl.algos.{name}")
    found: type[AlgoConfig] = getattr(module, name.capitalize())
    return found


def default_algorithm() -> AlgoConfig:
    return algorithm_class(DEFAULT_ALGORITHM)()


@dataclass(frozen=True)
class Config:
    """A training run. Sizes are global: more ranks change the speed, not what is learned."""

    run_dir: Annotated[str | None, PATH, FREE] = None
    """Where everything goes; an existing run is resumed. By default a new folder under runs/."""
    name: Annotated[str, NAME, FREE] = ""
    """Name of the run; by default that of the config file."""
    seed: Seed = 1
    """Seed from which everything random derives."""
    total_steps: Annotated[int, at_least(1), FREE] = 500_000
    """Environment steps of the whole run; linear and cosine schedules stretch to it."""
    schedule_steps: Annotated[int, at_least(0), FREE] = 0
    """Steps over which schedules run, if not total_steps: train a part now and the rest later."""
    until_return: Annotated[float | None, FINITE, FREE] = None
    """End once an evaluation's mean return is that high; without eval.every, log.window's mean."""
    init_from: str | None = None
    """Start with the parameters of another run: RUN_DIR, or RUN_DIR:best, :latest or :UPDATE."""
    nprocs: Annotated[Ranks, FREE] = 1
    """Ranks to start on this machine; auto: one per core."""
    devices: Annotated[int, at_least(0), FREE] = 0
    """Devices per rank; 0 takes one on CPU and all visible ones on GPU."""
    learners: Annotated[int, at_least(0), FREE] = 0
    """Ranks that only learn, the first ones; the others only act. 0: every rank does both."""
    actors: Annotated[int, at_least(0), FREE] = 0
    """With learners: ranks that only act; 0: all others that a launcher has started."""
    actor_envs: Annotated[Counts, FREE] = ()
    """With learners: environments of each actor, num_envs in all; by default even shares."""
    lag: Annotated[int, Range("from 0 to 16", lambda x: 0 <= x <= 16)] = 0
    """Rollouts come from the model of so many updates before. From 1 on, the next one is collected
    while this one is learned from, where processor and learner can work side by side."""
    restart: Annotated[bool, FREE] = False
    """Move an existing run directory aside and start over, instead of resuming."""

    env: EnvConfig = field(default_factory=EnvConfig)
    net: NetConfig = field(default_factory=NetConfig)
    algo: AlgoConfig = field(default_factory=default_algorithm)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    log: Annotated[LogConfig, FREE] = field(default_factory=LogConfig)
    checkpoint: Annotated[CheckpointConfig, FREE] = field(default_factory=CheckpointConfig)
    eval: Annotated[EvalConfig, FREE] = field(default_factory=EvalConfig)

    @property
    def batch_size(self) -> int:
        """Environment steps in one rollout, over the whole run."""
        return self.env.num_envs * self.algo.num_steps

    @property
    def learns_from(self) -> Literal["steps", "sequences"]:
        """What minibatches consist of; a network with memory needs whole sequences."""
        return "sequences" if self.net.core != "none" else self.algo.selects

    @property
    def collects_ahead(self) -> bool:
        """Whether the next rollout is collected beside an update: its model must be there, and
        neither the other ranks' update nor a simulator on the learner's device in the way.
        Ranks that only act do so anyway."""
        beside = self.sync.strategy == "allreduce" and self.env.backend != "jax"
        return self.lag > 0 and beside and not self.learners

    @property
    def num_updates(self) -> int:
        return self.total_steps // self.batch_size

    @property
    def schedule_updates(self) -> int:
        """Updates after which schedules are at their end."""
        return max(1, (self.schedule_steps or self.total_steps) // self.batch_size)
