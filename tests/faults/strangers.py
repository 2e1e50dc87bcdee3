"""A stranger's run directory and recording, given to every command that reads one.

An honest run and its recording are damaged in one place, or ask for code that lies beside them.
Every command must end soon, with code 0 or 2, without a traceback, in bounded memory, and must
import nothing of the stranger's and write nothing outside of the place that was named.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.children import ROOT, train_command
from tests.faults.result import Bench, Result
from tests.test_hostile import SPECIAL, put

__all__ = ["KINDS", "trial"]

LIMIT_S = 90.0  # with an import of jax on a busy machine
LIMIT_BYTES = 1 << 30  # resident; an evaluation of CartPole needs 500 MB
ADDRESSES = 24 << 30  # bytes of address space
CANARY = "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n"
COMMANDS: dict[str, Callable[[Path], list[object]]] = {
    "runs": lambda place: ["stranger"],
    "plot": lambda place: ["stranger/run", "--out", place / "out" / "plot.html"],
    "report": lambda place: ["stranger/run", "--out", place / "out" / "report.html"],
    "evaluate": lambda place: ["stranger/run", "--episodes", 2],
    "record": lambda place: ["stranger/run", "--out", place / "out" / "data", "--episodes", 2],
    "clone": lambda place: ["stranger/data", "--run-dir", place / "out" / "clone", "--epochs", 1],
}
KINDS = tuple(f"stranger: {command}" for command in COMMANDS)


def trial(kind: str, number: int, rng: random.Random, bench: Bench) -> Result:
    command = kind.removeprefix("stranger: ")
    place, began = bench.folder / "trial", time.time()
    shutil.rmtree(place, ignore_errors=True)
    (place / "out").mkdir(parents=True)
    shutil.copytree(honest(bench), place / "stranger")
    what = spoil(place / "stranger", "data" if command == "clone" else "run", rng)
    (place / "stranger" / "evil.py").write_text(CANARY)
    (place / "evil.py").write_text(CANARY)
    env = bench.environment(place)
    before = listing(place)
    code, output, peak = run(command, place, env)
    why = judged(code, output, peak, listing(place) - before, time.time() - began)
    said = f"code {code}, {peak / 1e6:.0f} MB"
    if why:
        print(command, what, output[-2000:], flush=True)
    return Result(kind, number, what, not why, said, why, time.time() - began)


def honest(bench: Bench) -> Path:
    """A short training and a recording of it; made once."""
    place = bench.folder / "honest"
    if not (place / "data" / "index.json").exists():
        shutil.rmtree(place, ignore_errors=True)
        env = bench.environment(bench.folder / "making")
        sizes = ["--env.num-envs", 8, "--algo.num-steps", 16, "--total-steps", 512, "--log.panel",
                 "off", "--run-dir", place / "run"]  # fmt: skip
        record = ["record", place / "run", "--out", place / "data", "--episodes", "3"]
        commands = (train_command(*sizes), [sys.executable, "-m", "spmdrl", *map(str, record)])
        for command in commands:
            subprocess.run(command, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return place


def spoil(stranger: Path, part: str, rng: random.Random) -> str:
    """Damage one file, or name code of the stranger's; what was done."""
    ways = [*SPECIAL, "bytes within", "cut", "evil id", "evil wrap"]
    way = rng.choice(ways)
    if way.startswith("evil"):
        ask_for_code(stranger, way)
        return way
    files = sorted(p for p in (stranger / part).rglob("*") if p.is_file())
    file = rng.choice(files)
    name = file.relative_to(stranger)
    if way == "cut":
        os.truncate(file, rng.randrange(max(1, file.stat().st_size)))
    elif way == "bytes within":
        data = bytearray(file.read_bytes())
        at = rng.randrange(max(1, len(data)))
        data[at : at + 8] = rng.randbytes(8)
        file.write_bytes(data)
    else:
        put(way, file)
        (file.with_name(".before")).unlink(missing_ok=True)
    return f"{way} in {name}"


def ask_for_code(stranger: Path, way: str) -> None:
    for file in (stranger / "run" / "config.json", stranger / "data" / "index.json"):
        content = json.loads(file.read_text())
        config = content.get("config", content)
        config["env"]["backend"] = "gymnasium"
        if way == "evil id":
            config["env"]["id"] = "evil:Env-v0"
        else:
            config["env"]["wrap"] = "evil:wrap"
        file.write_text(json.dumps(content))


def run(command: str, place: Path, env: dict[str, str]) -> tuple[int | None, str, int]:
    """Exit code (None: it did not end), output and peak memory; from within the stranger's reach:
    the working directory is the first place where Python looks for modules."""
    words = [sys.executable, "-m", "spmdrl", command, *map(str, COMMANDS[command](place))]
    with (place / "out" / "output").open("w+") as output:
        job = subprocess.Popen(
            words, env=env, cwd=place, stdout=output, stderr=subprocess.STDOUT, preexec_fn=limit
        )
        until, status = time.monotonic() + LIMIT_S, 0
        pid, usage = 0, None
        while not pid and time.monotonic() < until:
            pid, status, usage = os.wait4(job.pid, os.WNOHANG)
            time.sleep(0.01)
        if not pid:
            job.kill()
            _, status, usage = os.wait4(job.pid, 0)
        job.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        assert usage is not None
        return job.returncode if pid else None, output.read(), usage.ru_maxrss * 1024


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))


def judged(code: int | None, output: str, peak: int, new: set[str], seconds: float) -> str:
    if code is None:
        return f"it did not end within {LIMIT_S:.0f} s"
    if code not in (0, 2):
        return f"exit code {code}"
    if "Traceback" in output:
        return "a traceback"
    if peak > LIMIT_BYTES:
        return f"{peak / 1e6:.0f} MB of memory"
    if imported := [name for name in new if name.endswith("imported")]:
        return f"{imported[0]}: the stranger's code was imported"
    outside = [n for n in new if not n.startswith(("out/", "stranger/run/", "home/", "tmp/"))]
    return f"written outside: {outside[:3]}" if outside else ""


def listing(place: Path) -> set[str]:
    return {str(p.relative_to(place)) for p in place.rglob("*") if not p.is_dir()}
