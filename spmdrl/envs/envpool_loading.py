"""envpool, with only the family of environments that is needed.

`import envpool` registers all of its families, some of which bring drawing libraries along: that
takes longer than everything else before the first step.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from spmdrl.envs.ids import envpool_families

__all__ = ["load_envpool"]

ENTRY = "envpool.entry"  # imports every family


def load_envpool(env_id: str | None = None) -> ModuleType:
    """The package, with the family of this id, or with all of them."""
    family = envpool_families().get(env_id or "")
    if family is None:
        return _with_all_families()
    if "envpool" not in sys.modules:
        sys.modules[ENTRY] = ModuleType(ENTRY)
    envpool = importlib.import_module("envpool")
    importlib.import_module(f"{family}.registration")
    return envpool


def _with_all_families() -> ModuleType:
    if not hasattr(sys.modules.get(ENTRY), "__file__"):
        sys.modules.pop(ENTRY, None)
        importlib.import_module(ENTRY)
    return importlib.import_module("envpool")
