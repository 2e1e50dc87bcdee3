"""What several files of tests ask for; what they start in a process is in tests/children.py."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import pytest


def reference(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses deprecated names of jax when imported
        return importlib.import_module(name)


@pytest.fixture(scope="session")
def rlax() -> ModuleType:
    return reference("rlax")


@pytest.fixture(scope="session")
def distrax() -> ModuleType:
    return reference("distrax")
