"""Play a checkpoint and keep the episodes: `python -m spmdrl.record RUN_DIR --out DIR`.

Every episode has an environment of its own, seeded by the episode's number. So each episode counts
once, however short it is, can be replayed from its seed alone, and is the same whatever the number
of workers.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmdrl.acting.player import make_chooser, play_steps
from spmdrl.cli import EXIT_INTERRUPTED, answer_errors, complain
from spmdrl.config import EXIT_BAD_INPUT, EXIT_FAULT, Config, ConfigError, from_json, to_json
from spmdrl.episodes import INDEX, Episode, describe_spec, named_obs, write_episode, write_index
from spmdrl.options import PlayOptions, RunPath, check_positive, parse
from spmdrl.parallel.process import prepare_process
from spmdrl.parallel.spawn import spawn
from spmdrl.parallel.topology import Topology, detect, threads_per_rank
from spmdrl.parallel.world import World, connect
from spmdrl.runtime.consent import Consent, bring_code
from spmdrl.runtime.hints import suggested
from spmdrl.runtime.models import describe_checkpoint, find_checkpoint, load_model
from spmdrl.runtime.provenance import code_from_json, read_code
from spmdrl.runtime.rundir import read_run
from spmdrl.runtime.validate import validate

if TYPE_CHECKING:
    from spmdrl.acting.player import PlayedStep
    from spmdrl.envs.base import EnvBatch
    from spmdrl.nets import Policy
    from spmdrl.types import EnvSpec, Obs

__all__ = ["Options", "RecordingPlan", "main", "record"]


@dataclass(frozen=True, kw_only=True)
class Options(PlayOptions):
    """Play a trained policy and write its episodes to disk.

    Actions are the most likely ones unless --stochastic is given.
    """

    run_dir: RunPath
    """Run directory of a training run."""
    out: str
    """Directory for the episodes; new or empty."""
    episodes: int = 100
    """Episodes to record; exactly as many are written."""
    nprocs: int = 1
    """Worker processes to start on this machine."""
    seed: int = 20_000
    """Seed of the episodes; not the evaluation's, so that a clone is evaluated on unseen starts."""
    num_envs: int | None = None
    """Episodes that a worker plays at the same time; by default the config's eval.num_envs."""
    max_steps: int | None = None
    """Steps after which an episode must have ended; by default the config's eval.max_steps."""


@dataclass(frozen=True)
class RecordingPlan:
    """What rank 0 has found out and every worker needs."""

    config: Config
    checkpoint: Path
    out: Path
    episodes: int
    about: dict[str, Any]
    """What the index says besides the episodes. Known from the start: a training run that is still
    under way may delete the checkpoint before the last episode is over."""
    consent: Consent

    @property
    def groups(self) -> list[range]:
        """Episodes that are played together. They depend on nothing but the options: a network's
        last bits can differ with the number of rows it computes at once."""
        size = self.config.eval.num_envs
        starts = range(0, self.episodes, size)
        return [range(start, min(start + size, self.episodes)) for start in starts]


# ---------------------------------------------------------------------------------------------
# Before anything is loaded


def make_plan(options: Options, topology: Topology, consent: Consent) -> RecordingPlan:
    """Check the options against what is on the disk; changes nothing there."""
    check_positive(options, "episodes", "nprocs", "num_envs", "max_steps")
    if topology.size > 1 and options.nprocs not in (1, topology.size):
        raise ConfigError(
            f"nprocs is {options.nprocs}, but {topology.launcher} has started {topology.size} "
            "workers already; leave --nprocs out"
        )
    run_dir, out = Path(options.run_dir), Path(options.out)
    config = read_run(run_dir)
    played = played_config(config, options)
    validate(played)
    checkpoint = find_checkpoint(run_dir, options.checkpoint)
    check_out(out)
    code = bring_code(config, read_code(run_dir), run_dir, consent)
    about = {
        "env": config.env.id,
        "checkpoint": describe_checkpoint(checkpoint),
        "deterministic": played.eval.deterministic,
        "seed": played.eval.seed,
        "config": json.loads(to_json(config)),  # as trained; how it was played is said above
        "code": code.to_json() if code else None,
    }
    return RecordingPlan(played, checkpoint, out, options.episodes, about, consent)


def played_config(config: Config, options: Options) -> Config:
    played = replace(
        config.eval,
        deterministic=options.takes_the_mode(otherwise=True),
        seed=options.seed,
        num_envs=options.num_envs or config.eval.num_envs,
        max_steps=options.max_steps or config.eval.max_steps,
    )
    return replace(config, eval=played)


def check_out(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"out {out} is not a directory; choose another with --out")
    if (out / INDEX).exists():
        raise ConfigError(f"out {out} holds a recording already; choose another with --out")
    if any(out.glob("worker-*-episode-*.safetensors")):
        raise ConfigError(
            f"out {out} holds an unfinished recording; delete it or choose another with --out"
        )
    if any(out.iterdir()):
        raise ConfigError(f"out {out} is not empty; choose another with --out")


def note_idle_workers(plan: RecordingPlan, workers: int) -> None:
    busy = len(plan.groups)
    if busy < workers:
        print(
            f"only {busy} of {workers} workers have work: {plan.episodes} episodes are "
            f"played {plan.config.eval.num_envs} at a time; lower --num-envs to use all",
            flush=True,
        )


def shared_plan(
    options: Options, topology: Topology, world: World, consent: Consent
) -> RecordingPlan:
    """Rank 0 decides, also which checkpoint is the newest; the others receive it as JSON."""
    answer: dict[str, Any] = {}
    if world.is_root:
        try:
            plan = make_plan(options, topology, consent)
            plan.out.mkdir(parents=True, exist_ok=True)
            answer = {"config": to_json(plan.config), "about": plan.about}
        except ConfigError as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": f"out {options.out} cannot be written: {error.strerror}"}
    answer = world.broadcast_json(answer)
    if "error" in answer:
        raise ConfigError(answer["error"]) if world.is_root else SystemExit(EXIT_BAD_INPUT)
    about = answer["about"]
    checkpoint = Path(about["checkpoint"]["path"])
    config = from_json(answer["config"])
    if not world.is_root:
        bring_code(config, code_from_json(about["code"]), options.run_dir, consent)
    return RecordingPlan(config, checkpoint, Path(options.out), options.episodes, about, consent)


# ---------------------------------------------------------------------------------------------
# Playing


class EpisodeBuffer:
    """Rows of one environment until its episode is over."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, step: PlayedStep, i: int) -> None:
        answer = step.answer
        self._rows.append(
            {name: np.array(x[i]) for name, x in named_obs("obs", step.obs).items()}
            | {
                "action": step.action[i],
                "reward": answer.reward[i],
                "terminated": answer.terminated[i],
                "truncated": answer.truncated[i],
                "valid": step.valid[i],
            }
        )

    def finish(self, last_obs: Obs, i: int) -> dict[str, np.ndarray]:
        columns = {name: np.stack([row[name] for row in self._rows]) for name in self._rows[0]}
        self._rows = []
        last = {name: np.array(x[i]) for name, x in named_obs("last_obs", last_obs).items()}
        return columns | last


class Player(NamedTuple):
    policy: Policy
    choose: Callable[..., Any]


def play_group(
    plan: RecordingPlan, env: EnvBatch, player: Player, group: range, worker: int
) -> list[Episode]:
    """One episode of every environment, each written as soon as it is over."""
    from spmdrl.envs.base import env_seeds

    limit, seeds = plan.config.eval.max_steps, env_seeds(plan.config.eval.seed, group)
    buffers = {i: EpisodeBuffer() for i in range(len(group))}
    written: list[Episode] = []
    for step in play_steps(env, *player, group, limit):
        for i, buffer in list(buffers.items()):
            buffer.add(step, i)
            if step.answer.episode_over[i]:
                arrays = buffers.pop(i).finish(step.answer.obs, i)
                written.append(write_episode(plan.out, worker, group[i], seeds[i], arrays))
        if not buffers:
            return written
    late = [group[i] for i in buffers]
    raise ConfigError(
        f"{len(late)} episodes, the first of them {late[0]}, did not end within {limit} steps; "
        f"raise --max-steps. The recording in {plan.out} is unfinished: delete it"
    )


def load_player(plan: RecordingPlan, spec: EnvSpec) -> Player:
    played = plan.config.eval
    policy, variables = load_model(plan.config, spec, plan.checkpoint)
    return Player(policy, make_chooser(policy, variables, played.deterministic, played.seed))


def record(plan: RecordingPlan, world: World, topology: Topology) -> list[Episode]:
    """Every worker plays its groups; all episodes, on every rank."""
    from spmdrl.envs import make_env

    config, threads = replace(plan.config, seed=plan.config.eval.seed), threads_per_rank(topology)
    mine: list[Episode] = []
    player: Player | None = None
    for group in plan.groups[world.rank :: world.size]:
        env = make_env(config, group, threads)
        player = player or load_player(plan, env.spec)
        mine += play_group(plan, env, player, group, world.rank)
        env.close()
        report(plan, world)
    everyone = world.gather_json([episode.to_json() for episode in mine])
    return [Episode.from_json(row) for rows in everyone for row in rows]


def report(plan: RecordingPlan, world: World) -> None:
    """How many episodes there are by now, those of all workers."""
    if world.is_root:
        done = sum(1 for _ in plan.out.glob("worker-*-episode-*.safetensors"))
        print(f"{done} of {plan.episodes} episodes", flush=True)


def finish(plan: RecordingPlan, episodes: list[Episode], world: World) -> None:
    """Rank 0 writes the index, after it has seen that each episode is there once."""
    numbers = sorted(episode.id for episode in episodes)
    assert numbers == list(range(plan.episodes)), "an episode is missing or was played twice"
    if not world.is_root:
        return
    about = plan.about | {"spaces": spaces(plan.config), "workers": world.size}
    write_index(plan.out, about, episodes)
    returns = np.array([episode.episode_return for episode in episodes])
    steps = sum(episode.length for episode in episodes)
    print(
        f"{plan.config.env.id}, {plan.checkpoint.name}: {len(episodes)} episodes, {steps:,} steps, "
        f"return {returns.mean():.1f} ± {returns.std():.1f}"
    )
    print(f"written to {plan.out}")
    words = (plan.out, "--run-dir", "runs/clone", *plan.consent.words)
    print(f"clone     {suggested('clone', *words)}")


def spaces(config: Config) -> dict[str, Any]:
    from spmdrl.envs import make_env

    env = make_env(config, range(1), threads=1)
    found = describe_spec(env.spec)
    env.close()
    return found


# ---------------------------------------------------------------------------------------------
# The command


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    options, topology = parse(Options, "record", argv), detect()
    consent = options.consent("record", argv)
    if options.nprocs > 1 and topology.size == 1:
        note_idle_workers(make_plan(options, topology, consent), options.nprocs)
        unfinished = f"stopping; the recording in {options.out} is unfinished: delete it"
        return spawn(options.nprocs, "spmdrl.record", argv, unfinished)
    world = connect(topology)
    plan = shared_plan(options, topology, world, consent)
    prepare_process(topology, devices=1)
    return work(plan, world, topology)


def work(plan: RecordingPlan, world: World, topology: Topology) -> int:
    """This worker's part, to the exit code; a worker that fails ends the others too."""
    from spmdrl.parallel.world import abort_all
    from spmdrl.runtime.watchdog import report_fault

    # --nprocs hands every request to stop on as USR1
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        finish(plan, record(plan, world, topology), world)
        return 0
    except ConfigError as error:
        return abort_all(world, complain(error, EXIT_BAD_INPUT))
    except KeyboardInterrupt:
        if world.size == 1:  # else the process that started the workers has said it
            unfinished = f"the recording in {plan.out} is unfinished: delete it"
            complain(f"interrupted; {unfinished}", EXIT_INTERRUPTED)
        return abort_all(world, EXIT_INTERRUPTED)
    except BaseException as error:
        report_fault(world.rank, world.size, "recording", error)
        return abort_all(world, EXIT_FAULT)


if __name__ == "__main__":
    sys.exit(main())
