"""Files that are written whole or not at all, and read even where a kill has cut them."""

import json
import os
import stat

import pytest

from spmdrl.config import ConfigError
from spmdrl.runtime.files import (
    last_rows,
    read_json,
    read_metrics,
    read_rows,
    replace_file,
    replace_text,
    write_json,
)


def test_a_file_is_replaced_and_not_written_over(tmp_path):
    """Whoever has the old one open goes on reading it to its end."""
    file, link = tmp_path / "a.json", tmp_path / "old"
    for write in (lambda: write_json(file, {"a": 2}), lambda: replace_file(file, b"[]")):
        file.unlink(missing_ok=True)
        link.unlink(missing_ok=True)
        file.write_text("old")
        os.link(file, link)
        write()
        assert link.read_text() == "old"
        assert {p.name for p in tmp_path.iterdir()} == {"a.json", "old"}
        assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(link.stat().st_mode)


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    with pytest.raises(UnicodeEncodeError):
        replace_text(file, "\ud800")
    assert read_json(file) == {"a": 1}


@pytest.mark.parametrize("content", [None, "", '{"a": ', "[1]", "null", b"\xff\xfe"])
def test_json_that_is_none_of_ours_is_empty(tmp_path, content):
    file = tmp_path / "a.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read_json(file) == {}


def test_rows_without_those_that_a_kill_cut(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"a": 1}\n[2]\n\xff\n{"a": 3}\n{"a": 4, "b')
    assert read_rows(file) == [{"a": 1}, {"a": 3}]
    assert read_metrics(tmp_path) == [{"a": 1}, {"a": 3}]
    assert last_rows(tmp_path) == [{"a": 3}, {"a": 1}]


def test_only_the_end_of_a_long_file_is_read_for_the_last_rows(tmp_path):
    rows = [{"number": n} for n in range(20_000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = last_rows(tmp_path)
    assert found == rows[::-1][: len(found)]
    assert 100 < len(found) < 10_000
    assert read_metrics(tmp_path) == rows


def test_missing_metrics(tmp_path):
    assert last_rows(tmp_path) == []
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="holds no rows yet"):
        read_metrics(tmp_path)
