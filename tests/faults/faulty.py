"""`spmdrl.train` with a fault built in.

    python -m tests.faults.faulty FAULT RANK UPDATE MARKS argv...

Only for faults that no environment, signal or command line can make. Each replaces one public
function or method, in the module that defines it, as soon as that is imported: HOOKS is all there
is to follow when the trainer changes. A hook that no longer reaches anything never writes its mark,
and a trial without the mark fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any

from spmdrl.parallel.topology import detect
from tests.faults.broken_env import write_mark

fault, guilty, update, marks, *argv = sys.argv[1:]
at_update = int(update)


def in_update(act: Callable[..., Any]) -> Callable[..., Any]:
    """`make_update` whose update is `act(update, state, rollout, ...)` once."""

    def decorate(make_update: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            original = make_update(*args, **kwargs)

            def broken(state: Any, *rest: Any) -> Any:
                if int(state.step) != at_update:
                    return original(state, *rest)
                write_mark(marks, at_update)
                return act(original, state, *rest)

            return broken

        return make

    return decorate


def raise_error(*_: Any) -> None:
    raise RuntimeError("the learner broke")


def poison_output(original: Any, state: Any, rollout: Any, *rest: Any) -> Any:
    """Observations and rewards are fine, what the network made of them is not."""
    return original(state, rollout.replace(log_prob=rollout.log_prob * float("nan")), *rest)


def poison_gradient(original: Any, state: Any, rollout: Any, *rest: Any) -> Any:
    """All of the rollout is finite; the ratios, and with them the gradient, are not."""
    return original(state, rollout.replace(log_prob=rollout.log_prob - 1e30), *rest)


def flip_bit(original: Any, *args: Any) -> Any:
    """The lowest bit of one parameter."""
    import jax
    import numpy as np

    state, metrics = original(*args)
    leaves, structure = jax.tree.flatten(state.params)
    bits = np.array(leaves[0]).view(np.uint32)
    bits.flat[0] ^= 1
    leaves[0] = jax.device_put(bits.view(np.float32), leaves[0].sharding)
    return state.replace(params=jax.tree.unflatten(structure, leaves)), metrics


def in_logger(original: Any) -> Any:
    def write(self: Any, row: Any) -> None:
        if row["progress/update"] != at_update + 1:  # rows count the updates that are done
            return original(self, row)
        write_mark(marks, at_update)
        raise OSError("the logger broke")

    return write


# fault: module, public name in it, what replaces it
HOOKS = {
    "learner": ("spmdrl.learning.update", "make_update", in_update(raise_error)),
    "nan-output": ("spmdrl.learning.update", "make_update", in_update(poison_output)),
    "nan-gradient": ("spmdrl.learning.update", "make_update", in_update(poison_gradient)),
    "bit": ("spmdrl.learning.update", "make_update", in_update(flip_bit)),
    "logger": ("spmdrl.runtime.logger", "Logger.write", in_logger),
}


class AfterImport(MetaPathFinder):
    """Replaces a name in a module before anybody else can import it from there."""

    def __init__(self, module: str, name: str, decorate: Callable[[Any], Any]):
        self._module, self._name, self._decorate = module, name, decorate

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        spec = PathFinder.find_spec(fullname, path) if fullname == self._module else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(module: Any) -> None:
            execute(module)
            *owners, name = self._name.split(".")
            owner = getattr(module, owners[0]) if owners else module
            setattr(owner, name, self._decorate(getattr(owner, name)))

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


if detect().rank == int(guilty):
    sys.meta_path.insert(0, AfterImport(*HOOKS[fault]))

from spmdrl.train import main  # noqa: E402

sys.exit(main(argv))
