"""Make and step every environment, train two updates on some of each family, and write the table.

    python -m benchmarks.environments              # every id of envpool: about an hour
    python -m benchmarks.environments --sample 2   # two ids of each family: half an hour

Ids are made and stepped in a child process, which may crash or hang: then a new one continues with
the next id. The compiled step is compared with the plain one, bit for bit. The command can be
stopped and started again; ids that were looked at stay so. Some ids of Gymnasium and of each JAX
library are looked at and trained on as well; one that is not installed has that in its row. Writes
results/environments.json and .md, and the tables of docs/environments.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lib.common import RESULTS, ROOT, arguments, machine, made_by, save, table
from spmdrl.envs.child import ANSWER_S, Child
from spmdrl.envs.families import FAMILIES, Family

__all__ = ["OTHERS", "look_at", "others_page", "page", "sampled", "verdict"]

STORE = RESULTS / "environments.json"
PAGE = ROOT / "docs" / "environments.md"
LONGEST_S = 900.0  # of two updates; some JAX libraries compile for minutes

SEEN = "networks see "  # in the log of a run

Found = dict[str, Any]  # a Checkup, or {"id", "crashed"}

# Of what is not in envpool: library, backend, ids.
OTHERS = (
    ("Gymnasium", "gymnasium", ("CartPole-v1", "FrozenLake-v1", "HalfCheetah-v5")),
    ("gymnax", "jax", ("gymnax:CartPole-v1", "gymnax:Breakout-MinAtar")),
    ("brax", "jax", ("brax:inverted_pendulum", "brax:ant")),
    ("playground", "jax", ("playground:CartpoleBalance",)),
    ("craftax", "jax", ("craftax:Craftax-Classic-Symbolic-v1", "craftax:Craftax-Symbolic-v1")),
    ("jumanji", "jax", ("jumanji:Game2048-v1", "jumanji:Snake-v1")),
    ("navix", "jax", ("navix:Navix-Empty-8x8-v0",)),
    ("xminigrid", "jax", ("xminigrid:MiniGrid-Empty-8x8",)),
)


def look_at(wanted: Sequence[dict[str, Any]]) -> Iterator[Found]:
    """One answer for each, in order; a new process after each one that died."""
    child = Child("spmdrl.envs.checkup")
    try:
        for one in wanted:
            if not child.alive:
                child.close()
                child = Child("spmdrl.envs.checkup")
            said = child.ask(one, LONGEST_S if "backend" in one else ANSWER_S)
            yield {"id": one["id"]} | as_crash(said)
    finally:
        child.close()


def as_crash(said: Found) -> Found:
    """An environment that raises is as bad as one that dies."""
    return {"crashed": said["fault"]} if "fault" in said else said


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
        try:
            done = subprocess.run(
                words, cwd=folder, capture_output=True, text=True, timeout=LONGEST_S, check=False,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Trained(env_id, backend, -1, f"no two updates in {LONGEST_S:.0f} s")
    return Trained(env_id, backend, done.returncode, telling_line(done))


def telling_line(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else "no words"
    seen = [line for line in done.stdout.splitlines() if SEEN in line]
    return seen[0].partition(SEEN)[2].strip() if seen else ""


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
        runs = [t for t in trained if t.backend == "envpool" and t.id in set(family.ids())]
        numbers = (len(found), *counts, crashed)
        rows.append([family.name, *map(str, numbers), told(runs, looks)])
    total = [str(sum(int(row[i]) for row in rows)) for i in range(1, 6)]
    rows.append(["**all**", *total, ""])
    header = ("family", "ids looked at", "sound", "refused", "wrong", "crash", "two updates")
    return table(header, rows)


def told(runs: Sequence[Trained], looks: dict[str, Found]) -> str:
    return "<br>".join(f"{t.id}: {'<br>'.join(outcome(t, looks.get(t.id, {})))}" for t in runs)


def outcome(run: Trained, look: Found) -> tuple[str, ...]:
    """Whether two updates were made; then what networks see and what is chosen, or why not."""
    if run.code:
        return (f"no: {run.line.removeprefix('spmdrl: ')}",)
    kind = look.get("action")
    return ("trains", run.line, *([f"action: {kind}"] if kind else []))


def others_page(looks: dict[str, Found], trained: Sequence[Trained]) -> str:
    """A row for each id that is not envpool's; `looks` by backend and id."""
    runs = {(t.backend, t.id): t for t in trained}
    rows = []
    for library, backend, ids in OTHERS:
        for env_id in ids:
            look, run = looks.get(f"{backend} {env_id}", {}), runs.get((backend, env_id))
            words = outcome(run, look) if run else ("not tried",)
            cells = [words[0], look.get("observation", ""), look.get("action", "")]
            rows.append([library, f"`{env_id}`", *cells, words[1] if len(words) > 1 else ""])
    header = ("library", "id", "two updates", "observation", "action", "networks see")
    return table(header, rows)


def reasons(looks: dict[str, Found]) -> str:
    """Every refusal, crash and contradiction, with how many ids it has and one of them."""
    groups: dict[str, list[str]] = {}
    for found in looks.values():
        why = found.get("crashed") or found["refused"] or found["wrong"] or found.get("note")
        if why:
            groups.setdefault(portable(why.replace(found["id"], "ID")), []).append(found["id"])
    rows = [[str(len(ids)), ids[0], why] for why, ids in sorted(groups.items())]
    return table(("ids", "for example", "reason"), rows)


def portable(text: str) -> str:
    """Without the folders of this machine, and fit for a table."""
    return text.replace(sys.prefix, "...").replace(" | ", ", ")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sample", type=int, default=0, help="ids of each family; 0: all")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--restart", action="store_true", help="look at everything again")
    args = parser.parse_args()
    console = Console()
    store = {} if args.restart or not STORE.exists() else json.loads(STORE.read_text())
    for family in FAMILIES:
        fill(family, store, args.sample, console)
    trained = [Trained(**t) for t in store.get("trained", [])]
    if not args.no_training:
        look_at_others(store, console)
        train_samples(trained, store, console)
    looks, others = store["looks"], store.get("others", {})
    found = machine() | {"looks": looks, "others": others, "trained": [vars(t) for t in trained]}
    families = f"{page(looks, trained)}\n\n{reasons(looks)}"
    libraries = others_page(others, trained)
    found = json.loads(json.dumps(found).replace(sys.prefix, "..."))
    save("environments", found, f"{made_by(found)}\n\n{families}\n\n{libraries}\n")
    write_into_page("families", families)
    write_into_page("libraries", libraries)


def fill(family: Family, store: dict[str, Any], sample: int, console: Console) -> None:
    looks: dict[str, Found] = store.setdefault("looks", {})
    wanted = [i for i in sampled(family.ids(), sample) if i not in looks]
    for found in look_at([{"id": i} for i in wanted]):
        looks[found["id"]] = found
        if verdict(found) != "sound":
            console.print(f"{family.name}: {found['id']}: {verdict(found)}")
        if len(looks) % 20 == 0:
            keep(store)


def look_at_others(store: dict[str, Any], console: Console) -> None:
    looks: dict[str, Found] = store.setdefault("others", {})
    for _, backend, ids in OTHERS:
        wanted = [{"id": i, "backend": backend} for i in ids if f"{backend} {i}" not in looks]
        for found in look_at(wanted):
            looks[f"{backend} {found['id']}"] = found
            console.print(f"{backend} {found['id']}: {verdict(found)}")
        keep(store)


def train_samples(done: list[Trained], store: dict[str, Any], console: Console) -> None:
    have = {(t.backend, t.id) for t in done}
    pool = [("envpool", env_id) for family in FAMILIES for env_id in family.samples]
    others = [(backend, env_id) for _, backend, ids in OTHERS for env_id in ids]
    for backend, env_id in [*pool, *others]:
        if (backend, env_id) not in have:
            done.append(train(env_id, backend))
            console.print(f"{backend} {env_id}: exit code {done[-1].code}")
            store["trained"] = [vars(t) for t in done]
            keep(store)


def keep(store: dict[str, Any]) -> None:
    STORE.write_text(json.dumps(store))


def write_into_page(name: str, body: str) -> None:
    """Between the marks of that name, as far as the page has them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = PAGE.read_text()
    head, found, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    if found:
        PAGE.write_text(f"{head}{begin}\n\n{body}\n\n{end}{tail}")


if __name__ == "__main__":
    main()
