"""Whether the output of a broken job says what broke: the rank, the phase and the update.

Every run prints lines with "rank 0" and "rank 1" in them, and the launcher adds its own, so looking
for a rank somewhere in the output proves nothing. Here each kind of fault has one expression for
the one report that it must lead to. It starts at the start of a line, names the guilty rank and
leaves no room for another; phase and update must be those in which the fault happened, and there
must be no second report. tests/test_fault_judge.py shows that healthy runs and wrong reports fail.

How exactly the update is known depends on the kind:

- exception, not finite, flipped bit: exactly the update in which the fault was made.
- hang in the environment, death in the environment: exactly too.
- SIGKILL and SIGSTOP from outside at a random moment: what is known from outside is how many
  updates rank 0 had reported just before the signal, and had at the end. Ranks are one update apart
  at most.

Two ranks whose parameters differ: there is no majority, so nothing can tell which of them is wrong.
Then both must be named; to name one would be a guess. With more ranks only the odd one is named.
Where the ranks agree on a verdict (not finite, flipped bit) the guilty rank makes the report, or
with two different ones either of them: "rank 0 failed" above "on rank 1" would name an innocent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["KINDS", "PHASES", "Fault", "Verdict", "judge"]

PHASES = ("config", "start", "collect", "wait", "update", "check", "save")
KINDS = (
    "death", "exception", "hang", "not finite", "flipped bit", "different config", "different jax",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What was done to which rank, and so what the report must say."""

    kind: str
    ranks: int
    rank: int
    phases: tuple[str, ...] = PHASES  # one of these must be named
    updates: tuple[int, int] = (0, 0)  # the first and the last that may be named
    says: str = ""  # an expression: the error, the numbers that are not finite, what differs
    before_heartbeat: bool = False  # the rank was killed in its first moments


@dataclass(frozen=True)
class Verdict:
    """The report that was found (all of its lines that matter), or what is wrong with it."""

    line: str
    why: str

    @property
    def good(self) -> bool:
        return not self.why


REPORT = "spmdrl: "
START = r"^\0?spmdrl: "  # Open MPI leaves the end of its own text's last line to what comes next
# What may be printed besides the report.
NOTICES = re.compile(rf"{START}(waiting for |received SIGTERM in phase start)")
WHERE = r"update (?P<update>\d+), phase (?P<phase>\w+)"


def expression(fault: Fault) -> re.Pattern[str]:
    """The one report that this fault must lead to."""
    return re.compile(_EXPRESSIONS[fault.kind](fault), re.MULTILINE)


def _death(fault: Fault) -> str:
    return (
        rf"{START}rank {fault.rank} of {fault.ranks} on \S+ \(pid \d+\) died "
        rf"\([^)]*\) in {WHERE}; (?!.*\brank\b).*$"
    )


def _death_seen_by_launcher(fault: Fault) -> str:
    return rf"^prterun noticed that process rank {fault.rank} with PID \d+ on node \S+ exited on$"


def _failed(by: str, ranks: int, error: str) -> str:
    """A header, the frames of the traceback, and the error itself."""
    return rf"{START}rank {by} of {ranks} on \S+ failed in {WHERE}:\n(?:.*\n)*?(?:{error})$"


def _exception(fault: Fault) -> str:
    return _failed(str(fault.rank), fault.ranks, fault.says)


def _hang(fault: Fault) -> str:
    """Rank A waits; rank B, in a sentence of its own, is the one that it waits for."""
    return (
        rf"{START}rank \d+ of {fault.ranks} on \S+ has been in update \d+, phase \w+ for \d+ s, "
        rf"longer than its limit of \d+ s\. Rank {fault.rank} (?:has been silent for \d+ s, since|"
        r"is furthest behind:) (?P<phase>\w+) of update (?P<update>\d+)\.(?!.*\b[Rr]ank\b).*$"
    )


def _not_finite(fault: Fault) -> str:
    error = (
        rf"[\w.]+: non-finite (?:{fault.says}) on rank {fault.rank} in update (?P=update)\b"
        r"(?!.*\brank \d).*"
    )
    return _failed(str(fault.rank), fault.ranks, error)


def _flipped_bit(fault: Fault) -> str:
    named = [fault.rank] if fault.ranks > 2 else [0, 1]
    who = ", ".join(f"rank {rank} device 0" for rank in named)
    error = rf"[\w.]+: parameters or optimiser state differ on {who};(?!.*\brank \d).*"
    return _failed(f"(?:{'|'.join(map(str, named))})", fault.ranks, error)


def _handshake(fault: Fault) -> str:
    """Rank 0 is what the others are compared with."""
    return (
        rf"{START}rank {fault.rank} on \S+ and rank 0 on \S+ have different {fault.says} "
        r"\(phase (?P<phase>start)\): (?!.*\brank \d).*$"
    )


_EXPRESSIONS = {
    "death": _death,
    "exception": _exception,
    "hang": _hang,
    "not finite": _not_finite,
    "flipped bit": _flipped_bit,
    "different config": _handshake,
    "different jax": _handshake,
}
_TRACEBACKS = {"exception": 1, "not finite": 1, "flipped bit": 1}  # of the others: none


def judge(fault: Fault, output: str) -> Verdict:
    """Whether the output holds the right report, and no other."""
    found = list(expression(fault).finditer(output))
    if not found and fault.before_heartbeat:
        return _judge_launcher(fault, output)
    if not found:
        return Verdict("", f"no line matches {expression(fault).pattern}")
    line = _shown(found[0])
    complaints = [*(_misplaced(fault, report) for report in found), _others(fault, found, output)]
    return Verdict(line, "; ".join(filter(None, complaints)))


def _judge_launcher(fault: Fault, output: str) -> Verdict:
    """Without a heartbeat only the launcher can tell who it was."""
    found = re.search(_death_seen_by_launcher(fault), output, re.MULTILINE)
    if not found:
        return Verdict("", "killed before its first heartbeat, and the launcher does not name it")
    return Verdict(found.group(), _others(fault, [], output))


def _misplaced(fault: Fault, report: re.Match[str]) -> str:
    where, (first, last) = report.groupdict(), fault.updates
    if where["phase"] not in fault.phases:
        return f"phase {where['phase']} is named instead of {' or '.join(fault.phases)}"
    if "update" in where and not first <= int(where["update"]) <= last:
        return f"update {where['update']} is named instead of {first} to {last}"
    return ""


def _others(fault: Fault, found: list[re.Match[str]], output: str) -> str:
    """A second report, wherever it starts: only the ranks that wait for a hanging one may agree."""
    count = sum(line.count(REPORT) for line in output.splitlines() if not NOTICES.match(line))
    if count != len(found) or (count > 1 and fault.kind != "hang"):
        return f"{count} reports instead of 1, {len(found)} of them right"
    tracebacks = len(re.findall(r"^Traceback \(most recent call last\):", output, re.MULTILINE))
    expected = _TRACEBACKS.get(fault.kind, 0)
    if tracebacks != expected:
        return f"{tracebacks} tracebacks instead of {expected}"
    return ""


def _shown(report: re.Match[str]) -> str:
    """Its first line, and its last where that is another."""
    lines = report.group().strip("\0").splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
