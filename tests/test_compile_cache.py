"""Compiled programs are shared between runs, and only whole ones."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from spmdrl.parallel.compile_cache import VARIABLE, open_cache, publish
from tests.children import CARTPOLE, succeed


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


def test_private_programs_are_not_kept(environ):
    open_cache(environ)
    for name in ("jit_private_step-1", "jit_update-1"):
        program(environ, name)
    publish(environ)
    assert reopened(environ) == {"jit_update-1-cache"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_program_of_somebody_else_is_never_used(environ):
    """These files are machine code."""
    open_cache(environ)
    program(environ, "jit_update-1")
    publish(environ)
    shared = Path(environ[VARIABLE]).parent
    planted = shared / "jit_planted-1-cache"
    planted.write_text("code")
    os.chown(planted, 65534, 65534)
    (shared / "jit_link-1-cache").symlink_to(planted)
    assert reopened(environ) == {"jit_update-1-cache"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("whose", ["spmdrl", "spmdrl/programs-*"])
def test_a_cache_of_somebody_else_is_not_used(environ, whose):
    open_cache(environ)
    (folder,) = Path(environ["XDG_CACHE_HOME"]).glob(whose)
    os.chown(folder, 65534, 65534)
    later = {"XDG_CACHE_HOME": environ["XDG_CACHE_HOME"]}
    open_cache(later)
    assert VARIABLE not in later


def test_the_cache_is_private_whatever_the_umask(environ):
    before = os.umask(0)
    try:
        open_cache(environ)
    finally:
        os.umask(before)
    shared = Path(environ[VARIABLE]).parent
    assert [stat.S_IMODE(f.stat().st_mode) for f in (shared, shared.parent)] == [0o700, 0o700]


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
        return succeed("-c", SCRIPT, **environ).split()[-1]

    assert [run(), run()] == ["MISS", "HIT"]
    assert not list(Path(environ["XDG_CACHE_HOME"]).glob("spmdrl/*/.work-*"))  # tidied up


# ---------------------------------------------------------------------------------------------
# What a real training leaves

TINY = ["--nprocs", "1", "--env.num-envs", "8", "--algo.num-steps", "16", "--total-steps", "256"]


def train(run_dir: Path, **environment: str) -> None:
    everything = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} | environment
    succeed("-m", "spmdrl.train", CARTPOLE, *TINY, "--run-dir", run_dir, **everything)


def with_simulator(folder: Path) -> dict[str, bool]:
    """The programs by their functions' names, and whether envpool is called from inside."""
    from jax._src.compilation_cache import decompress_executable

    return {
        file.name.rpartition("-")[0].rpartition("-")[0]: b"EnvPool"
        in decompress_executable(file.read_bytes())
        for file in folder.glob("*-cache")
    }


@pytest.mark.slow
def test_a_training_publishes_its_update_and_no_program_with_a_simulator(environ, tmp_path):
    for run in ("first", "second"):
        train(tmp_path / run, **environ)
    (shared,) = Path(environ["XDG_CACHE_HOME"]).glob("spmdrl/programs-*")
    published = with_simulator(shared)
    assert "jit_update" in published
    assert not any(published.values())
    # All programs, kept by jax itself: the search above does find a simulator where there is one.
    train(tmp_path / "third", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "all"))
    compiled = with_simulator(tmp_path / "all")
    assert {name for name, found in compiled.items() if found} == {"jit_private_collect"}
    assert published.keys() == compiled.keys() - {"jit_private_collect"}
