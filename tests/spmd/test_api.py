"""The calls for a batch algorithm of one's own, against numpy; alone they do nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl import api
from spmdrl.parallel import mpi


def brought_by(rank: int) -> dict[str, np.ndarray]:
    rows = rank + 1
    return {"obs": np.full((rows, 2), rank, np.float32), "action": np.arange(rows) + 10 * rank}


def means(tree: dict) -> None:
    ranks = np.arange(api.size())
    np.testing.assert_allclose(tree["a"], np.full((2, 3), ranks.mean()))
    np.testing.assert_allclose(tree["b"], (2.0**ranks).mean(), rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["called", "inside jit"])
def test_allmean(wrap):
    tree = {"a": jnp.full((2, 3), float(api.rank())), "b": jnp.float32(2.0 ** api.rank())}
    means(wrap(api.allmean)(tree))


def test_allmean_by_way_of_the_host_returns_to_the_device(monkeypatch):
    monkeypatch.setattr(mpi, "reaches_device", lambda: False)
    device = jax.local_devices()[-1]
    tree = {
        "a": np.full((2, 3), float(api.rank()), np.float32),
        "b": np.asarray(2.0 ** api.rank(), np.float32),
    }
    found = api.allmean(jax.device_put(tree, device))
    means(found)
    assert found["a"].devices() == {device}


def test_an_mpi_without_threads_serves_outside_of_jit(monkeypatch):
    if api.size() == 1:
        pytest.skip("alone MPI is not called")
    monkeypatch.setattr(api._world(), "thread_level", "funneled")
    monkeypatch.setattr(mpi, "allreduce", None)
    tree = {"a": jnp.full((2, 3), float(api.rank())), "b": jnp.float32(2.0 ** api.rank())}
    means(api.allmean(tree))
    with pytest.raises(RuntimeError, match="outside of it"):
        jax.jit(lambda tree: api.allmean(tree))(tree)  # traced anew


def test_batches_of_different_lengths_are_gathered():
    whole = api.gather_batch(brought_by(api.rank()))
    if not api.is_root():
        assert whole is None
        return
    parts = [brought_by(rank) for rank in range(api.size())]
    assert whole is not None
    assert sorted(whole) == ["action", "obs"]
    for name, rows in whole.items():
        np.testing.assert_array_equal(rows, np.concatenate([part[name] for part in parts]))


def test_batches_must_have_the_same_names():
    if api.size() == 1:
        pytest.skip("one rank always agrees with itself")
    batch = brought_by(api.rank())
    if api.rank() == 1:
        batch["extra"] = batch["obs"]
    with pytest.raises(ValueError, match=r"rank 1 has the arrays .*extra"):
        api.gather_batch(batch)


def test_broadcast_gives_what_rank_0_has():
    mine = {
        "w": np.full((2, 2), api.rank() + 0.5, np.float32),
        "n": np.asarray(api.rank() + 7, np.int32),
    }
    found = api.broadcast(mine)
    np.testing.assert_array_equal(found["w"], np.full((2, 2), 0.5))
    assert int(found["n"]) == 7
    assert found["n"].dtype == np.int32
