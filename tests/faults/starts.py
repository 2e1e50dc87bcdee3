"""Two starts on one run directory at a random offset: one trains, the other leaves with code 2."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.children import train_command
from tests.faults.places import SIZES
from tests.faults.result import Bench, Result, start, wait_until
from tests.faults.trials import end_orphans, processes

__all__ = ["trial"]

REFUSED = re.compile(r"^spmdrl: run_dir \S+ is in use by (pid \d+ on .*|another process); ", re.M)


def trial(number: int, rng: random.Random, bench: Bench) -> Result:
    folder, offset = bench.folder / "trial", rng.uniform(0.0, 8.0)
    shutil.rmtree(folder, ignore_errors=True)
    ranks, began = 1 + number % 2, time.time()
    jobs = [launch(folder, ranks, bench)]
    time.sleep(offset)
    jobs.append(launch(folder, ranks, bench))
    wait_until(lambda: any(job.poll() is not None for job in jobs), jobs[0], 60.0)
    gone = [job for job in jobs if job.poll() is not None]
    why = "both train" if not gone else "neither trains" if len(gone) == 2 else ""
    if not why:
        why = judged(gone[0], next(job for job in jobs if job is not gone[0]), folder)
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    for pid in processes(str(folder)):
        os.kill(pid, signal.SIGKILL)
    for job in jobs:
        job.communicate(timeout=60)
    end_orphans(str(folder))
    why = why or mixed(folder / "run")
    what = f"the second {offset:.1f} s later, {ranks} rank(s)"
    return Result("two starts", number, what, not why, "one refused", why, time.time() - began)


def launch(folder: Path, ranks: int, bench: Bench) -> subprocess.Popen[str]:
    words = [*SIZES, "--nprocs", ranks, "--run-dir", folder / "run"]
    return start(train_command(*words), bench.environment(folder))


def judged(loser: subprocess.Popen[str], winner: subprocess.Popen[str], folder: Path) -> str:
    output, _ = loser.communicate(timeout=60)
    if loser.returncode != 2 or not REFUSED.search(output) or "Traceback" in output:
        return f"the second left with {loser.returncode}: {output[-500:]}"
    before = len(updates(folder / "run"))
    if not wait_until(lambda: len(updates(folder / "run")) > before + 20, winner, 60.0):
        return "the first does not go on"
    return ""


def updates(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(n)["progress/update"] for n in lines if n.endswith("\n")]


def mixed(run: Path) -> str:
    """Whether two histories are in one file."""
    found = updates(run)
    return "" if found == list(range(1, len(found) + 1)) else "the rows are of two histories"
