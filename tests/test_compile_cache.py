"""Compiled programs are shared between runs, and only whole ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.parallel.compile_cache import VARIABLE, open_cache, publish


@pytest.fixture
def environ(tmp_path):
    return {"XDG_CACHE_HOME": str(tmp_path)}


def program(environ: dict[str, str], name: str, text: str = "code") -> None:
    """What jax would leave after compiling."""
    Path(environ[VARIABLE], f"{name}-cache").write_text(text)


def reopened(environ: dict[str, str]) -> set[str]:
    """The programs that a later process finds."""
    later = {"XDG_CACHE_HOME": environ["XDG_CACHE_HOME"]}
    open_cache(later)
    return {file.name for file in Path(later[VARIABLE]).iterdir()}


def test_a_published_program_is_found_by_the_next_process(environ):
    open_cache(environ)
    program(environ, "jit_update-1")
    assert reopened(environ) == set()  # it might be half written still
    publish(environ)
    assert reopened(environ) == {"jit_update-1-cache"}
    publish(environ)  # again: no harm


def test_programs_that_hold_addresses_are_not_kept(environ):
    open_cache(environ)
    for name in ("jit_collect-1", "jit_update_over_mpi-1", "jit_update-1"):
        program(environ, name)
    publish(environ)
    assert reopened(environ) == {"jit_update-1-cache"}


def test_the_cache_stays_below_its_limit(environ, monkeypatch):
    monkeypatch.setattr("spmdrl.parallel.compile_cache.LIMIT_BYTES", 10)
    open_cache(environ)
    for age in range(3):
        program(environ, f"jit_update-{age}", "five!")
        os.utime(Path(environ[VARIABLE], f"jit_update-{age}-cache"), times=(1e9 - age,) * 2)
    publish(environ)
    assert reopened(environ) == {"jit_update-0-cache", "jit_update-1-cache"}


def test_what_the_user_chose_stays(environ):
    environ[VARIABLE] = "/somewhere"
    open_cache(environ)
    assert environ[VARIABLE] == "/somewhere"
    publish(environ)  # not ours to touch
    assert not list(Path(environ["XDG_CACHE_HOME"]).iterdir())


def test_a_home_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    open_cache(environ)
    assert VARIABLE not in environ


SCRIPT = """
from spmdrl.parallel.process import prepare_process
from spmdrl.parallel.topology import Topology
prepare_process(Topology(), 1)
import jax, jax.numpy as jnp
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
def update(x):
    for _ in range(30):
        x = jnp.sort(jnp.sin(x) @ jnp.cos(x))
    return x
jax.jit(update)(jnp.ones((64, 64))).block_until_ready()
from spmdrl.parallel.compile_cache import publish
publish()
print("HIT" if any("cache_hits" in e for e in events) else "MISS")
"""


def test_jax_finds_its_programs_again(environ):
    """In another folder than the one they were written to."""

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()[-1]

    assert [run(), run()] == ["MISS", "HIT"]
    assert not list(Path(environ["XDG_CACHE_HOME"]).glob("spmdrl/*/.work-*"))  # tidied up
