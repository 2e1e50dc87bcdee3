"""Play a checkpoint and keep the episodes: `python -m spmdrl.record RUN_DIR --out DIR`.

Every episode has an environment of its own, seeded by the episode's number. So each episode counts
once, however short it is, can be replayed from its seed alone, and is the same whatever the number
of workers.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spmdrl.cli import EXIT_INTERRUPTED, answer_errors, complain
from spmdrl.config import EXIT_BAD_INPUT, EXIT_FAULT, Config, ConfigError, from_json, to_json
from spmdrl.episodes import Episode
from spmdrl.episodes.feeds import Feed, make_feed
from spmdrl.episodes.following import Follower, wait_for_checkpoint
from spmdrl.episodes.playing import Player, RecordingPlan, load_player, play_group, spaces
from spmdrl.options import PlayOptions, RunPath, check_positive, parse
from spmdrl.parallel.process import prepare_process
from spmdrl.parallel.spawn import spawn
from spmdrl.parallel.topology import Topology, detect, threads_per_rank
from spmdrl.parallel.world import World, connect
from spmdrl.runtime.consent import Consent, bring_code
from spmdrl.runtime.files import read_json
from spmdrl.runtime.hints import suggested
from spmdrl.runtime.models import describe_checkpoint, find_checkpoint
from spmdrl.runtime.provenance import code_from_json, read_code
from spmdrl.runtime.rundir import read_run
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.validate import validate

__all__ = ["Options", "RecordingPlan", "main", "record"]


@dataclass(frozen=True, kw_only=True)
class Options(PlayOptions):
    """Play a trained policy and write its episodes to disk.

    Actions are the most likely ones unless --stochastic is given. With --follow the newest
    checkpoint is played again and again while the run trains.
    """

    run_dir: RunPath
    """Run directory of a training run."""
    out: str
    """Directory for the episodes, new or empty; or sqlite:///FILE, a database."""
    episodes: int | None = None
    """Episodes to record, by default 100; exactly as many are written. With --follow: after how
    many to end, by default when the run does."""
    follow: bool = False
    """Play the newest checkpoint of a run that trains, until it ends or Ctrl-C."""
    keep: int = 1000
    """With --follow: how many of the newest episodes are kept."""
    nprocs: int = 1
    """Worker processes to start on this machine."""
    seed: int = 20_000
    """Seed of the episodes; not the evaluation's, so that a clone is evaluated on unseen starts."""
    num_envs: int | None = None
    """Episodes that a worker plays at the same time; by default the config's eval.num_envs."""
    max_steps: int | None = None
    """Steps after which an episode must have ended; by default the config's eval.max_steps."""


# ---------------------------------------------------------------------------------------------
# Before anything is loaded


def make_plan(options: Options, topology: Topology, consent: Consent) -> RecordingPlan:
    """Check the options against what is on the disk; changes nothing there."""
    check_positive(options, "episodes", "nprocs", "num_envs", "max_steps", "keep")
    if options.follow and options.checkpoint != "latest":
        raise ConfigError("--follow plays the latest checkpoint; leave out --checkpoint")
    if topology.size > 1 and options.nprocs not in (1, topology.size):
        raise ConfigError(
            f"nprocs is {options.nprocs}, but {topology.launcher} has started {topology.size} "
            "workers already; leave --nprocs out"
        )
    run_dir = Path(options.run_dir)
    config = read_run(run_dir)
    played = played_config(config, options)
    validate(played)
    feed = feed_of(options)
    feed.check()
    if options.follow:
        wait_for_checkpoint(run_dir)
    checkpoint = find_checkpoint(run_dir, options.checkpoint)
    code = bring_code(config, read_code(run_dir), run_dir, consent)
    about = {
        "env": config.env.id,
        "checkpoint": describe_checkpoint(checkpoint),
        "deterministic": played.eval.deterministic,
        "seed": played.eval.seed,
        "config": json.loads(to_json(config)),  # as trained; how it was played is said above
        "code": code.to_json() if code else None,
    }
    return RecordingPlan(played, checkpoint, feed, episodes_of(options), about, consent)


def feed_of(options: Options) -> Feed:
    run_dir = Path(options.run_dir)
    run_id = read_json(run_dir / "versions.json").get("run_id")
    return make_feed(options.out, run_id if isinstance(run_id, str) else run_dir.name)


def episodes_of(options: Options) -> int:
    """0 for as many as there is time for."""
    return options.episodes or (0 if options.follow else 100)


def played_config(config: Config, options: Options) -> Config:
    played = replace(
        config.eval,
        deterministic=options.takes_the_mode(otherwise=True),
        seed=options.seed,
        num_envs=options.num_envs or config.eval.num_envs,
        max_steps=options.max_steps or config.eval.max_steps,
    )
    return replace(config, eval=played)


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
            plan.feed.open()
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
    feed = plan.feed if world.is_root else feed_of(options)
    return RecordingPlan(config, checkpoint, feed, episodes_of(options), about, consent)


# ---------------------------------------------------------------------------------------------
# Playing


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
        report(plan, world, group)
    everyone = world.gather_json([episode.to_json() for episode in mine])
    return [Episode.from_json(row) for rows in everyone for row in rows]


def report(plan: RecordingPlan, world: World, group: range) -> None:
    """How many episodes there are by now; the other workers are about as far."""
    if world.is_root:
        done = min(plan.episodes, group.stop + len(group) * (world.size - 1))
        print(f"{'about ' * (world.size > 1)}{done} of {plan.episodes} episodes", flush=True)


def finish(plan: RecordingPlan, episodes: list[Episode], world: World) -> None:
    """Rank 0 writes the index, after it has seen that each episode is there once."""
    numbers = sorted(episode.id for episode in episodes)
    assert numbers == list(range(plan.episodes)), "an episode is missing or was played twice"
    if not world.is_root:
        return
    about = plan.about | {"spaces": spaces(plan.config), "workers": world.size}
    plan.feed.publish(about, episodes)
    returns = np.array([episode.episode_return for episode in episodes])
    steps = sum(episode.length for episode in episodes)
    print(
        f"{plan.config.env.id}, {plan.checkpoint.name}: {len(episodes)} episodes, {steps:,} steps, "
        f"return {returns.mean():.1f} ± {returns.std():.1f}"
    )
    print(f"written to {plan.out}")
    words = (plan.out, "--run-dir", "runs/clone", *plan.consent.words)
    print(f"clone     {suggested('clone', *words)}")


# ---------------------------------------------------------------------------------------------
# The command


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    options, topology = parse(Options, "record", argv), detect()
    consent = options.consent("record", argv)
    if options.nprocs > 1 and topology.size == 1:
        plan = make_plan(options, topology, consent)
        unfinished = f"stopping; the recording in {options.out} is unfinished: delete it"
        if options.follow:
            unfinished = "ending with this round of episodes (again: end at once)"
        else:
            note_idle_workers(plan, options.nprocs)
        return spawn(options.nprocs, "spmdrl.record", argv, unfinished)
    world = connect(topology)
    plan = shared_plan(options, topology, world, consent)
    prepare_process(topology, devices=1)
    return work(plan, world, topology, options)


def follow(plan: RecordingPlan, world: World, topology: Topology, options: Options) -> None:
    stop = StopRequest("ending with this round of episodes (again: end at once)").listen()
    run_dir = Path(options.run_dir)
    follower = Follower(plan, run_dir, options.keep, world, topology, stop)
    follower.run()
    if world.is_root:
        print(f"{follower.played} episodes played; the newest {options.keep} at most: {plan.out}")


def work(plan: RecordingPlan, world: World, topology: Topology, options: Options) -> int:
    """This worker's part, to the exit code; a worker that fails ends the others too."""
    from spmdrl.parallel.world import abort_all
    from spmdrl.runtime.watchdog import report_fault

    # --nprocs hands every request to stop on as USR1
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        if options.follow:
            follow(plan, world, topology, options)
        else:
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
