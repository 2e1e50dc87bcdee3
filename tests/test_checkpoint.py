"""Checkpoints: whole or not there, verified on load, and harmless when they are hostile."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spmdrl.runtime import checkpoint
from spmdrl.runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    Snapshot,
    from_named,
    read_snapshot,
    seal,
    to_named,
    write_snapshot,
)


def snapshot(step: int = 7, score: float | None = 1.0) -> Snapshot:
    rng = np.random.default_rng(step)
    arrays: dict[str, dict[str, np.ndarray]] = {
        "params": {"params/w": rng.normal(size=(20, 30)).astype(np.float32)},
        "learner": {"count": np.asarray([step], np.int32)},
    }
    return Snapshot(step, arrays, {"step": step, "return_mean": score, "segments": []})


def equal(a: Snapshot, b: Snapshot) -> bool:
    if (a.step, a.meta) != (b.step, b.meta):
        return False
    return all(
        np.array_equal(a.arrays[g][n], b.arrays[g][n]) for g in a.arrays for n in a.arrays[g]
    )


def test_round_trip(tmp_path):
    write_snapshot(tmp_path / "update-00000007", snapshot())
    assert equal(read_snapshot(tmp_path / "update-00000007"), snapshot())


def test_plain_safetensors_reads_the_weights(tmp_path):
    from safetensors.numpy import load_file

    write_snapshot(tmp_path / "c", snapshot())
    assert load_file(tmp_path / "c" / "params.safetensors")["params/w"].shape == (20, 30)


def test_trees_keep_names_shapes_and_order(tmp_path):
    tree = {"a": [np.zeros((2, 3)), np.ones(4)], "b": {"c": np.arange(5)}}
    named = to_named(tree)
    assert set(named) == {"a/0", "a/1", "b/c"}
    assert np.array_equal(from_named(tree, named)["b"]["c"], np.arange(5))
    with pytest.raises(CheckpointError, match="other arrays"):
        from_named(tree, named | {"d": np.zeros(1)})
    with pytest.raises(CheckpointError, match="a/0"):
        from_named(tree, named | {"a/0": np.zeros((3, 2))})


def test_array_order_does_not_matter(tmp_path):
    """safetensors writes memory as it lies; a transposed array must still come back right."""
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_snapshot(tmp_path / "c", Snapshot(1, {"params": {"w": turned}}, {}))
    assert np.array_equal(read_snapshot(tmp_path / "c").arrays["params"]["w"], turned)


def test_keeps_the_newest_and_the_best(tmp_path):
    keeper = Checkpointer(tmp_path, keep=2)
    for step, score in [(1, 5.0), (2, 9.0), (3, 1.0), (4, None), (5, 2.0)]:
        keeper.save(snapshot(step, score))
    assert keeper.steps() == [2, 4, 5]
    assert keeper.best_step() == 2


def test_a_kill_while_saving_leaves_the_old_ones(tmp_path, monkeypatch):
    keeper = Checkpointer(tmp_path, keep=2)
    keeper.save(snapshot(1))

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        keeper.save(snapshot(2))
    monkeypatch.undo()
    assert keeper.steps() == [1]
    restored = keeper.restore(lambda _: None)
    assert restored is not None
    assert equal(restored, snapshot(1))


# -- damage


def flip_bit(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])


def zero_block(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    start = rng.randrange(len(data))
    block = data[start : start + 64]
    data[start : start + 64] = bytes(len(block)) if any(block) else b"\1" * len(block)
    file.write_bytes(data)


def delete(file: Path, rng: random.Random) -> None:
    file.unlink()


def garbage_json(file: Path, rng: random.Random) -> None:
    texts = ["", "null", "[]", "{}", '{"step": 1', "\0\0", '{"step": 8, "files": {}}', "NaN"]
    target = file.parent / rng.choice(["manifest.json", "meta.json"])
    target.write_text(rng.choice(texts))


DAMAGES = [flip_bit, truncate, zero_block, delete, garbage_json]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_hundred_damages_are_found_and_the_one_before_is_used(tmp_path, damage):
    rng = random.Random(damage.__name__)
    good = tmp_path / "good"
    good.mkdir()
    for step in (1, 2):
        write_snapshot(good / f"update-{step:08d}", snapshot(step))
    for trial in range(100):
        folder = tmp_path / f"trial-{trial}"
        shutil.copytree(good, folder)
        files = sorted((folder / "update-00000002").iterdir())
        damage(rng.choice(files), rng)
        said: list[str] = []
        found = Checkpointer(folder, keep=3).restore(said.append)
        assert found is not None
        assert equal(found, snapshot(1))
        assert len(said) == 1
        assert "update 2 is damaged" in said[0]
        assert (folder / "damaged-update-00000002").is_dir()


def test_nothing_intact_is_an_error_and_not_a_new_beginning(tmp_path):
    keeper = Checkpointer(tmp_path, keep=3)
    keeper.save(snapshot(1))
    (keeper.path(1) / "params.safetensors").unlink()
    for _ in range(2):  # the second time it is set aside already
        with pytest.raises(CheckpointError, match="--restart"):
            keeper.restore(lambda _: None)


# -- malice: a manifest can be made to fit anything


def forge(folder: Path, name: str, data: bytes) -> None:
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{}")
    files = {}
    for file, content in (("meta.json", b"{}"), (name, data)):
        digest = checkpoint.hashlib.sha256(content).hexdigest()
        files[file] = {"sha256": digest, "bytes": len(content)}
    if "/" not in name:
        (folder / name).write_bytes(data)
    (folder / "manifest.json").write_text(json.dumps(seal(1, files)))


def test_a_pickle_is_not_executed(tmp_path):
    bomb = b"cos\nsystem\n(S'touch " + str(tmp_path / "owned").encode() + b"'\ntR."
    forge(tmp_path / "c", "params.safetensors", bomb)
    with pytest.raises(CheckpointError):
        read_snapshot(tmp_path / "c")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../..", ".hidden"])
def test_names_outside_are_refused(tmp_path, name):
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    forge(tmp_path / "c", name, b"x")
    with pytest.raises(CheckpointError, match="not a file of a checkpoint"):
        read_snapshot(tmp_path / "c")


def test_a_giant_header_takes_no_memory(tmp_path):
    forge(tmp_path / "c", "params.safetensors", struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(CheckpointError):
        read_snapshot(tmp_path / "c")


def test_a_link_is_not_followed(tmp_path):
    write_snapshot(tmp_path / "c", snapshot())
    file = tmp_path / "c" / "params.safetensors"
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="missing"):
        read_snapshot(tmp_path / "c")


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_save_flushes_its_data_then_renames_then_flushes_the_folder(tmp_path):
    """As the kernel sees it: no rename before the data is on the disk."""
    script = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from spmdrl.runtime.checkpoint import Checkpointer, Snapshot\n"
        "arrays = {'params': {'w': np.ones(9, np.float32)}}\n"
        "Checkpointer(Path(sys.argv[1]), 3).save(Snapshot(7, arrays, {'step': 7}))\n"
    )
    trace, folder = tmp_path / "trace", tmp_path / "checkpoints"
    calls = "trace=fsync,fdatasync,rename,renameat,renameat2"
    command = ["strace", "-f", "-y", "-e", calls, "-o", str(trace), sys.executable, "-c", script]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr.lower():
        pytest.skip("this machine does not let processes be traced")
    assert done.returncode == 0, done.stderr
    lines = [line for line in trace.read_text().splitlines() if str(folder) in line]
    at = next(
        i for i, line in enumerate(lines) if "rename" in line and f'"{folder}/update-' in line
    )
    flushed = [line.split("<")[1].split(">")[0] for line in lines[:at] if "fsync" in line]
    names = {"params.safetensors", "meta.json", "manifest.json"}
    assert {Path(path).name for path in flushed[:-1]} == names
    assert Path(flushed[-1]).name.startswith(".tmp-update")  # the folder that is renamed
    assert "fsync" in lines[at + 1]
    assert f"<{folder}>" in lines[at + 1]
