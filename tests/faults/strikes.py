"""SIGKILL at chosen moments of a job that `--nprocs` has started, of one rank or of all.

To hit a phase exactly, a rank is stopped first, and where it is read from its place; only if that
is the wanted phase is it killed, else it goes on. So the report must name exactly that phase and
update.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from spmdrl.parallel.place import Place, read_place
from spmdrl.runs import describe
from tests.children import train_command
from tests.faults.judge import Fault, Verdict, judge
from tests.faults.places import SIZES
from tests.faults.result import Bench, Result, is_stopped, leftovers, start, wait_until
from tests.faults.trials import end_orphans, processes, rows, wait_for

__all__ = ["KINDS", "trial"]

IN_TIME_S = 5.0
KINDS = (
    "kill at the start", "kill in a cold compile", "kill in collect", "kill in wait",
    "kill in update", "kill in save", "kill of all ranks",
)  # fmt: skip


def trial(kind: str, number: int, rng: random.Random, bench: Bench) -> Result:
    ranks = 2 + number % 2
    folder = bench.folder / "trial"
    shutil.rmtree(folder, ignore_errors=True)
    env = bench.environment(folder)
    if kind == "kill in a cold compile":
        env["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cold")
    sizes = [*SIZES, "--env.num-envs", "12"]  # shared out evenly by 2 and by 3
    sizes += ["--checkpoint.every", "1"] if kind == "kill in save" else []
    job = start(
        train_command(*sizes, "--nprocs", ranks, "--run-dir", folder / "run"),
        env,
    )
    guilty = list(range(ranks)) if kind == "kill of all ranks" else [rng.randrange(ranks)]
    faults, moment = strike(kind, job, ranks, guilty, rng, folder)
    output, ended = wait_for(job)
    orphans = end_orphans(str(folder))
    verdict = first_good([judge(fault, output) for fault in faults])
    why = complaints(job.returncode, ended - moment, orphans, folder) if faults else ["no fault"]
    why += [verdict.why] if verdict.why else []
    if why:
        print(output[-4000:], flush=True)
    what = f"{len(guilty)} of {ranks} ranks"
    return Result(kind, number, what, not why, verdict.line, "; ".join(why), ended - moment)


def first_good(verdicts: Sequence[Verdict]) -> Verdict:
    """Of ranks that are killed together, whichever died first may be named."""
    good = [verdict for verdict in verdicts if verdict.good]
    return (good or list(verdicts) or [Verdict("", "nothing was judged")])[0]


def complaints(code: int, seconds: float, orphans: int, folder: Path) -> list[str]:
    """What is wrong besides the report."""
    found = []
    if code == 0:
        found.append("exit code 0")
    if seconds > IN_TIME_S:
        found.append(f"it took {seconds:.1f} s")
    if orphans:
        found.append(f"{orphans} processes are left")
    if left := leftovers(folder):
        found.append(f"left behind: {', '.join(left[:3])}")
    info = describe(folder / "run", time.time()) if (folder / "run").exists() else None
    if info is not None and info.state != "killed":
        found.append(f"spmdrl runs says {info.state}")
    return found


def strike(
    kind: str, job: subprocess.Popen[str], ranks: int, guilty: list[int], rng: random.Random,
    folder: Path,
) -> tuple[list[Fault], float]:  # fmt: skip
    """What the report may say, one for each rank that was killed, and when it was."""
    if kind == "kill at the start":
        return strike_early(job, ranks, guilty[0], rng.uniform(0.0, 2.0), folder)
    if kind == "kill in a cold compile":
        phase, update = None, 0
        wait_until(lambda: has_begun(folder, guilty[0]), job)
        time.sleep(rng.uniform(0.0, 3.0))
    else:
        phase = kind.removeprefix("kill in ") if "kill in" in kind else None
        update = rng.randrange(2, 12)
    wait_until(lambda: rows(folder) >= update, job)
    for _ in range(2000):
        found = kill_in(phase, ranks, guilty, folder)
        if found or job.poll() is not None:
            break
        time.sleep(rng.uniform(0.0, 0.02))
    return found, time.time()


def strike_early(
    job: subprocess.Popen[str], ranks: int, rank: int, delay: float, folder: Path
) -> tuple[list[Fault], float]:
    """Counted from the first moment of the rank's process; phase and update are not known."""
    wait_until(lambda: any(processes(str(folder), rank)), job)
    time.sleep(delay)
    pids = list(processes(str(folder), rank))
    if not pids:
        return [], time.time()
    os.kill(pids[0], signal.SIGKILL)
    return [Fault("death", ranks, rank, updates=(0, 1))], time.time()


def kill_in(phase: str | None, ranks: int, guilty: list[int], folder: Path) -> list[Fault]:
    """Kill these ranks if the first of them is in that phase, or in any; else let them go on."""
    pids = {rank: next(processes(str(folder), rank), 0) for rank in guilty}
    if not all(pids.values()):
        return []
    if phase is not None and not wait_for_phase(phase, guilty[0], pids[guilty[0]], folder):
        return []
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    while not all(is_stopped(pid) for pid in pids.values()):
        time.sleep(0.001)
    places = {rank: place_of(folder, rank, pid) for rank, pid in pids.items()}
    first = places[guilty[0]]
    wanted = first is not None and phase in (None, first.phase)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL if wanted else signal.SIGCONT)
    if not wanted:
        return []
    return [
        Fault("death", ranks, rank, (place.phase,), (place.update, place.update))
        for rank, place in places.items()
        if place is not None
    ]


def wait_for_phase(phase: str, rank: int, pid: int, folder: Path) -> bool:
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        place = place_of(folder, rank, pid)
        if place is not None and place.phase == phase:
            return True
    return False


def has_begun(folder: Path, rank: int) -> bool:
    """Whether it is in its first update, in which everything is compiled."""
    place = place_of(folder, rank, 0)
    return place is not None and place.phase not in ("config", "start")


def place_of(folder: Path, rank: int, pid: int) -> Place | None:
    """Where the rank is, by the file that outlives it; of any process where `pid` is 0."""
    for job in (folder / "runtime" / "spmdrl" / "jobs").glob("job-*"):
        place = read_place(job, rank)
        if place is not None and pid in (0, place.pid):
            return place
    return None
