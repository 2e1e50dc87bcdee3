"""Processes that die with the test session, and the search for those that an earlier one left.

Every process of a test cluster carries `SPMDRL_TEST_CLUSTER=<folder>` in its environment, so that
"everything that this cluster started" has one answer, whoever forked it and however it detached.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

MARK = "SPMDRL_TEST_CLUSTER"
OWNER = "owner.pid"


class MissingError(RuntimeError):
    """What the cluster needs is missing here; the message says what, and how to get it."""


def need_commands(packages: str, *commands: str) -> None:
    missing = [name for name in commands if shutil.which(name, path=search_path()) is None]
    if missing:
        raise MissingError(f"{', '.join(missing)} not found; apt-get install {packages}")
    if os.geteuid() != 0:
        raise MissingError("starting daemons and namespaces needs root")


def search_path() -> str:
    """PATH with the folders where Debian keeps daemons."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def make_folder(kind: str) -> Path:
    """A new temporary folder that says whose it is; those of dead sessions are cleared first."""
    clear_leftovers(kind)
    folder = Path(tempfile.mkdtemp(prefix=f"spmdrl-{kind}-"))
    folder.chmod(0o755)
    (folder / OWNER).write_text(str(os.getpid()))
    return folder


def clear_leftovers(kind: str) -> None:
    """Stop and remove what sessions left that were killed before they could clean up."""
    for folder in Path(tempfile.gettempdir()).glob(f"spmdrl-{kind}-*"):
        with contextlib.suppress(OSError, ValueError):
            owner = int((folder / OWNER).read_text())
            if not Path(f"/proc/{owner}").exists():
                remove_folder(folder)


def remove_folder(folder: Path) -> None:
    end_all(lambda env: env.get(MARK) == str(folder))
    shutil.rmtree(folder, ignore_errors=True)


def end_all(chosen: Callable[[dict[str, str]], bool], but: int = 0) -> list[int]:
    """Kill every process whose environment is chosen; their ids."""
    ended = []
    for pid, env in environments():
        if chosen(env) and pid != but:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
    return ended


def environments() -> Iterator[tuple[int, dict[str, str]]]:
    """(id, environment) of every process that may be read, but for this one."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            raw = (entry / "environ").read_bytes().decode(errors="replace")
            pairs = (item.partition("=") for item in raw.split("\0") if "=" in item)
            yield int(entry.name), {name: value for name, _, value in pairs}


def start_daemon(
    command: Sequence[str], log: Path, env: dict[str, str], **kwargs: object
) -> subprocess.Popen[bytes]:
    """A child in a session of its own that gets SIGTERM should this process die."""
    setpriv = [shutil.which("setpriv") or "/usr/bin/setpriv", "--pdeathsig", "TERM", "--"]
    with log.open("ab") as out:
        return subprocess.Popen(
            [*setpriv, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env,
            start_new_session=True, **kwargs,
        )  # type: ignore[call-overload]  # fmt: skip


def stop_daemons(processes: Sequence[subprocess.Popen[bytes]], patience: float = 10.0) -> None:
    """SIGTERM to all, and SIGKILL to those who do not follow it."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(what: str, ready: Callable[[], object], timeout: float, every: float = 0.2) -> float:
    """Seconds until `ready()` is true; TimeoutError after `timeout`."""
    began = time.monotonic()
    while not ready():
        if time.monotonic() - began > timeout:
            raise TimeoutError(f"{what}: not within {timeout:.0f} s")
        time.sleep(every)
    return time.monotonic() - began
