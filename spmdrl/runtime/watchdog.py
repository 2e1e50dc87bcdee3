"""Loud, immediate ends instead of hangs: a watchdog, and one traceback."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmdrl.config import EXIT_FAULT, parse_json
from spmdrl.envs.errors import EnvError
from spmdrl.parallel.own_folder import read_own, write_own
from spmdrl.parallel.place import PlaceFile, has_left, read_place, siblings

__all__ = ["Watchdog", "is_running", "report_fault"]

LISTENING_S = 2.0  # four heartbeats


BEAT = {"update": int, "phase": str, "host": str, "pid": int}  # and the time, for people
TOLD = "hang-reported"  # files beside the heartbeats, one for each host


class Watchdog:
    """Ends the process when the training loop stays in one phase for too long.

    The loop only writes down its phase; a thread watches the clock and keeps a heartbeat file for
    every rank, by which the one that others wait for, or that was killed, can be named.
    """

    INTERVAL = 0.5  # seconds between two heartbeats

    def __init__(self, rank: int, size: int, folder: Path | None):
        self._rank, self._size = rank, size
        self.role = ""  # learner or actor, where ranks do not do both
        self.waits_for: Callable[[], str] = str  # whom this rank waits for, or nothing, as `str()`
        self._folder, self._earlier = folder, folder  # the second is the job's, on this host
        self._place = PlaceFile(folder, rank)
        self._siblings: dict[int, int] = {}  # rank: pid, of those that are starting on this host
        self._phase, self._update, self._limit = "start", 0, float("inf")
        self._since = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> Watchdog:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._place.open()
            self._place.write(self._update, self._phase)
            self._beat()
        # Python runs signal handlers between two lines of the main thread, which may be waiting
        # inside MPI; the number of the signal comes through this pipe at once.
        self._signals, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._thread.start()
        atexit.register(self.stop)
        return self

    def move(self, folder: Path) -> None:
        """Keep the heartbeats there from now on, where the ranks of all hosts find them."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            for old in folder.glob(f"{TOLD}*"):  # of an earlier start that hung
                old.unlink(missing_ok=True)
        self._earlier, self._folder = self._folder, folder
        self._beat()
        self._forget(self._earlier)
        if not self._thread.is_alive():
            self.start()

    def enter(self, phase: str, update: int, limit: float) -> None:
        self._phase, self._update, self._limit = phase, update, limit
        self._since = time.monotonic()
        self._place.write(update, phase)

    def where(self) -> str:
        return f"update {self._update}, phase {self._phase}"

    def stop(self) -> None:
        """Also before a rank leaves early: others must not conclude that it was killed."""
        self._stop.set()
        self._forget(self._folder)
        self._place.leave()

    def _forget(self, folder: Path | None) -> None:
        if folder is not None:
            with contextlib.suppress(OSError):
                _file(folder, self._rank).unlink(missing_ok=True)
                folder.rmdir()  # by the last of the ranks

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._beat()
            waited = time.monotonic() - self._since
            if waited > self._limit:
                self._end(waited)
            if signal.SIGTERM in self._new_signals() and not self._stop.is_set():
                self._report_killed()  # unless this rank is itself about to leave

    def _new_signals(self) -> bytes:
        """The signals of the next half second, as soon as there are any."""
        ready, _, _ = select.select([self._signals], [], [], self.INTERVAL)
        return os.read(self._signals, 100) if ready else b""

    def _beat(self) -> None:
        if self._phase == "start" and self._size > 1:
            self._siblings |= siblings()
        if self._folder is None:
            return
        beat = {
            "time": time.time(),
            "update": self._update,
            "phase": self._phase,
            "role": self.role,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        with contextlib.suppress(OSError):
            write_own(_file(self._folder, self._rank), json.dumps(beat))

    def _read(self, rank: int) -> dict[str, Any] | None:
        for folder in filter(None, (self._folder, self._earlier)):
            with contextlib.suppress(OSError, ValueError):
                beat = parse_json(read_own(_file(folder, rank)))
                if isinstance(beat, dict) and all(type(beat.get(k)) is t for k, t in BEAT.items()):
                    return beat | self._newer(rank, beat)
        return None

    def _newer(self, rank: int, beat: dict[str, Any]) -> dict[str, Any]:
        """Where a rank of this host has come to since its heartbeat."""
        place = read_place(self._earlier, rank) if self._earlier is not None else None
        if place is None or (beat["host"], beat["pid"]) != (socket.gethostname(), place.pid):
            return {}
        return {"update": place.update, "phase": place.phase}

    def _report_killed(self) -> None:
        """mpirun and srun end the others with TERM when one rank dies: say which, and where."""
        if self._folder is None or any(self._folder.glob(f"{TOLD}*")):
            return  # ranks that reported a hang, or waited with them, are gone on purpose
        here = socket.gethostname()  # only its own host can tell whether a rank is gone
        beats = {rank: self._read(rank) for rank in range(self._size) if rank != self._rank}
        local = self._unborn() | {
            rank: beat for rank, beat in beats.items() if beat and beat["host"] == here
        }
        dead = {rank: beat for rank, beat in local.items() if not is_running(beat["pid"])}
        if any(rank < self._rank for rank in local.keys() - dead.keys()):
            return  # one report is enough, and that rank makes it
        for rank, beat in dead.items():
            _say(
                f"rank {rank} of {self._size}{in_brackets(beat.get('role', ''))} on {here} "
                f"(pid {beat['pid']}) died (killed, or by os._exit) in update {beat['update']}, "
                f"phase {beat['phase']}; the job ends. Start the same command again to resume from "
                "the last checkpoint"
            )
        if not dead and self._phase == "start":
            _say("received SIGTERM in phase start, from you or because a rank has ended")

    def _unborn(self) -> dict[int, dict[str, Any]]:
        """Ranks of this host that the launcher has started, as if they had given a heartbeat."""
        if self._phase != "start" or (self._earlier and not self._earlier.is_dir()):
            return {}  # they have met, or all have left: one without a heartbeat left in order
        return {
            rank: {"pid": pid, "update": 0, "phase": "start"}
            for rank, pid in self._siblings.items()
            if rank != self._rank and not (self._earlier and has_left(self._earlier, rank))
        }

    def _end(self, waited: float) -> None:
        if not self._first_to_tell():
            time.sleep(LISTENING_S + 1.0)  # the first rank to leave ends the job, told or not
        else:
            who = f"rank {self._rank} of {self._size}{in_brackets(self.role)}"
            whom = self.waits_for()
            waits = f"It waits for {whom}. " if whom else ""
            _say(
                f"{who} on {socket.gethostname()} has been in "
                f"{self.where()} for {waited:.0f} s, longer than its limit of {self._limit:.0f} s. "
                f"{waits}{self._laggard()} Raise --sync.phase-timeout-s if that is expected."
            )
        faulthandler.dump_traceback(all_threads=True)
        # The heartbeat stays: without it this rank would be taken for the one that hangs.
        os._exit(EXIT_FAULT)

    def _first_to_tell(self) -> bool:
        """One report from each host: its ranks time out together, and one that was stopped wakes
        up when it has been reported. Another host's report may be lost behind a cut link."""
        if self._folder is None:
            return True
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
        try:
            told = self._folder / f"{TOLD}-{socket.gethostname()}"
            os.close(os.open(told, flags, 0o600))
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def _laggard(self) -> str:
        """Who is behind, by the heartbeats: silent for long, or in the earliest phase."""
        if self._folder is None or self._size == 1:
            return ""
        order = ["config", "start", "collect", "send", "wait", "update", "eval", "check", "save"]
        found = []
        silent = self._silent()
        for rank in range(self._size):
            beat = self._read(rank)
            if beat is None:
                return f"Rank {rank} has no heartbeat."
            if rank in silent:
                return (
                    f"Rank {rank}{in_brackets(beat.get('role', ''))} has been silent for "
                    f"{LISTENING_S:.0f} s, since {beat['phase']} of update {beat['update']}."
                )
            position = order.index(beat["phase"]) if beat["phase"] in order else 0
            found.append(((beat["update"], position), rank, beat))
        if min(found)[0] == max(found)[0]:
            return (
                "All ranks are alive and in the same phase, so none of them is behind: suspect "
                "the network between them."
            )
        _, rank, beat = min(found)
        who = f"Rank {rank}{in_brackets(beat.get('role', ''))}"
        return f"{who} is furthest behind: {beat['phase']} of update {beat['update']}."

    def _silent(self) -> set[int]:
        """Ranks that give no heartbeat while this one listens, by its own clock.

        The times in the heartbeats are of other hosts' clocks, which may be off by any amount.
        """
        before = {rank: self._read(rank) for rank in range(self._size) if rank != self._rank}
        silent, until = set(before), time.monotonic() + LISTENING_S
        while silent and time.monotonic() < until:
            time.sleep(self.INTERVAL / 2)
            silent = {rank for rank in silent if self._read(rank) == before[rank]}
        return silent


def _say(text: str) -> None:
    print(f"spmdrl: {text}", file=sys.stderr, flush=True)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def is_running(pid: int) -> bool:
    """Whether the process is there, and not just waiting to be collected by its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def in_brackets(role: str) -> str:
    """After the number of a rank."""
    return f" ({role})" if role else ""


def report_fault(rank: int, size: int, where: str, error: BaseException, role: str = "") -> None:
    """The one traceback of a failed run, with who and where.

    An environment brings its own; how the trainer came to call it would only bury that.
    """
    if isinstance(error, EnvError):
        text = f"{error.report()}\n"
    else:
        text = "".join(traceback.format_exception(error))
    print(
        f"spmdrl: rank {rank} of {size}{in_brackets(role)} on {socket.gethostname()} failed in "
        f"{where}:\n{text}",
        end="",
        file=sys.stderr,
        flush=True,
    )
