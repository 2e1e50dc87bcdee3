"""The disk that forgets, and that a run asks it for all that it needs to remember."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from spmdrl.runtime import files
from spmdrl.runtime.checkpoint import Checkpointer, Snapshot
from tests.faults.power import Disk, Event, promised, read_trace, trial
from tests.faults.result import Bench

ROOT = Path("/disk")
OPEN = "O_WRONLY|O_CREAT"


def played(*events: Event) -> Disk:
    disk = Disk(ROOT)
    for event in events:
        disk.apply(event)
    return disk


def left(disk: Disk, place: Path, keep: random.Random | None = None) -> dict[str, bytes]:
    shutil.rmtree(place, ignore_errors=True)
    disk.survive(place, keep)
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}


def written(name: str, data: bytes) -> list[Event]:
    return [Event("openat", (f"/disk/{name}",), 5, flags=OPEN), Event("write", (), 5, data)]


FLUSH_TOP = [Event("openat", ("/disk",), 6, flags="O_RDONLY"), Event("fsync", (), 6)]
FLUSH = Event("fsync", (), 5)


def test_a_name_and_its_bytes_are_flushed_apart(tmp_path):
    place = tmp_path / "left"
    assert left(played(*written("a", b"x")), place) == {}
    assert left(played(*written("a", b"x"), FLUSH), place) == {}
    assert left(played(*written("a", b"x"), *FLUSH_TOP), place) == {"a": b""}
    assert left(played(*written("a", b"x"), FLUSH, *FLUSH_TOP), place) == {"a": b"x"}
    later = [FLUSH, *FLUSH_TOP, Event("write", (), 5, b"y")]
    assert left(played(*written("a", b"x"), *later), place) == {"a": b"x"}


def test_a_rename_that_was_not_flushed_leaves_the_old_name(tmp_path):
    place, rename = tmp_path / "left", Event("rename", ("/disk/a", "/disk/b"))
    start = [*written("a", b"x"), FLUSH, *FLUSH_TOP]
    assert left(played(*start, rename), place) == {"a": b"x"}
    assert left(played(*start, rename, *FLUSH_TOP), place) == {"b": b"x"}
    assert left(played(*start, Event("unlink", ("/disk/a",))), place) == {"a": b"x"}


def test_a_part_of_the_rest_may_survive(tmp_path):
    disk = played(*written("a", b"x"), FLUSH, *FLUSH_TOP, *written("b", b"four"))
    found = [left(disk, tmp_path / "left", random.Random(seed)) for seed in range(40)]
    assert {tuple(sorted(one)) for one in found} == {("a",), ("a", "b")}
    assert {one["b"] for one in found if "b" in one} == {b"", b"f", b"fo", b"fou", b"four"}


def test_what_strace_writes_is_read(tmp_path):
    hexed = "".join(f"\\x{byte:02x}" for byte in b"/disk/run")
    name = "".join(f"\\x{byte:02x}" for byte in b"a")
    text = f"""10 mkdir("{hexed}", 0777)    = 0
10 openat(AT_FDCWD, "{hexed}", O_RDONLY|O_DIRECTORY) = 7
11 openat(7, "{name}", O_WRONLY|O_CREAT, 0666 <unfinished ...>
10 fsync(7)                 = 0
11 <... openat resumed>)  = 8
11 write(8, "\\x68\\x69", 2)  = 2
11 pwrite64(8, "\\x48", 1, 0)  = 1
11 fsync(8)  = -1 EIO (Input/output error)
11 fsync(8)  = 0
10 unlinkat(7, "{name}", 0)    = 0
"""
    (tmp_path / "trace").write_text(text)
    events = list(read_trace(tmp_path / "trace", Path("/elsewhere")))
    calls = ["mkdir", "openat", "fsync", "openat", "write", "write", "fsync", "unlink"]
    assert [event.call for event in events] == calls
    assert events[3].paths == ("/disk/run/a",)
    assert events[4].data == b"hi"
    assert (events[5].data, events[5].offset) == (b"H", 0)
    assert events[-1].paths == ("/disk/run/a",)


def test_the_folder_of_checkpoints_is_on_the_disk_before_the_first_of_them(tmp_path, monkeypatch):
    flushed: list[tuple[str, bool]] = []
    real = files.fsync

    def fsync(path: Path) -> None:
        flushed.append((path.name, (tmp_path / "run" / "checkpoints").is_dir()))
        real(path)

    monkeypatch.setattr(files, "fsync", fsync)
    monkeypatch.setattr("spmdrl.runtime.checkpoint.fsync", fsync)
    files.make_folder(tmp_path / "run")
    assert flushed == [(tmp_path.name, False)]
    arrays = {"params": {"w": np.zeros(3, np.float32)}}
    keeper = Checkpointer(tmp_path / "run" / "checkpoints", 1)
    keeper.save(Snapshot(5, arrays, {"segments": []}))
    assert ("run", True) in flushed
    assert flushed.index(("run", True)) < flushed.index(("checkpoints", True))


def test_a_promise_is_a_flushed_folder_of_checkpoints():
    events = [
        Event("mkdir", ("/disk/run",)), Event("mkdir", ("/disk/run/checkpoints",)),
        Event("mkdir", ("/disk/run/checkpoints/update-00000005",)),
    ]  # fmt: skip
    flush = [Event("openat", ("/disk/run/checkpoints",), 9, flags=""), Event("fsync", (), 9)]
    assert promised(played(*events)) == 0
    assert promised(played(*events, *flush)) == 5


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
def test_a_run_survives_the_loss_of_all_that_was_not_flushed():
    class Late(random.Random):
        """Near the end, where there is most to lose."""

        def randrange(self, start: int, *_: int) -> int:  # type: ignore[override]
            return start * 9 // 10

    with tempfile.TemporaryDirectory() as folder:
        result = trial(0, Late(0), Bench(Path(os.path.realpath(folder))))
    assert result.held, result.why
    assert result.said != "resumed at update 0"
