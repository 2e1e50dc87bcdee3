"""Every combination of some values, with several seeds: `python -m spmdrl.sweep CONFIG.py`.

    python -m spmdrl.sweep configs/cartpole.py --grid optim.lr 1e-3,3e-4 --seeds 5 --parallel 2

Each run has a folder of its own. The same command again leaves out what is finished and resumes
what is not; more seeds or more values add to it.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from spmdrl.cli import answer_errors
from spmdrl.config import EXIT_FAULT, EXIT_STOPPED, Config, ConfigError, load
from spmdrl.curves.groups import Group, Run, group_runs, read_runs, run_folders, varied_fields
from spmdrl.curves.panels import RETURN, Style, elapsed, final, final_values, make_panels, panels_of
from spmdrl.curves.picture import write_picture
from spmdrl.curves.report_page import write_report
from spmdrl.curves.words import told
from spmdrl.envs.ids import check_id
from spmdrl.options import ConfigFile, check_positive, parse_with_config
from spmdrl.parallel.topology import cores, detect
from spmdrl.runtime.files import METRICS, read_json, replace_text
from spmdrl.runtime.hints import suggested
from spmdrl.runtime.rundir import check_run_dir
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.trial_runs import last_words
from spmdrl.runtime.validate import check_extras, validate
from spmdrl.sweeps.plan import Point, make_points, read_axes
from spmdrl.sweeps.workers import Job, run_jobs

__all__ = ["main"]

TABLE, PICTURE, PAGE, LOGS = "results.csv", "curves.png", "report.html", "logs"


@dataclass(frozen=True)
class Options:
    """Train every combination of some values of some fields, each with several seeds.

    Writes results.csv (a row for each run), curves.png (a line with a band for each combination)
    and report.html. The same command again resumes what is not finished; more seeds or values add
    to it. All other flags after CONFIG.py are fields of the config: see the --help of
    `spmdrl.train`.
    """

    config: ConfigFile
    """Config file, as for `spmdrl.train`."""
    grid: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, str], ...]],
        tyro.conf.arg(metavar="FIELD VALUE,VALUE,..."),
    ] = ()
    """A field and its values, for example optim.lr 1e-3,3e-4; can be given again for another."""
    seeds: int = 1
    """Runs of each combination; their seeds count up from the config's."""
    parallel: int = 1
    """Runs at the same time, which share the cores."""
    nprocs_each: int = 1
    """Ranks of each run."""
    out: str | None = None
    """Folder for the runs and the results; by default runs/sweep-NAME of the config file."""


# ---------------------------------------------------------------------------------------------
# Before anything is trained


@dataclass(frozen=True)
class Planned:
    point: Point
    config: Config
    folder: Path
    words: tuple[str, ...]

    @property
    def finished(self) -> bool:
        """With as many updates as are asked for now."""
        summary = read_json(self.folder / "summary.json")
        reached = summary.get("reached")  # --until-return, which a later call may have raised
        if isinstance(reached, dict):
            return reached.get("until_return") == self.config.until_return
        return summary.get("updates") == self.config.num_updates


def planned_runs(options: Options, flags: Sequence[str]) -> list[Planned]:
    """Every run of the sweep; raise ConfigError if one of them cannot work."""
    base = load([options.config, *flags])
    axes = read_axes(options.grid)
    points = make_points(axes, range(base.seed, base.seed + options.seeds))
    out = Path(options.out or f"runs/sweep-{base.name}")
    return [checked(point, options, flags, out) for point in points]


def checked(point: Point, options: Options, flags: Sequence[str], out: Path) -> Planned:
    folder = out / point.name
    words = (
        *(options.config, *flags, *point.flags),
        *("--nprocs", str(options.nprocs_each), "--run-dir", str(folder), "--log.panel", "off"),
    )
    try:
        config = load(words)
        validate(config, options.nprocs_each, max(1, config.devices))
        check_id(config.env)
        check_extras(config)
        check_run_dir(config)
    except ConfigError as error:
        raise ConfigError(f"{point.name}: {error}") from error
    return Planned(point, config, folder, words)


def job_of(run: Planned, share: int) -> Job:
    """Its process; several ranks without a core each have to be told how many there are."""
    threads: tuple[str, ...] = ()
    if run.config.nprocs != 1 and run.config.env.threads == 0:
        threads = ("--env.threads", str(max(1, share // int(run.config.nprocs))))
    command = (sys.executable, "-m", "spmdrl.train", *run.words, *threads)
    return Job(run.point.name, command, run.folder.parent / LOGS / f"{run.point.name}.txt")


# ---------------------------------------------------------------------------------------------
# Afterwards


def readable_runs(folder: Path) -> list[Run]:
    """The runs that have logged something."""
    found = [f for f in run_folders(folder) if (f / METRICS).is_file()]
    return read_runs([f for f in found if (f / METRICS).stat().st_size])


def table(runs: Sequence[Run], fields: Sequence[str]) -> str:
    """results.csv: what was varied, then how it went."""
    names = list(dict.fromkeys([*fields, *varied_fields(runs)]))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *names, "seed", "state", "steps", "return", "seconds", "params_sha256"])
    for run in runs:
        status, summary = (read_json(run.path / f"{n}.json") for n in ("status", "summary"))
        ends: list[Any] = list(final_values(Group("", (run,)), RETURN)) or [""]
        values = [run.settings.get(name) for name in names]
        writer.writerow(
            [run.path.name, *values, run.config.seed, status.get("state", ""), run.steps, ends[0],
             round(float(elapsed(run)[-1]), 3), summary.get("params_sha256", "")]
        )  # fmt: skip
    return text.getvalue()


def write_results(folder: Path, fields: Sequence[str]) -> list[Group]:
    """Table, picture and page of all runs in the folder; the groups, best first."""
    runs = readable_runs(folder)
    if not runs:
        return []
    replace_text(folder / TABLE, table(runs, fields))
    groups = sorted(group_runs(runs), key=lambda group: -_score(group))
    panels = make_panels(groups, panels_of(*(run.config for run in runs)), Style())
    write_picture(panels, Style(), str(folder / PICTURE))
    write_report([str(run.path) for run in runs], str(folder / PAGE))
    return groups


def _score(group: Group) -> float:
    end = final(group, RETURN)
    return float("-inf") if end is None else end.center


class Progress:
    """A line for each run that ends."""

    def __init__(self, total: int, done: int):
        self._total, self._done = total, done
        self.failed: list[str] = []

    def tell(self, job: Job, code: int, seconds: float) -> None:
        self._done += 1
        how = {0: "finished", EXIT_STOPPED: "stopped"}.get(code, f"failed, exit code {code}")
        if code not in (0, EXIT_STOPPED):
            self.failed.append(job.name)
            how += f": {last_words(job.log.read_text(errors='replace'))} ({job.log})"
        print(f"[{self._done}/{self._total}] {job.name}: {how}, {seconds:.0f} s", flush=True)


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    options, flags = parse_with_config(Options, "sweep", argv)
    check_positive(options, "seeds", "parallel", "nprocs_each")
    if detect().size > 1:
        raise ConfigError("a sweep starts its runs itself; start it once, without mpirun or srun")
    runs = planned_runs(options, flags)
    folder, left = runs[0].folder.parent, [run for run in runs if not run.finished]
    print(
        f"{len(runs)} runs in {folder}, {len(runs) - len(left)} finished already; "
        f"{options.parallel} at a time",
        flush=True,
    )
    stop, progress = StopRequest().listen(), Progress(len(runs), len(runs) - len(left))
    share = max(1, cores() // options.parallel)
    whole = run_jobs([job_of(run, share) for run in left], options.parallel, stop, progress.tell)
    groups = write_results(folder, [axis.field for axis in read_axes(options.grid)])
    for line in told(groups, RETURN) if groups else ():
        print(line)
    print(f"written to {folder}: {TABLE}, {PICTURE}, {PAGE}" if groups else "no results yet")
    if not whole:
        again = list(sys.argv[1:] if argv is None else argv)
        print(f"stopped; to resume: {suggested('sweep', *again)}")
        return EXIT_STOPPED
    return EXIT_FAULT if progress.failed else 0


if __name__ == "__main__":
    sys.exit(main())
