"""Who died, and where it was: exactly, and in the first moments of a process too."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from spmdrl.parallel.place import Place, PlaceFile, has_left, read_place
from spmdrl.parallel.relay import Relay
from spmdrl.parallel.spawn import mpirun_command
from spmdrl.runtime.watchdog import Watchdog
from tests.children import CARTPOLE, ROOT, clean_environment
from tests.faults.judge import Fault, judge
from tests.faults.result import Bench
from tests.faults.strikes import trial


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# ---------------------------------------------------------------------------------------------
# Places

WRITER = """
import os, signal, sys
from pathlib import Path
from spmdrl.parallel.place import PlaceFile
place = PlaceFile(Path(sys.argv[1]), 1)
place.open()
for update in range(1001):
    place.write(update, "collect")
    place.write(update, "save" if update < 1000 else "update")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_place_of_a_killed_process_is_its_last(tmp_path):
    done = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT)
    assert done.wait() == -signal.SIGKILL
    assert read_place(tmp_path, 1) == Place(done.pid, 1000, "update")
    assert not has_left(tmp_path, 1)


def test_a_shorter_place_covers_a_longer_one_and_the_last_to_leave_removes_all(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    places = [PlaceFile(folder, rank) for rank in range(2)]
    for place in places:
        place.open()
        place.write(123456789, "collect")
        place.write(1, "save")
    assert read_place(folder, 0) == Place(os.getpid(), 1, "save")
    places[1].leave()
    assert has_left(folder, 1)
    assert read_place(folder, 0) == Place(os.getpid(), 1, "save")
    places[0].leave()
    assert not folder.exists()


def test_a_planted_link_is_neither_written_nor_read(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("7 7 start")
    (tmp_path / "rank-0.now").symlink_to(victim)
    assert read_place(tmp_path, 0) is None
    place = PlaceFile(tmp_path, 0)
    place.open()
    place.write(3, "collect")
    assert victim.read_text() == "7 7 start"
    assert read_place(tmp_path, 0) == Place(os.getpid(), 3, "collect")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\0", b"1 2", b"a b c", b"1 2 start more"])
def test_what_is_no_place_is_none(tmp_path, content):
    (tmp_path / "rank-0.now").write_bytes(content)
    assert read_place(tmp_path, 0) is None


# ---------------------------------------------------------------------------------------------
# What survivors say


def beat(folder: Path, rank: int, pid: int) -> None:
    record = {"time": 0.0, "update": 12, "phase": "collect", "pid": pid}
    record["host"] = socket.gethostname()
    (folder / f"rank-{rank}.json").write_text(json.dumps(record))


def test_the_update_named_is_that_of_the_place_not_of_the_heartbeat(tmp_path, dead_pid, capsys):
    beat(tmp_path, 1, dead_pid)
    (tmp_path / "rank-1.now").write_text(f"{dead_pid} 27 update")
    Watchdog(0, 2, tmp_path)._report_killed()
    fault = Fault("death", 2, 1, ("update",), (27, 27))
    assert judge(fault, capsys.readouterr().err).good


def test_the_place_of_another_process_is_not_believed(tmp_path, dead_pid, capsys):
    beat(tmp_path, 1, dead_pid)
    (tmp_path / "rank-1.now").write_text(f"{dead_pid + 1} 27 update")
    Watchdog(0, 2, tmp_path)._report_killed()
    assert "update 12, phase collect" in capsys.readouterr().err


def test_a_rank_killed_before_its_first_heartbeat_is_named(tmp_path, dead_pid, capsys):
    watchdog = Watchdog(0, 3, tmp_path)
    watchdog._siblings = {0: os.getpid(), 1: os.getpid(), 2: dead_pid}
    watchdog._report_killed()
    assert judge(Fault("death", 3, 2, ("start",)), capsys.readouterr().err).good


def test_a_rank_that_left_in_order_as_it_started_was_not_killed(tmp_path, dead_pid, capsys):
    watchdog = Watchdog(0, 2, tmp_path)
    watchdog._siblings = {1: dead_pid}
    (tmp_path / "rank-1.now").write_text(f"{dead_pid} 0 left")
    watchdog._report_killed()
    said = capsys.readouterr().err
    assert "rank 1" not in said
    assert "rank 0" not in said  # nor is an innocent one


def test_a_rank_that_leaves_itself_reports_nobody(tmp_path, dead_pid, capfd):
    """All refuse to train: the last to leave is ended while the first is gone already."""
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    watchdog = Watchdog(0, 2, tmp_path / "job")
    try:
        watchdog.start()
        watchdog._siblings = {1: dead_pid}
        watchdog.stop()
        os.kill(os.getpid(), signal.SIGTERM)
        watchdog._thread.join()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, handler)
    assert capfd.readouterr().err == ""
    watchdog._report_killed()
    assert "rank 1" not in capfd.readouterr().err


SIBLINGS = """
import sys, time
from spmdrl.parallel.place import siblings
limit = time.monotonic() + 20
while len(found := siblings()) < 2 and time.monotonic() < limit:
    time.sleep(0.01)
print(sorted(found), len(set(found.values())), flush=True)
time.sleep(0.5)
"""


def test_ranks_know_each_other_before_they_have_met():
    done = subprocess.run(
        [*mpirun_command(2), sys.executable, "-c", SIBLINGS], capture_output=True, text=True,
        cwd=ROOT, env=clean_environment(), check=True,
    )  # fmt: skip
    assert done.stdout == "[0, 1] 2\n" * 2


# ---------------------------------------------------------------------------------------------
# What the process says that has started them

KILLED = """--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 4711 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
EXITED = """prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-2461@1,1]
   Exit code:    3
"""


def relayed(text: str, capfd) -> Relay:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream:
        relay = Relay(stream)
        os.write(writer, text.encode())
        os.close(writer)
        relay.finish()
    assert capfd.readouterr().err == text
    return relay


@pytest.mark.parametrize("text", [KILLED, EXITED])
def test_a_rank_that_nobody_has_reported_is_named_with_its_place(text, tmp_path, capfd):
    relay = relayed(text, capfd)
    early = relay.unreported(3, tmp_path)
    assert judge(Fault("death", 3, 1, ("start",)), early).good
    assert not judge(Fault("death", 3, 2, ("start",)), early).good
    (tmp_path / "rank-1.now").write_text("4711 30 save")
    assert judge(Fault("death", 3, 1, ("save",), (30, 30)), relay.unreported(3, tmp_path)).good


def test_what_a_rank_has_reported_is_not_said_again(tmp_path, capfd):
    said = "spmdrl: rank 1 of 2 on vm failed in update 3, phase collect:\n"
    assert relayed(said + KILLED, capfd).unreported(2, tmp_path) == ""
    assert relayed("nothing of the kind\n", capfd).unreported(2, tmp_path) == ""
    notice = "spmdrl: received SIGTERM in phase start, from you or because a rank has ended\n"
    assert relayed(notice + KILLED, capfd).unreported(2, tmp_path)


# ---------------------------------------------------------------------------------------------
# Real jobs

ENDLESS = "import time\nwhile True:\n    time.sleep(1)\n"
LIMITED = """
import sys
from spmdrl import train
module = sys.modules["spmdrl.train"]
module.CONFIG_LIMIT_S = 1.0
sys.exit(module.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ranks_do_not_wait_for_ever_for_a_config_file(tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    done = subprocess.run(
        [*mpirun_command(2), sys.executable, "-c", LIMITED, tmp_path / "endless.py"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, timeout=60,
        env=clean_environment(XDG_CACHE_HOME=str(tmp_path)), check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Rank 0 is furthest behind: config of update 0." in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["kill at the start", "kill of all ranks"])
def test_a_killed_rank_is_named_by_our_own_line(kind):
    with tempfile.TemporaryDirectory() as folder:
        result = trial(kind, 0, random.Random(1), Bench(Path(folder)))
    # How fast is the campaign's business: here a machine may be busy.
    others = [why for why in result.why.split("; ") if why and not why.startswith("it took")]
    assert not others, result


REFUSING = """
import sys, time
from spmdrl.config import ConfigError
from spmdrl import train
module = sys.modules["spmdrl.train"]
def refuse(*_):
    time.sleep(1.0)  # until each rank has seen the other
    raise ConfigError("seed is wrong")
module.checked_config = refuse
sys.exit(module.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ranks_that_refuse_their_config_are_not_reported_as_dead(tmp_path):
    """They leave one after the other, and the launcher ends the last of them."""
    done = subprocess.run(
        [*mpirun_command(3), sys.executable, "-c", REFUSING, CARTPOLE],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, timeout=60,
        env=clean_environment(XDG_CACHE_HOME=str(tmp_path)), check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "spmdrl: seed is wrong" in done.stdout
    assert "died" not in done.stdout, done.stdout
    assert not list(tmp_path.rglob("rank-*"))
