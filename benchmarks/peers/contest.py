"""Cases, trainers that do the same work, and the rounds in which they take turns."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.lib.common import in_turns, near_fastest, progress
from benchmarks.lib.trainer import Task, Trainer
from benchmarks.lib.venvs import NotBuilt
from benchmarks.peers.references.work import Work
from benchmarks.peers.rivals import PEERS, RunFailed

__all__ = ["CASES", "US", "Case", "Contest", "Entry", "Found", "Runs", "choose"]

US = "spmdrl"
OWN_SETTINGS: dict[str, tuple[int, tuple[str, ...]]] = {
    "1 rank": (1, ()),
    "2 ranks": (2, ()),
    "2 devices": (1, ("--devices", "2")),
}


@dataclass(frozen=True)
class Entry:
    """A trainer's part in a case: few updates for a slow one, and what is hoped for."""

    name: str
    updates: int
    skip: int
    goal: float | None = None  # times as fast as this, at least


@dataclass(frozen=True)
class Case:
    """The work, by one of spmdrl's configs, and who does it."""

    name: str
    config: str
    work: Work
    entries: tuple[Entry, ...]  # spmdrl first

    def work_of(self, entry: Entry) -> Work:
        return replace(self.work, updates=entry.updates, skip=entry.skip)


CARTPOLE = Work()
CASES = [
    Case("CartPole 8", "cartpole", CARTPOLE, (
        Entry(US, 200, 3),
        Entry("SB3", 50, 2, goal=8),
        Entry("SBX", 50, 3, goal=7),
        Entry("RLlib", 25, 2, goal=15),
        Entry("Sample Factory", 25, 5),
    )),
    Case("CartPole 64", "cartpole", replace(CARTPOLE, envs=64), (
        Entry(US, 120, 3),
        Entry("SB3", 8, 1, goal=12),
        Entry("gymnax reference", 100, 3, goal=1),
    )),
    Case("CartPole 1024", "cartpole", replace(CARTPOLE, envs=1024), (
        Entry(US, 10, 2),
        Entry("SB3", 1, 1, goal=12),
        Entry("gymnax reference", 8, 2, goal=1),
    )),
    Case("CartPole in JAX 8", "cartpole_jax", CARTPOLE, (
        Entry(US, 200, 3),
        Entry("gymnax reference", 200, 3, goal=1.0),
    )),
    Case("CartPole in JAX 64", "cartpole_jax", replace(CARTPOLE, envs=64), (
        Entry(US, 100, 3),
        Entry("gymnax reference", 100, 3, goal=1.5),
    )),
    Case("CartPole in JAX 1024", "cartpole_jax", replace(CARTPOLE, envs=1024), (
        Entry(US, 8, 2),
        Entry("gymnax reference", 8, 2, goal=2.0),
    )),
    Case("Pong 8", "pong", replace(CARTPOLE, env="Pong-v5", clip=0.1), (
        Entry(US, 3, 1),
        Entry("torch reference", 3, 1, goal=1.3),
        Entry("torch, channels last", 3, 1),
    )),
    Case("HalfCheetah 8", "halfcheetah", replace(
        CARTPOLE, env="HalfCheetah-v4", steps=2048, epochs=10, minibatches=32, lr=3e-4, entropy=0.0
    ), (
        Entry(US, 4, 1),
        Entry("SBX", 3, 1, goal=4),
    )),
]  # fmt: skip


def choose(
    cases: Sequence[str], peers: Sequence[str], updates: int, known: Sequence[Case] = CASES
) -> list[Case]:
    """The named cases with the named peers and spmdrl, with at most so many updates (0: all)."""
    chosen = []
    for case in known:
        entries = [
            replace(e, updates=min(e.updates, updates or e.updates))
            for e in case.entries if e.name == US or e.name in peers
        ]  # fmt: skip
        if case.name in cases and len(entries) > 1:
            chosen.append(replace(case, entries=tuple(entries)))
    return chosen


# ---------------------------------------------------------------------------------------------
# Measuring


@dataclass
class Found:
    """What came out for one entry of one case."""

    trial: dict[str, float] = field(default_factory=dict)  # steps/s of each setting beforehand
    refused: dict[str, str] = field(default_factory=dict)  # settings that did not run, and why
    rates: list[float] = field(default_factory=list)  # of the fastest setting, one a round
    failure: str = ""  # why there is no ratio

    @property
    def setting(self) -> str:
        return max(self.trial, key=lambda name: self.trial[name])


Rate = Callable[[Case, Entry, str], float]
TRIALS = 3  # of settings that are near the fastest: a single run would choose by chance


class Contest:
    """All cases, and what came out; `rate` gives the steps/s of an entry with a setting."""

    def __init__(self, cases: Sequence[Case], rate: Rate):
        self.rate = rate
        self.pairs = [(case, entry) for case in cases for entry in case.entries]
        self.found = {(case.name, entry.name): Found() for case, entry in self.pairs}
        self.loads: list[float] = []

    def build(self) -> None:
        """The environments of all peers; one that cannot be built is out."""
        names = list(dict.fromkeys(entry.name for _, entry in self.pairs if entry.name != US))
        for name in progress(names, "installing"):
            try:
                PEERS[name].venv.build()
            except NotBuilt as error:
                self._drop(name, f"cannot be installed: {error}")

    def _drop(self, name: str, reason: str) -> None:
        for case, entry in self.pairs:
            if entry.name == name:
                self.found[case.name, name].failure = reason

    def try_settings(self) -> None:
        """Rounds that do not count: which setting is the fastest."""
        for case, entry in progress(self.pairs, "settings"):
            found = self.found[case.name, entry.name]
            if found.failure:
                continue
            found.trial = self._try(case, entry, found.refused)
            if not found.trial:
                found.failure = next(iter(found.refused.values()))

    def _try(self, case: Case, entry: Entry, refused: dict[str, str]) -> dict[str, float]:
        """The median of each setting's runs."""
        tried: dict[str, list[float]] = {}
        settings = list(settings_of(entry))
        for _ in range(TRIALS):
            for setting in settings:
                try:
                    tried.setdefault(setting, []).append(self.rate(case, entry, setting))
                except RunFailed as error:
                    refused[setting] = str(error)
            medians = {s: statistics.median(rates) for s, rates in tried.items() if rates}
            settings = near_fastest(medians)
            if len(settings) < 2:
                break
        return medians

    def measure(self, repeats: int) -> None:
        for case, entry in progress(in_turns(self.pairs, repeats), "peers"):
            found = self.found[case.name, entry.name]
            if (case, entry) == self.pairs[0]:
                self.loads.append(os.getloadavg()[0])
            if found.failure:
                continue
            try:
                found.rates.append(self.rate(case, entry, found.setting))
            except RunFailed as error:
                found.failure = f"failed in round {len(found.rates) + 1}: {error}"


class Runs:
    """Real runs, on the first two cores."""

    def __init__(self) -> None:
        self.trainer = Trainer()

    def rate(self, case: Case, entry: Entry, setting: str) -> float:
        if entry.name == US:
            return self._own_rate(case, entry, setting)
        return PEERS[entry.name].run(case.work_of(entry), setting, self.trainer.cores)

    def _own_rate(self, case: Case, entry: Entry, setting: str) -> float:
        ranks, flags = OWN_SETTINGS[setting]
        work = case.work_of(entry)
        task = Task(case.name, case.config, work.envs // ranks, work.steps, work.updates, work.skip)
        try:
            return self.trainer.freely(task.with_flags(*flags), ranks).sps
        except RuntimeError as error:
            raise RunFailed(str(error).splitlines()[-1]) from error


def settings_of(entry: Entry) -> list[str]:
    known = OWN_SETTINGS if entry.name == US else PEERS[entry.name].settings
    return list(known)
