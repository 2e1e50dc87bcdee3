"""A long run that is stopped and killed at random: does anything grow, or get slower?

    python -m tests.faults.soak --updates 200000      # hours; writes benchmarks/results/soak.*
    python -m tests.faults.soak --updates 200000 --minutes 5

CartPole on two ranks with checkpoints and TensorBoard. Every start is watched: memory, threads and
open files of its ranks, files of the run directory, updates per second. It can be stopped and
started again with the same --bench. A start holds when its end is as its beginning, and the whole
when the last start is as the first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.children import ROOT, train_command
from tests.faults.result import Bench, start, wait_until
from tests.faults.starts import updates
from tests.faults.trials import end_orphans, processes

__all__ = ["Sample", "Stretch", "grown", "main"]

RANKS = 2
EVERY_S = 2.0
WARM_S = 10.0  # after the first update: buffers are filled, everything is compiled
STOPPED = 75


@dataclass(frozen=True)
class Sample:
    """Of all ranks together."""

    seconds: float
    update: int
    rss_mb: float
    threads: int
    descriptors: int
    files: int  # in the run directory, TensorBoard's included


@dataclass(frozen=True)
class Stretch:
    """From one start of the run to its end."""

    number: int
    ended: str
    code: int
    first: Sample
    last: Sample

    @property
    def rate(self) -> float:
        elapsed = self.last.seconds - self.first.seconds
        return (self.last.update - self.first.update) / elapsed if elapsed else 0.0

    @property
    def complaints(self) -> list[str]:
        expected = {"stop": STOPPED, "kill": 137, "end": 0}[self.ended]
        wrong = [f"exit code {self.code}"] if self.code != expected else []
        return wrong + grown(self.first, self.last)


def grown(first: Sample, last: Sample) -> list[str]:
    """What is more than it was; a tenth of memory is the allocator's play."""
    found = []
    if last.rss_mb > 1.1 * first.rss_mb + 20.0:
        found.append(f"memory from {first.rss_mb:.0f} to {last.rss_mb:.0f} MB")
    for name in ("threads", "descriptors"):
        before, after = getattr(first, name), getattr(last, name)
        if after > before + 4:
            found.append(f"{name} from {before} to {after}")
    return found


def sample(run: Path, pids: list[int], began: float) -> Sample | None:
    try:
        rss = sum(_status(pid, "VmRSS") for pid in pids) / 1024
        threads = sum(_status(pid, "Threads") for pid in pids)
        descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    except (OSError, StopIteration):
        return None
    files = sum(1 for path in run.rglob("*") if path.is_file())
    return Sample(time.monotonic() - began, last_update(run), rss, threads, descriptors, files)


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def last_update(run: Path) -> int:
    """By the end of the metrics, which may be long."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            lines = [line for line in file.read().splitlines(keepends=True) if line[-1:] == b"\n"]
        return int(json.loads(lines[-1])["progress/update"])
    except (OSError, ValueError, IndexError, KeyError):
        return 0


def launch(count: int, folder: Path, bench: Bench) -> subprocess.Popen[str]:
    words = [
        "--env.num-envs", 8, "--algo.num-steps", 16, "--net.hidden", 16, "--nprocs", RANKS,
        "--total-steps", count * 8 * 16, "--checkpoint.every", 500, "--log.every", 10,
        "--log.tensorboard", "--log.panel", "off", "--run-dir", folder / "run",
    ]  # fmt: skip
    return start(train_command(*words), bench.environment(folder))


def stretch(number: int, count: int, lasts_s: float, rng: random.Random, bench: Bench) -> Stretch:
    folder = bench.folder / "soak"
    run, job, began = folder / "run", launch(count, folder, bench), time.monotonic()
    before = last_update(run)
    trained = wait_until(lambda: last_update(run) > before + 20, job, 180.0)
    if not trained and job.poll() != 0:
        raise RuntimeError(f"it does not train: {job.communicate()[0][-2000:]}")
    pids = [pid for rank in range(RANKS) for pid in processes(str(folder), rank)]
    time.sleep(WARM_S if trained else 0.0)
    first = last = sample(run, pids, began) or Sample(0.0, last_update(run), 0.0, 0, 0, 0)
    until = time.monotonic() + lasts_s
    while job.poll() is None and time.monotonic() < until:
        time.sleep(EVERY_S)
        last = sample(run, pids, began) or last
    ended = "end" if job.poll() is not None else rng.choice(["stop", "kill"])
    if ended == "stop":
        job.send_signal(signal.SIGTERM)
    elif ended == "kill":
        os.kill(rng.choice(pids), signal.SIGKILL)
    job.communicate(timeout=120)
    end_orphans(str(folder))
    return Stretch(number, ended, job.returncode, first, last)


def soak(count: int, minutes: float, longest_s: float, out: Path, bench: Bench) -> list[Stretch]:
    until, found = time.monotonic() + 60.0 * minutes, list[Stretch]()
    while time.monotonic() < until and (not found or found[-1].ended != "end"):
        rng = random.Random(f"soak {len(found)}")
        lasts = min(rng.uniform(longest_s / 4, longest_s), until - time.monotonic())
        found.append(stretch(len(found), count, max(5.0, lasts), rng, bench))
        with out.open("a") as file:
            file.write(json.dumps(asdict(found[-1])) + "\n")
        print(found[-1], "; ".join(found[-1].complaints) or "held", flush=True)
    return found


def table(found: list[Stretch], run: Path) -> str:
    lines = [
        "| start | updates | ended by | memory, first and last (MB) | threads | open files | "
        "files of the run | updates/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        a, b = one.first, one.last
        lines.append(
            f"| {one.number} | {a.update} to {b.update} | {one.ended} | {a.rss_mb:.0f}, "
            f"{b.rss_mb:.0f} | {a.threads}, {b.threads} | {a.descriptors}, {b.descriptors} | "
            f"{a.files}, {b.files} | {one.rate:.0f} |"
        )
    odd = [f"- start {one.number}: {why}" for one in found for why in one.complaints]
    odd += [f"- first to last start: {why}" for why in grown(found[0].first, found[-1].last)]
    rows = updates(run)
    every = list(range(10, 10 * len(rows) + 1, 10))
    odd += [] if rows[: len(every) - 1] == every[:-1] else ["- the rows have gaps or repetitions"]
    rates = [one.rate for one in found if one.rate]
    speed = f"Median {statistics.median(rates):.0f} updates/s." if rates else ""
    return "\n".join([*lines, "", speed, "", *(odd or ["Nothing grew."])])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--longest", type=float, default=600.0, help="seconds of one start")
    parser.add_argument("--bench", type=Path, help="folder for the run, to go on with it later")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "soak.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spmdrl-soak-") as folder:
        bench = Bench(Path(os.path.realpath(args.bench or folder)))
        found = soak(args.updates, args.minutes, args.longest, args.out, bench)
        text = table(found, bench.folder / "soak" / "run")
    made = f"Made by `python -m tests.faults.soak`: CartPole on {RANKS} ranks with TensorBoard.\n\n"
    args.out.with_suffix(".md").write_text(f"{made}{text}\n")
    print(text)
    return 0 if "Nothing grew." in text else 1


if __name__ == "__main__":
    sys.exit(main())
