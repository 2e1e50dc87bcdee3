"""Power loss: what a disk holds of a run if every write that was not flushed is lost.

A training runs under strace, which records every write, flush and change of a folder. For any
moment of that record the disk is rebuilt by the strictest reading of POSIX: the bytes of a file
survive only if the file was flushed after they were written, a name only if its folder was flushed
after it was made. A real disk may also keep some of the rest, so a second disk keeps a random part
of it. From both the run must resume and end as if nothing had happened, and no checkpoint that was
whole on the disk may be lost.
"""

from __future__ import annotations

import ast
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.children import train_command
from tests.faults.kills import outcome
from tests.faults.result import Bench, Result
from tests.faults.resumes import Case, judged, launch

__all__ = ["Disk", "Event", "read_trace", "trial"]

CASE = Case("power", num_envs=8, updates=16)
CALLS = (
    "open,openat,creat,close,dup,dup2,dup3,write,pwrite64,writev,lseek,ftruncate,truncate,fsync,"
    "fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,link,linkat,symlink,"
    "symlinkat,fallocate"
)
KEPT = re.compile(r"update-(\d{8})$")


# ---------------------------------------------------------------------------------------------
# A disk that forgets


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


@dataclass
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    flushed: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder]] = field(default_factory=list)  # after each change

    def set(self, name: str, node: File | Folder | None) -> None:
        if node is None:
            self.names.pop(name, None)
        else:
            self.names[name] = node
        self.pending.append(dict(self.names))


@dataclass(frozen=True)
class Event:
    """One system call that succeeded."""

    call: str
    paths: tuple[str, ...] = ()
    descriptor: int = -1
    data: bytes = b""
    offset: int = -1  # where it is given
    flags: str = ""


class Disk:
    """The folders below `root`, as running processes see them and as they would survive."""

    def __init__(self, root: Path):
        self._root = str(root)
        self.top = Folder()
        self._open: dict[int, tuple[File | Folder, int, bool]] = {}  # node, position, append

    def apply(self, event: Event) -> None:
        action = getattr(self, f"_{event.call}", None)
        if action is not None:
            action(event)

    # -- names

    def _find(self, path: str) -> tuple[Folder, str] | None:
        """The folder that holds the path, and its name there; None for what is elsewhere."""
        if not path.startswith(f"{self._root}/"):
            return None
        *parents, name = path.removeprefix(f"{self._root}/").split("/")
        folder = self.top
        for part in parents:
            found = folder.names.get(part)
            if not isinstance(found, Folder):
                return None
            folder = found
        return folder, name

    def _node(self, path: str) -> File | Folder | None:
        if path == self._root:
            return self.top
        place = self._find(path)
        return place[0].names.get(place[1]) if place else None

    def _openat(self, event: Event) -> None:
        (path,) = event.paths
        self._open.pop(event.descriptor, None)
        node, place = self._node(path), self._find(path)
        if node is None and place is not None and "O_CREAT" in event.flags:
            node = File()
            place[0].set(place[1], node)
        if node is None:
            return
        if isinstance(node, File) and "O_TRUNC" in event.flags:
            node.data.clear()
        self._open[event.descriptor] = (node, 0, "O_APPEND" in event.flags)

    def _close(self, event: Event) -> None:
        self._open.pop(event.descriptor, None)

    def _mkdir(self, event: Event) -> None:
        if place := self._find(event.paths[0]):
            place[0].set(place[1], Folder())

    def _rename(self, event: Event) -> None:
        old, new = (self._find(path) for path in event.paths)
        node = self._node(event.paths[0])
        if old and new and node is not None:
            new[0].set(new[1], node)
            old[0].set(old[1], None)

    def _unlink(self, event: Event) -> None:
        if place := self._find(event.paths[0]):
            place[0].set(place[1], None)

    # -- bytes

    def _write(self, event: Event) -> None:
        if event.descriptor not in self._open:
            return
        node, position, append = self._open[event.descriptor]
        if not isinstance(node, File):
            return
        at = len(node.data) if append else position
        if event.offset >= 0:
            at = event.offset
        node.data.extend(bytes(max(0, at - len(node.data))))
        node.data[at : at + len(event.data)] = event.data
        if event.offset < 0:
            self._open[event.descriptor] = (node, at + len(event.data), append)

    def _lseek(self, event: Event) -> None:
        if event.descriptor in self._open:
            node, _, append = self._open[event.descriptor]
            self._open[event.descriptor] = (node, event.offset, append)

    def _ftruncate(self, event: Event) -> None:
        node = self._open.get(event.descriptor, (None,))[0]
        if isinstance(node, File):
            del node.data[event.offset :]

    def _fsync(self, event: Event) -> None:
        node = self._open.get(event.descriptor, (None,))[0]
        if isinstance(node, File):
            node.flushed = bytes(node.data)
        elif isinstance(node, Folder):
            node.flushed, node.pending = dict(node.names), []

    # -- what survives

    def survive(self, place: Path, keep: random.Random | None = None) -> None:
        """Write what is left to `place`; with `keep` a random part of the unflushed as well."""
        _survive(self.top, place, keep)


def _survive(folder: Folder, place: Path, keep: random.Random | None) -> None:
    place.mkdir(parents=True, exist_ok=True)
    states = [folder.flushed, *folder.pending]
    names = states[keep.randrange(len(states))] if keep else folder.flushed
    for name, node in names.items():
        if isinstance(node, Folder):
            _survive(node, place / name, keep)
        elif keep and keep.random() < 0.5:
            (place / name).write_bytes(node.data[: keep.randrange(len(node.data) + 1)])
        else:
            (place / name).write_bytes(node.flushed)


# ---------------------------------------------------------------------------------------------
# strace's words

LINE = re.compile(r"^\d+\s+(\w+)\((.*)\)\s+= (-?\d+)(?:<[^>]*>)?")
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
SAME = {
    "open": "openat", "creat": "openat", "pwrite64": "write", "writev": "write",
    "fdatasync": "fsync", "renameat": "rename", "renameat2": "rename", "unlinkat": "unlink",
    "rmdir": "unlink", "mkdirat": "mkdir",
}  # fmt: skip

NAMED = ("openat", "rename", "mkdir", "unlink")


def read_trace(file: Path, folder: Path) -> Iterator[Event]:
    """The calls that changed something, in the order in which they returned."""
    unfinished: dict[str, str] = {}
    opened: dict[int, str] = {}  # paths by descriptor: a folder is emptied by names within it
    for line in file.read_text().splitlines():
        pid = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            unfinished[pid] = line.removesuffix("<unfinished ...>").rstrip()
            continue
        if resumed := re.match(r"^\d+\s+<\.\.\. \w+ resumed>(.*)$", line):
            line = unfinished.pop(pid, "") + resumed[1]
        if found := LINE.match(line):
            for event in _event(found[1], found[2], int(found[3]), folder, opened):
                if event.call == "openat":
                    opened[event.descriptor] = event.paths[0]
                yield event


def _event(
    call: str, words: str, answer: int, folder: Path, opened: dict[int, str]
) -> Iterator[Event]:
    if answer < 0:
        return
    strings = tuple(_decoded(text) for text in STRING.findall(words))
    first = re.match(r"-?\d+", words)
    descriptor = int(first[0]) if first else -1
    last = words.rpartition(",")[2].strip()
    offset = int(last) if last.isdigit() else -1
    kind = SAME.get(call, call)
    base = Path(opened.get(descriptor, folder)) if call.endswith("at") else folder
    paths = tuple(_absolute(text.decode(), base) for text in strings) if kind in NAMED else ()
    if kind == "openat":
        yield Event(kind, paths[:1], answer, flags=words)
    elif kind == "write":
        data = b"".join(strings)[:answer]
        yield Event(kind, (), descriptor, data, offset if call == "pwrite64" else -1)
    elif kind == "lseek":
        yield Event(kind, (), descriptor, offset=answer)
    elif kind == "ftruncate":
        yield Event(kind, (), descriptor, offset=offset)
    elif kind in ("rename", "mkdir", "unlink"):
        yield Event(kind, paths)
    elif kind in ("fsync", "close"):
        yield Event(kind, (), descriptor)


def _decoded(text: str) -> bytes:
    return bytes(ast.literal_eval(f'b"{text}"'))


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(path if path.startswith("/") else str(folder / path))


# ---------------------------------------------------------------------------------------------
# Trials


def record(bench: Bench) -> tuple[Path, list[Event]]:
    """The folder in which an undisturbed run was recorded, and its events; made once."""
    place = bench.folder / "power"
    trace, run = place / "trace", place / "disk" / "run"
    if not (run / "summary.json").exists():
        shutil.rmtree(place, ignore_errors=True)
        (place / "disk").mkdir(parents=True)
        strace = ["strace", "-f", "-xx", "-s", "100000000", "-e", f"trace={CALLS}", "-o", trace]
        words = [
            "--env.num-envs", CASE.num_envs, "--algo.num-steps", CASE.num_steps,
            "--total-steps", CASE.steps, "--checkpoint.every", 3, "--log.panel", "off",
            "--log.tensorboard", "--run-dir", run,
        ]  # fmt: skip
        subprocess.run(
            [*map(str, strace), *train_command(*words)], env=bench.environment(place), check=True,
            stdout=subprocess.DEVNULL, timeout=600,
        )  # fmt: skip
    events = list(read_trace(trace, place))
    disk = f"{place}/disk"
    mine = _of_disk(events, disk)
    if not mine:
        raise RuntimeError("strace has recorded nothing of the run")
    return place / "disk", mine


def _of_disk(events: list[Event], root: str) -> list[Event]:
    """Without what belongs to other files: descriptors are followed from their opening."""
    ours, kept = set[int](), []
    for event in events:
        if event.paths:
            inside = any(f"{path}/".startswith(f"{root}/") for path in event.paths)
            if event.call == "openat":
                ours = ours | {event.descriptor} if inside else ours - {event.descriptor}
            kept += [event] if inside else []
        elif event.descriptor in ours:
            kept.append(event)
    return kept


def trial(number: int, rng: random.Random, bench: Bench) -> Result:
    root, events = record(bench)
    began, moment = time.time(), rng.randrange(len(events) + 1)
    strict = number % 2 == 0
    disk = Disk(root)
    for event in events[:moment]:
        disk.apply(event)
    folder = bench.folder / "trial"
    shutil.rmtree(folder, ignore_errors=True)
    disk.survive(folder, None if strict else rng)
    (folder / "run").mkdir(exist_ok=True)
    durable = promised(disk)
    job = launch(CASE, ("--log.tensorboard",), folder, bench)
    output, _ = job.communicate(timeout=600)
    why = judged(job.returncode, folder / "run", outcome(root / "run"))
    why = "" if why == "a checkpoint was damaged" and not strict else why
    resumed = re.search(r"resumed at update (\d+)", output)
    at = int(resumed[1]) if resumed else 0
    if not why and at < durable:
        why = f"resumed at update {at}, though {durable} was on the disk"
    if why:
        print(output[-3000:], flush=True)
    what = f"after call {moment} of {len(events)}, {'all' if strict else 'a part'} lost"
    said = f"resumed at update {at}"
    return Result("power loss", number, what, not why, said, why, time.time() - began)


def promised(disk: Disk) -> int:
    """The newest checkpoint that the run took for safe: renamed, and its folder flushed."""
    node: File | Folder | None = disk.top
    for name in ("run", "checkpoints"):
        node = node.names.get(name) if isinstance(node, Folder) else None
    names = node.flushed if isinstance(node, Folder) else {}
    found = [KEPT.match(name) for name in names]
    return max((int(match[1]) for match in found if match), default=0)
