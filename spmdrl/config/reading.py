"""From a config file and the flags after it to a `Config`.

A config file is Python that defines `config = Config(...)` or `get_config()`; every field can be
overridden on the command line by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from spmdrl.config import own_code
from spmdrl.config.option_flags import read_pairs, take_options
from spmdrl.config.rules import ConfigError, check_fields, fields_of
from spmdrl.config.schema import Config
from spmdrl.config.typed_words import as_typed, check_known

__all__ = ["load", "read_file", "with_flags"]

PATIENCE_S = 2.0  # a config file takes milliseconds, with an import of jax a second
RENAMED = {"overlap": "lag=1"}  # fields that config files may still have


def load(argv: Sequence[str]) -> Config:
    """The config named by the first argument, changed by the flags after it."""
    path, flags = _split(argv)
    default = read_file(path) if path else Config()
    if path and not default.name:
        default = dataclasses.replace(default, name=Path(path).stem)
    if path is None and not _asks_for_help(flags):
        raise ConfigError(
            "the first argument must be a config file; for example: "
            "python -m spmdrl.train configs/cartpole.py"
        )
    return with_flags(default, flags, f"python -m spmdrl.train {path or 'CONFIG.py'}")


def with_flags(default: Config, flags: Sequence[str], prog: str) -> Config:
    """The config, changed by the flags of a command that is called `prog`."""
    flags, options = take_options(flags, default.env.options)
    kinds = {f.name: f.type for f in fields_of(default) if not dataclasses.is_dataclass(f.value)}
    flags = as_typed(flags, kinds)
    _check_flags(flags, default)
    check_known(flags, kinds, free=("--env.options",))
    import tyro  # not needed by those who only read a saved config

    config = tyro.cli(Config, default=default, args=flags, prog=prog, registry=_shows_options())
    return dataclasses.replace(config, env=dataclasses.replace(config.env, options=options))


def _shows_options() -> Any:
    """For tyro's help, which would give each option of the config file a flag and no other could
    be added."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    def rule(info: Any) -> Any:
        if info.type != dict[str, Any]:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="NAME=VALUE ...",
            instance_from_str=read_pairs,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{k}={json.dumps(v)}" for k, v in value.items()],
        )

    registry = ConstructorRegistry()
    registry.primitive_rule(rule)
    return registry


def _split(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    if argv and not argv[0].startswith("-"):
        return argv[0], list(argv[1:])
    return None, list(argv)


def _asks_for_help(flags: Sequence[str]) -> bool:
    return "-h" in flags or "--help" in flags


def _check_flags(flags: Sequence[str], config: Config) -> None:
    """Two mistakes for which tyro names no remedy: a right name in the wrong part of the config,
    and a value after a yes-or-no field."""
    types_of = {f.name: f.type for f in fields_of(config) if not dataclasses.is_dataclass(f.value)}
    words = [part for flag in flags for part in flag.split("=", 1)]
    for flag, value in itertools.pairwise([*words, "--"]):
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            continue
        elsewhere = [k for k in types_of if k.rpartition(".")[2] == name.rpartition(".")[2]]
        if name not in types_of and elsewhere:
            choices = " or ".join("--" + k.replace("_", "-") for k in elsewhere)
            raise ConfigError(f"there is no field {flag}; did you mean {choices}?")
        if types_of.get(name) is bool and not value.startswith("-"):
            part, dot, last = flag.removeprefix("--").rpartition(".")
            raise ConfigError(
                f"{name} takes no value, but {value!r} follows it; write {flag} for yes and "
                f"--{part}{dot}no-{last} for no"
            )


def read_file(path: str) -> Config:
    """What the config file defines, before any flags."""
    file = Path(path)
    if not file.is_file():
        what = "is not a file" if file.exists() else "does not exist"
        raise ConfigError(f"config file {path} {what}{_similar_file(file)}")
    try:
        with _watched(path):
            module = own_code.execute(file)
            config = module.get_config() if hasattr(module, "get_config") else _config_in(module)
    except Exception as error:
        raise ConfigError(f"config file {path} failed: {_explain(error, file)}") from error
    except SystemExit as leaving:  # else a run would end, finished by the look of its exit code
        raise ConfigError(
            f"config file {path} ended by sys.exit({leaving.code!r}); it must only define things"
        ) from leaving
    except GeneratorExit as error:
        raise ConfigError(f"config file {path} failed: GeneratorExit") from error
    if not isinstance(config, Config):
        raise ConfigError(
            f"config file {path} must define `config = Config(...)` or `get_config()` that "
            f"returns one; found {type(config).__name__}"
        )
    check_fields(config)
    return config


@contextlib.contextmanager
def _watched(path: str) -> Iterator[None]:
    """Say it when the file runs for long, and take `os._exit` for what it is: exit code 0 means
    that a training has finished."""

    def say() -> None:
        said = f"spmdrl: config file {path} has been running for {PATIENCE_S:.0f} s"
        print(said, file=sys.stderr, flush=True)

    leave, owner = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != owner:  # a child that the file has forked
            leave(status)
        raise SystemExit(status)

    timer = threading.Timer(PATIENCE_S, say)
    timer.daemon = True
    timer.start()
    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave
        timer.cancel()


def _config_in(module: ModuleType) -> object:
    return getattr(module, "config", None)


def _explain(error: Exception, file: Path) -> str:
    """Type, text and line of the config file, and the field that a wrong name resembles."""
    text = f"{type(error).__name__}: {error}"
    folder = str(file.resolve().parent)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if str(Path(f.filename).resolve().parent) == folder]
    if lines and not isinstance(error, SyntaxError):  # which says its line itself
        text += f" ({lines[-1].filename}, line {lines[-1].lineno})"
    wrong = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if wrong and wrong[2] in RENAMED:
        return f"{text}; write {RENAMED[wrong[2]]}"
    return text + (_instead(wrong[1], wrong[2]) if wrong else "")


def _instead(cls: str, name: str) -> str:
    """The field that a wrong name resembles, else all that there are."""
    known = _fields_of_class(cls)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; {cls} has {', '.join(known)}"


def _fields_of_class(name: str) -> list[str]:
    """The fields of one of our dataclasses, an algorithm's included; else those of all."""
    parts = [Config(), *(f.value for f in fields_of(Config()) if dataclasses.is_dataclass(f.value))]
    chosen = [part for part in parts if type(part).__name__ == name] or parts
    return [f.name for part in chosen for f in dataclasses.fields(part)]


def _similar_file(file: Path) -> str:
    folder = file.parent if file.parent.is_dir() else Path("configs")
    names = [str(p) for p in sorted(folder.glob("*.py"))]
    close = difflib.get_close_matches(str(file), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
