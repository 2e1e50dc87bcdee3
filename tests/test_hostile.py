"""A stranger's run directory or recording: refused in bounded time and memory, nothing imported."""

import contextlib
import json
import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from spmdrl.cluster.hostfile import mpirun_over_hosts, read_cluster, read_hostfile
from spmdrl.config import Config, ConfigError, from_json, parse_json, read_file, to_json, with_flags
from spmdrl.config.rules import check_fields
from spmdrl.episodes import Batches, Recording, map_arrays, write_episode, write_index
from spmdrl.evaluate import main as evaluate
from spmdrl.parallel.place import Place, read_place
from spmdrl.plot import main as plot
from spmdrl.record import main as record
from spmdrl.runs import main as runs
from spmdrl.runs import state_of
from spmdrl.runtime import lock
from spmdrl.runtime.checkpoint import Checkpointer, CheckpointError, Snapshot, read_snapshot
from spmdrl.runtime.watchdog import Watchdog

BRIEF = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


SPECIAL = {
    "fifo": os.mkfifo,
    "zero": lambda p: p.symlink_to("/dev/zero"),
    "loop": lambda p: p.symlink_to(p.name),
    "folder": os.mkdir,
    "deep": lambda p: p.write_bytes(b'{"a":[' * 100_000),
    "sparse": sparse,
    "bytes": lambda p: p.write_bytes(bytes(range(256)) * 40),
    "number": lambda p: p.write_text("1" * 100_000),
    "list": lambda p: p.write_text("[]"),
}
FILES = [
    "config.json", "metrics.jsonl", "status.json", "summary.json", "code.json", "spaces.json",
    "checkpoints", "checkpoints/update-00000005", "checkpoints/update-00000005/manifest.json",
    "checkpoints/update-00000005/meta.json", "checkpoints/update-00000005/params.safetensors",
]  # fmt: skip


def make_run(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(to_json(Config(run_dir=str(folder))))
    (folder / "metrics.jsonl").write_text('{"progress/update": 1, "progress/steps": 8}\n')
    (folder / "checkpoints").mkdir()
    arrays = {"params": {"w": np.zeros(3, np.float32)}}
    Checkpointer(folder / "checkpoints", 1).save(Snapshot(5, arrays, {"segments": []}))


def put(kind: str, place: Path) -> None:
    if os.path.lexists(place):
        place.rename(place.with_name(".before"))
    SPECIAL[kind](place)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", FILES)
def test_readers_of_a_hostile_run_end_soon_and_stay_small(tmp_path, name, kind, capsys):
    make_run(tmp_path / "run")
    put(kind, tmp_path / "run" / name)
    victim = sorted(p.name for p in tmp_path.iterdir())
    tracemalloc.start()
    started = time.perf_counter()
    try:
        assert runs([str(tmp_path)]) == 0
        assert plot([str(tmp_path / "run"), "--out", str(tmp_path / "run" / "x.html")]) in (0, 2)
        if name.startswith("checkpoints"):
            with pytest.raises(CheckpointError):
                read_snapshot(tmp_path / "run" / "checkpoints" / "update-00000005")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - started < 10.0
    assert peak < 100e6
    assert sorted(p.name for p in tmp_path.iterdir()) == victim
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [evaluate, record])
@pytest.mark.parametrize("kind", SPECIAL)
def test_playing_commands_refuse_a_hostile_config(tmp_path, command, kind, capsys):
    make_run(tmp_path / "run")
    put(kind, tmp_path / "run" / "config.json")
    more = ["--out", str(tmp_path / "out")] if command is record else []
    assert command([str(tmp_path / "run"), *more]) == 2
    said = capsys.readouterr().err
    assert said.startswith("spmdrl: ")
    assert len(said.splitlines()) == 1


# ---------------------------------------------------------------------------------------------
# Recordings


def episode_arrays(steps: int = 4) -> dict[str, np.ndarray]:
    zeros = np.zeros(steps, bool)
    return {
        "obs": np.zeros((steps, 3), np.float32), "last_obs": np.zeros(3, np.float32),
        "action": np.zeros(steps, np.int32), "reward": np.ones(steps, np.float32),
        "terminated": zeros, "truncated": zeros, "valid": ~zeros,
    }  # fmt: skip


def with_header(header: object, data: bytes = b"\0" * 64, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(offsets: object, shape: object = (16,), dtype: str = "F32") -> dict:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\1", with_header({}, length=1 << 62), with_header({}, length=(1 << 64) - 1),
        with_header(b"[" * 100_000), with_header(b"[]"), with_header(b"{}"), with_header({"a": 3}),
        with_header(entry([0, 10, 2])), with_header(entry([-64, 64])), with_header(entry([0, 32])),
        with_header(entry([0, 64], [1 << 40, 0])), with_header(entry([0, 64], [-4, -4])),
        with_header(entry([0, 64], [15])), with_header(entry([0, 64], dtype="O")),
        with_header(entry([0, 1 << 70])), with_header(entry([0.0, 64.0])),
        with_header(entry([0, 64]) | {"b": entry([0, 64])["a"]}),
        with_header(entry([0, 64], ["4", 4])),
    ],
)  # fmt: skip
def test_a_hostile_episode_is_damaged(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        map_arrays(tmp_path / "x.safetensors")


def test_what_we_write_is_read(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(save(episode_arrays()))
    found = map_arrays(tmp_path / "x.safetensors")
    assert found.keys() == episode_arrays().keys()
    assert all(np.array_equal(found[name], array) for name, array in episode_arrays().items())


@pytest.mark.parametrize("left_out", ["valid", "reward", "obs"])
def test_an_episode_without_an_array_is_refused(tmp_path, left_out):
    made = write_episode(tmp_path, 0, 0, 1, episode_arrays())
    arrays = {name: x for name, x in episode_arrays().items() if name != left_out}
    (tmp_path / made.file).write_bytes(save(arrays))
    write_index(tmp_path, {"config": json.loads(to_json(Config()))}, [made])
    with pytest.raises(ConfigError, match="arrays of one episode"):
        Batches(Recording(tmp_path, verify=False), 2)


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_hostile_index_is_refused(tmp_path, kind):
    put(kind, tmp_path / "index.json")
    with pytest.raises(ConfigError):
        Recording(tmp_path)


# ---------------------------------------------------------------------------------------------
# Lists of hosts


@pytest.mark.parametrize("kind", ["fifo", "zero", "loop", "folder", "sparse", "bytes"])
@pytest.mark.parametrize("reader", [read_hostfile, read_cluster])
def test_a_hostile_list_of_hosts_is_refused_at_once(tmp_path, kind, reader):
    put(kind, tmp_path / "hosts")
    with pytest.raises(ConfigError):
        reader(str(tmp_path / "hosts"))


def test_slots_are_plain_digits_and_a_quoted_line_break_joins_no_names(tmp_path):
    (tmp_path / "hosts").write_text("h1 slots=٣\n")
    with pytest.raises(ConfigError, match="slots is"):
        read_hostfile(str(tmp_path / "hosts"))
    (tmp_path / "hosts").write_text('job,ip\na,"h1\nh2"\n')
    with pytest.raises(ConfigError):
        read_cluster(str(tmp_path / "hosts"))


def test_a_word_that_mpirun_takes_for_its_own_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("h1\n")
    with pytest.raises(ConfigError, match="':'"):
        mpirun_over_hosts(read_hostfile(str(tmp_path / "hosts")), ["train", "--name", ":"])


# ---------------------------------------------------------------------------------------------
# Fuzz: more with FUZZ_EXAMPLES=10000

LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
ANY_JSON = st.recursive(
    LEAF, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3)
)
FIELDS = sorted(json.loads(to_json(Config())))
FLAGS = [
    "--seed",
    "--name",
    "--run-dir",
    "--env.id",
    "--algo.gamma",
    "--net.hidden",
    "--log.window",
]


@pytest.mark.slow
@BRIEF
@given(st.dictionaries(st.sampled_from(FIELDS), ANY_JSON, max_size=4))
def test_fuzz_config_json(changed):
    values = json.loads(to_json(Config())) | changed
    try:
        config = from_json(json.dumps(values))
        check_fields(config)
    except (ConfigError, ValueError, TypeError, AttributeError):
        return  # what read_run turns into one line
    assert isinstance(config, Config)


@BRIEF
@given(st.binary(max_size=200))
def test_fuzz_json(data):
    with contextlib.suppress(ValueError):
        parse_json(data)


@pytest.mark.slow
@BRIEF
@given(st.lists(st.sampled_from(FLAGS) | st.text(max_size=12), max_size=4))
def test_fuzz_command_line(words):
    code: object = 2
    try:
        check_fields(with_flags(Config(), words, "train"))
    except ConfigError:
        pass
    except SystemExit as leaving:
        code = leaving.code
    assert code in (0, 2)


@BRIEF
@given(st.text(max_size=80))
def test_fuzz_config_file(tmp_path, text):
    file = tmp_path / "config.py"
    file.write_text("config = " + repr(text) + "\n", encoding="utf-8", errors="replace")
    with pytest.raises(ConfigError):
        read_file(str(file))


@BRIEF
@given(
    st.sampled_from(["manifest.json", "meta.json", "params.safetensors"]),
    st.integers(0, 10_000),
    st.binary(min_size=1, max_size=8),
)
def test_fuzz_checkpoint(tmp_path, name, position, data):
    keeper = Checkpointer(tmp_path, 1)
    keeper.save(Snapshot(5, {"params": {"w": np.ones(3, np.float32)}}, {"segments": []}))
    file = keeper.path(5) / name
    before = file.read_bytes()
    position %= len(before)
    after = before[:position] + data + before[position + len(data) :]
    file.write_bytes(after)
    try:
        found = read_snapshot(keeper.path(5))
    except CheckpointError:
        assert after != before
    else:
        assert found.arrays["params"]["w"].tolist() == [1.0, 1.0, 1.0]


@BRIEF
@given(st.integers(0, 2_000), st.binary(min_size=1, max_size=12))
def test_fuzz_episode(tmp_path, position, data):
    content = bytearray(save(episode_arrays()))
    position %= len(content)
    content[position : position + len(data)] = data
    (tmp_path / "x.safetensors").write_bytes(bytes(content))
    try:
        found = map_arrays(tmp_path / "x.safetensors")
    except ConfigError:
        return
    assert sum(array.nbytes for array in found.values()) <= len(content)


@BRIEF
@given(
    st.dictionaries(st.sampled_from(["update", "phase", "host", "pid", "time"]), ANY_JSON)
    | ANY_JSON,
    st.binary(max_size=40),
)
def test_fuzz_what_ranks_tell_each_other(tmp_path, beat, place):
    """Files of other processes: whatever is in them, the one who reads them must not break."""
    (tmp_path / "rank-0.json").write_text(json.dumps(beat))
    (tmp_path / "rank-0.now").write_bytes(place)
    found = read_place(tmp_path, 0)
    assert found is None or isinstance(found, Place)
    watchdog = Watchdog(1, 2, tmp_path)
    read = watchdog._read(0)
    assert read is None or isinstance(read["pid"], int)
    watchdog._report_killed()


@BRIEF
@given(
    st.dictionaries(st.sampled_from(["state", "reason", "host", "pid", "time"]), ANY_JSON)
    | ANY_JSON,
    st.binary(max_size=60),
)
def test_fuzz_status_and_owner(tmp_path, status, owner):
    (tmp_path / "status.json").write_text(json.dumps(status))
    (tmp_path / lock.LOCK_NAME).write_bytes(owner)
    state, reason = state_of(tmp_path, time.time())
    assert isinstance(state, str)
    assert isinstance(reason, str)
    assert lock.is_taken(tmp_path) is False
    assert isinstance(lock._owner(tmp_path), str)


@BRIEF
@given(ANY_JSON)
def test_fuzz_recording(tmp_path, index):
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError):
        Recording(tmp_path)


@BRIEF
@given(st.text(alphabet="ah1,=#:\n \t\"'slotsipjb٣\0", max_size=60))
def test_fuzz_list_of_hosts(tmp_path, text):
    file = tmp_path / "hosts"
    file.write_text(text)
    for reader in (read_hostfile, read_cluster):
        with contextlib.suppress(ConfigError):
            reader(str(file))
