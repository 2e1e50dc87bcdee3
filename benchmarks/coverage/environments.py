"""Make and step every environment, train two updates on some of each family, and write the table.

    python -m benchmarks.environments              # every id of envpool: about an hour
    python -m benchmarks.environments --sample 2   # two ids of each family: a few minutes

Ids are made and stepped in a child process, which may crash or hang: then a new one continues with
the next id. The compiled step is compared with the plain one, bit for bit. The command can be
stopped and started again; ids that were looked at stay so. Writes results/environments.json and
.md, and the table of docs/environments.md.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lib.common import RESULTS, ROOT, arguments, machine, made_by, save, table
from spmdrl.envs.families import FAMILIES, Family

__all__ = ["Child", "look_at", "page", "sampled", "verdict"]

ANSWER_S = 180.0  # an id that takes longer hangs
STORE = RESULTS / "environments.json"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
PAGE = ROOT / "docs" / "environments.md"

Found = dict[str, Any]  # a Checkup, or {"id", "crashed"}


class Child:
    """A process that looks at one environment after the other."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "spmdrl.envs.checkup"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, cwd=ROOT
        )

    def ask(self, wanted: dict[str, Any]) -> Found:
        """The answer, or how the process ended or hung instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        line = self._process.stdout.readline() if ready else b""
        if line:
            return json.loads(line)
        self._process.kill()
        code = self._process.wait()
        how = "hangs" if not ready else ended_by(code, self._last_words())
        return {"id": wanted["id"], "crashed": how}

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def close(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()


def ended_by(code: int, last_words: str) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}: {last_words}"


def look_at(wanted: Sequence[dict[str, Any]]) -> Iterator[Found]:
    """One answer for each, in order; a new process after each one that died."""
    child = Child()
    try:
        for one in wanted:
            if not child.alive:
                child.close()
                child = Child()
            yield child.ask(one)
    finally:
        child.close()


# ---------------------------------------------------------------------------------------------
# Training


@dataclass(frozen=True)
class Trained:
    id: str
    backend: str
    code: int
    line: str  # what the run says that the network sees, or the refusal


def train(env_id: str, backend: str, flags: Sequence[str] = ()) -> Trained:
    """Two tiny updates of the real trainer."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.py"
        config.write_text("from spmdrl.config import Config\nconfig = Config()\n")
        words = [
            sys.executable, "-m", "spmdrl.train", str(config), "--env.id", env_id,
            "--env.backend", backend, "--env.num-envs", "4", "--algo.num-steps", "16",
            "--algo.epochs", "1", "--total-steps", "128", "--run-dir", f"{folder}/run", *flags,
        ]  # fmt: skip
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=900, check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    return Trained(env_id, backend, done.returncode, telling_line(done))


def telling_line(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else "no words"
    seen = [line for line in done.stdout.splitlines() if " -> " in line]
    return seen[0].strip() if seen else ""


# ---------------------------------------------------------------------------------------------
# The table


def verdict(found: Found) -> str:
    if "crashed" in found:
        return "crash"
    if found["refused"]:
        return "refused"
    return "wrong" if found["wrong"] else "sound"


def sampled(ids: Sequence[str], count: int) -> list[str]:
    """So many ids, spread evenly."""
    if not count or count >= len(ids):
        return list(ids)
    return [ids[round(i * (len(ids) - 1) / max(1, count - 1))] for i in range(count)]


def page(looks: dict[str, Found], trained: Sequence[Trained]) -> str:
    rows = []
    for family in FAMILIES:
        found = [looks[i] for i in family.ids() if i in looks]
        counts = [sum(verdict(f) == kind for f in found) for kind in ("sound", "refused", "wrong")]
        crashed = sum(verdict(f) == "crash" for f in found)
        runs = [t for t in trained if t.id in set(family.ids())]
        rows.append([family.name, *map(str, (len(found), *counts, crashed)), told(runs)])
    total = [str(sum(int(row[i]) for row in rows)) for i in range(1, 6)]
    rows.append(["**all**", *total, ""])
    header = ("family", "ids looked at", "sound", "refused", "wrong", "crash", "two updates")
    return table(header, rows)


def told(runs: Sequence[Trained]) -> str:
    return "<br>".join(f"{'trains' if t.code == 0 else 'no'}: {t.id}: {t.line}" for t in runs)


def reasons(looks: dict[str, Found]) -> str:
    """Every refusal, crash and contradiction, with how many ids it has and one of them."""
    groups: dict[str, list[str]] = {}
    for found in looks.values():
        why = found.get("crashed") or found["refused"] or found["wrong"] or found.get("note")
        if why:
            groups.setdefault(why.replace(found["id"], "ID"), []).append(found["id"])
    rows = [[str(len(ids)), ids[0], why] for why, ids in sorted(groups.items())]
    return table(("ids", "for example", "reason"), rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sample", type=int, default=0, help="ids of each family; 0: all")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--restart", action="store_true", help="look at everything again")
    args = parser.parse_args()
    console = Console()
    store = {} if args.restart or not STORE.exists() else json.loads(STORE.read_text())
    looks: dict[str, Found] = store.get("looks", {})
    for family in FAMILIES:
        fill(family, looks, args.sample, console)
    trained = [] if args.no_training else [Trained(**t) for t in store.get("trained", [])]
    if not args.no_training:
        trained = train_samples(trained, console)
    found = machine() | {"looks": looks, "trained": [vars(t) for t in trained]}
    body = f"{page(looks, trained)}\n\n{reasons(looks)}"
    save("environments", found, f"{made_by(found)}\n\n{body}\n")
    write_into_page(body)


def fill(family: Family, looks: dict[str, Found], sample: int, console: Console) -> None:
    wanted = [i for i in sampled(family.ids(), sample) if i not in looks]
    for found in look_at([{"id": i} for i in wanted]):
        looks[found["id"]] = found
        if verdict(found) != "sound":
            console.print(f"{family.name}: {found['id']}: {verdict(found)}")
        if len(looks) % 20 == 0:
            STORE.write_text(json.dumps({"looks": looks}))


def train_samples(done: list[Trained], console: Console) -> list[Trained]:
    have = {t.id for t in done}
    for family in FAMILIES:
        for env_id in family.samples:
            if env_id not in have:
                done.append(train(env_id, "envpool"))
                console.print(f"{family.name}: {env_id}: exit code {done[-1].code}")
    return done


def write_into_page(body: str) -> None:
    if not PAGE.exists():
        return
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}")


if __name__ == "__main__":
    main()
