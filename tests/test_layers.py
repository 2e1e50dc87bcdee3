"""Modules import only from the layers below their own, and jax only where it is needed."""

import ast
from pathlib import Path

import pytest

from tests.children import ROOT, succeed

PACKAGE = ROOT / "spmdrl"

# From the ground up. Packages of one row do not know each other: `acting` and `learning` meet in
# `types.Rollout`. What others import and the commands stand on top.
ROWS = [
    {"config", "types", "lazy", "trees"},
    {"parallel"},
    {"envs", "nets"},
    {"algos"},
    {"acting", "learning"},
    {"runtime"},
    {"cluster", "curves", "sweeps"},
    {"api", "episodes", "library", "cli", "options"},
]
COMMANDS = {
    "train", "evaluate", "record", "clone", "plot", "report", "runs", "doctor", "sweep", "verify",
    "tune", "slurm", "reference", "__main__",
}  # fmt: skip
PACKAGES = {"envs"}  # whose __main__ is a command of their name


def modules() -> dict[str, Path]:
    """{"nets.policy": its file}; a folder's own name stands for its __init__."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = file
    return found


MODULES = modules()


def imports(tree: ast.AST) -> list[str]:
    """Full names of everything imported anywhere in the tree, also inside functions."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def own_imports(file: Path) -> set[str]:
    """The modules of this package among them."""
    found = set()
    for name in imports(ast.parse(file.read_text())):
        package, _, inside = name.partition(".")
        if package == "spmdrl":
            whole = inside in MODULES  # `from spmdrl import moments`, not a name of a module
            found.add(inside if whole else inside.rpartition(".")[0])
    return found - {""}


def layer(module: str) -> str:
    """What `python -m` executes of a package stands where the commands do."""
    return "__main__" if module.endswith(".__main__") else module.partition(".")[0]


def below(name: str) -> set[str]:
    """Which packages one of this name may import from."""
    if name in COMMANDS:
        return {name}.union(*ROWS)
    row = next(number for number, names in enumerate(ROWS) if name in names)
    return {name}.union(*ROWS[:row])


def test_every_package_has_its_row():
    assert {layer(name) for name in MODULES} == COMMANDS.union(*ROWS)


def test_every_command_is_behind_the_front_door():
    from spmdrl import cli

    assert set(cli.COMMANDS) == (COMMANDS - {"__main__"}) | PACKAGES
    assert all(f"{name}.__main__" in MODULES for name in PACKAGES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module):
    allowed = below(layer(module))
    wrong = {name for name in own_imports(MODULES[module]) if layer(name) not in allowed}
    assert not wrong, f"{module} imports {wrong}, which stand above it or beside it"


def test_the_reading_of_imports():
    """Else the test above could be satisfied by seeing nothing."""
    found = own_imports(MODULES["nets.policy"])
    assert {"config", "types", "nets.torsos", "nets.moments"} <= found
    assert "runtime.session" in own_imports(MODULES["train"])  # inside a function


def test_only_one_module_imports_mpi4jax():
    importers = {
        name
        for name, file in MODULES.items()
        if any(i.partition(".")[0] == "mpi4jax" for i in imports(ast.parse(file.read_text())))
    }
    assert importers == {"parallel.mpi"}


LIGHT = [
    "config", "parallel.topology", "parallel.ids", "parallel.roles", "parallel.spawn",
    "parallel.process", "runtime.rundir", "runtime.watchdog", "runtime.signals",
    "runtime.checkpoint", "runtime.files", "runtime.models",
    "runtime.evaluation", "acting.player", "envs.ids", "episodes", "cli", "options", "train",
    "evaluate", "plot", "report", "runs", "record", "clone", "doctor", "sweep", "verify", "tune",
    "slurm", "reference", "envs.__main__", "envs.origin", "runtime.env_sheet",
]  # fmt: skip


def test_light_modules_do_not_load_jax():
    names = ", ".join(f"spmdrl.{name}" for name in LIGHT)
    heavy = ["jax", "flax", "optax", "envpool", "gymnasium", "mpi4py", "mpi4jax", "matplotlib"]
    program = f"import sys, {names}; print([m for m in {heavy} if m in sys.modules])"
    assert succeed("-c", program).strip() == "[]"


def test_the_trainer_loads_without_mpi():
    """Importing the whole trainer must not touch MPI, which may be missing or broken."""
    blocked = "sys.modules['mpi4py'] = sys.modules['mpi4jax'] = None"
    succeed("-c", f"import sys; {blocked}; import spmdrl.runtime.session")
