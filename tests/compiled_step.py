"""Compares envpool's compiled step with its Python step: `python tests/compiled_step.py ID ...`.

Run it in a process of its own where a mistake would corrupt memory.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from spmdrl.config import Config, EnvConfig
from spmdrl.envs import make_env

NUM_ENVS = 8  # enough that doubles in buffers for floats reach into malloc's own records
STEPS = 5


def make(env_id: str) -> Any:
    return make_env(Config(env=EnvConfig(id=env_id, num_envs=NUM_ENVS)), range(NUM_ENVS), threads=1)


def random_actions(space: Any, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if space.kind == "box":
        return rng.uniform(-1, 1, (NUM_ENVS, int(np.prod(space.shape)))).astype(np.float32)
    return rng.integers(0, space.nvec, (NUM_ENVS, *(space.shape or (1,)))).astype(np.int32)


def check_buffers(env: Any) -> None:
    """Raise unless the compiled call declares every buffer as envpool writes it."""
    ((_, (_, (_, writes), _)),) = [call for call in env.pool._xla() if call[0] == "recv"]
    with jax.enable_x64(env.needs_x64):
        handle, recv, _, _ = env.pool.xla()
        (call,) = jax.make_jaxpr(recv)(handle).eqns[:1]
    assert call.primitive.name == "ffi_call"
    declared = [(x.aval.dtype, list(x.aval.shape)) for x in call.outvars]
    assert declared == [(np.dtype(dtype), shape) for dtype, shape in writes]


def check_steps(env_id: str) -> None:
    """Raise unless some compiled steps give the bits of the same steps made from Python."""
    by_python, compiled = make(env_id), make(env_id)
    jax.tree.map(np.testing.assert_array_equal, by_python.reset(), compiled.reset())
    xla = compiled.xla()
    step, handle = jax.jit(xla.step), xla.handle
    for t in range(STEPS):
        action = random_actions(compiled.spec.action, seed=t)
        action = action.reshape(NUM_ENVS, *compiled.spec.action.shape)
        by_python.send(action)
        expected = by_python.recv()
        with jax.enable_x64(compiled.needs_x64):
            handle, found = step(handle, action)
        for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            assert want.dtype == got.dtype
            assert want.tobytes() == np.asarray(got).tobytes()


def check(env_id: str) -> None:
    check_buffers(make(env_id))
    check_steps(env_id)


if __name__ == "__main__":
    for env_id in sys.argv[1:]:
        check(env_id)
        print("equal", env_id, flush=True)
