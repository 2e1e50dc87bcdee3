"""Code that the user brings along: a config file is Python, with whatever it imports and registers.

Environments and algorithms defined there must be known wherever the run has a process, so each of
them executes the same file.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["execute", "executed"]

_executed: list[str] = []


def execute(file: Path) -> ModuleType:
    """The file as a module of its own name, so that classes defined in it can be found again."""
    spec = importlib.util.spec_from_file_location(f"config_file_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.resolve().parent))  # a variant imports its base by name
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    _executed.append(str(file.resolve()))
    return module


def executed() -> list[str]:
    """The config files that this process has executed: a process it starts has to as well."""
    return list(dict.fromkeys(_executed))
