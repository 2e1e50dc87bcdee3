"""TensorBoard and W&B, read back from what they wrote to the disk."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spmdrl.config import Config, EvalConfig, LogConfig
from spmdrl.runtime.logger import Logger

ROWS: list[dict[str, Any]] = [
    {"progress/update": 1, "progress/steps": 512, "episode/return_mean": None, "perf/sps": 16.0},
    {"progress/update": 2, "progress/steps": 1024, "episode/return_mean": 21.5, "perf/sps": 9e3,
     "eval/return_mean": 33.25},
]  # fmt: skip


class Quiet:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, row: Any) -> None: ...
    def close(self, summary: Any) -> None: ...


def logged(folder: Path, log: LogConfig) -> list[str]:
    console = Quiet()
    logger = Logger(Config(log=log, eval=EvalConfig(every=2)), folder, "run-id", console)
    for row in ROWS:
        logger.write(row)
    logger.close()
    return console.said


def events(folder: Path) -> Iterator[Any]:
    """Records of an event file: length, its checksum, the event, its checksum."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    (file,) = folder.glob("events.out.tfevents.*")
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body, rest = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        assert struct.unpack("<I", rest[:4])[0] == masked(body)
        yield Event.FromString(body)
        data = rest[4:]


def test_tensorboard_has_every_number_and_the_config(tmp_path):
    pytest.importorskip("tensorboardX", reason="part of the extra `tb`")
    assert logged(tmp_path, LogConfig(tensorboard=True)) == []
    numbers, texts = {}, {}
    for event in events(tmp_path / "tb"):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                numbers[value.tag, event.step] = value.simple_value
            else:
                texts[value.tag] = value.tensor.string_val[0].decode()
    assert numbers == {
        (name, row["progress/steps"]): value
        for row in ROWS
        for name, value in row.items()
        if value is not None
    }
    (config,) = texts.values()
    saved = json.loads(config.removeprefix("```json\n").removesuffix("\n```"))
    assert saved["eval"]["every"] == 2


@pytest.mark.slow
def test_wandb_has_them_too(tmp_path, monkeypatch):
    """Offline, which needs neither an account nor a network."""
    pytest.importorskip("wandb", reason="part of the extra `wandb`, not of `dev`")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert logged(tmp_path, LogConfig(wandb="a-project")) == []
    rows, config = records(tmp_path)
    assert [row["progress/steps"] for row in rows] == [512, 1024]
    assert rows[1]["eval/return_mean"] == 33.25
    assert "episode/return_mean" not in rows[0]
    assert config["env"]["id"] == "CartPole-v1"
    assert config["algo"]["type"] == "ppo"


BLOCK, HEADER = 32768, 7  # bytes


def pieces(data: bytes) -> Iterator[bytes]:
    """Records of a W&B file, which is a log of LevelDB after its first seven bytes."""
    place, record = HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + HEADER])
        if place + HEADER + length > len(data):
            return  # it is being written
        record += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def records(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and config of the one file that an offline run leaves."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-run-id.wandb")
    found: list[Any] = []
    while not any(record.HasField("exit") for record in found):  # another process writes it
        time.sleep(0.1)
        found = [Record.FromString(data) for data in pieces(file.read_bytes())]
    rows, config = [], {}
    for record in found:
        if record.HasField("history"):
            items = record.history.item
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            rows.append({k: v for k, v in row.items() if not k.startswith("_")})
        if record.HasField("run"):
            config = {i.key: json.loads(i.value_json) for i in record.run.config.update}
    return rows, config
