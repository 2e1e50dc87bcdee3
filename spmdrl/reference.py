"""Every config field and every metric as one page: `python -m spmdrl.reference`.

The page in docs/ is what this writes; a test keeps them equal.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spmdrl.algos import ALGORITHMS
from spmdrl.cli import answer_errors
from spmdrl.config import Config, ConfigError
from spmdrl.config.rules import Field, fields_of
from spmdrl.options import parse
from spmdrl.runtime.metric_names import METRICS

__all__ = ["main", "page"]

COMMAND = "python -m spmdrl.reference --out docs/reference.md"


@dataclass(frozen=True)
class Options:
    """Print a reference of every config field and every metric, as Markdown."""

    out: str | None = None
    """File to write; by default standard output."""


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, "reference", sys.argv[1:] if argv is None else argv)
    if options.out is None:
        sys.stdout.write(page())
        return 0
    try:
        Path(options.out).write_text(page())
    except OSError as error:
        raise ConfigError(f"--out {options.out} cannot be written ({error.strerror})") from error
    return 0


# ---------------------------------------------------------------------------------------------
# The page

INTRODUCTION = f"""\
# Reference

Every field of a config and every metric, written from the code by
`{COMMAND}`. A test fails when this page is out of date.

## Config fields

In a config file a field is `env=EnvConfig(num_envs=64)`, on the command line `--env.num-envs 64`:
a dash for every underscore. A switch is `--net.shared` or `--net.no-shared`. *Resume* says whether
a run that is resumed may be given another value; any other change is refused, with the old value
and the new one.

Some rules are about several fields. `algo.minibatches` divides `algo.num_steps`; where minibatches
are whole environments (networks with memory, Impala) it divides the environments of each device
instead. Every rank has an environment, and every device of a rank as many as the others.
`net.bptt` divides `algo.num_steps`, and a run has at least one rollout of steps. What does not fit
is answered at once, with the nearest value that does.
"""

ALGORITHM_WORDS = """\

## Algorithms

`algo` is an object whose type chooses the algorithm: `algo=Ppo(clip_eps=0.1)`, imported from
`spmdrl.algos`. Its fields are changed as `--algo.clip-eps 0.1`. [Your own](own_algorithm.md) has
the fields that you give it, besides those that all of them share: `num_steps`, `gamma`, `epochs`
and `minibatches`.
"""

METRIC_WORDS = """\

## Metrics

Each logged update is a row of `metrics.jsonl`, a line of JSON with these names. The times are those
since the row before. TensorBoard and W&B get the same numbers under the same names, over
`progress/steps`. A value that does not exist yet, such as a mean return before the first episode
has ended, is `null` in the file and left out there. A [clone](episodes.md#cloning) has
`progress/*`, `perf/sps` and `loss/nll`; an algorithm of your own reports what it names.
"""


def page() -> str:
    """The whole reference."""
    parts = [INTRODUCTION]
    for title, fields in sections():
        parts.append(f"\n### {title}\n\n{field_table(fields)}")
    parts.append(ALGORITHM_WORDS)
    for kind in ALGORITHMS:
        fields = list(described(kind(), "algo."))
        parts.append(f"\n### {kind.__name__}\n\n{field_table(fields)}")
    rows = [(f"`{metric.name}`", metric.when, metric.meaning) for metric in METRICS]
    parts += [METRIC_WORDS, "\n", table(("metric", "in", "meaning"), rows)]
    return "".join(parts)


Described = tuple[Field, str]


def sections() -> Iterator[tuple[str, list[Described]]]:
    """The run's own fields, then those of each of its parts; algorithms have a chapter."""
    whole = list(described(Config(), ""))
    parts = [f.name for f, _ in whole if dataclasses.is_dataclass(f.value) and f.name != "algo"]
    yield "The run", [row for row in whole if not dataclasses.is_dataclass(row[0].value)]
    known = {field.name: field for field in fields_of(Config())}
    for name in parts:
        rows = described(known[name].value, f"{name}.")
        # The marks of the part as a whole hold for its fields too.
        yield f"`{name}`", [(known[field.name], help) for field, help in rows]


def described(part: Any, prefix: str) -> Iterator[Described]:
    """The fields of one dataclass, without those nested in them, and their help."""
    helps = docstrings(type(part))
    for field in fields_of(part):
        if "." not in field.name:
            yield dataclasses.replace(field, name=prefix + field.name), helps.get(field.name, "")


def docstrings(kind: type) -> dict[str, str]:
    """The text below each field, of the class and of those that it derives from."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in itertools.pairwise(body.body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[field.target.id] = " ".join(str(after.value.value).split())
    return found


# ---------------------------------------------------------------------------------------------
# Tables


def field_table(rows: Iterable[Described]) -> str:
    head = ("field", "type", "default", "must be", "resume", "meaning")
    return table(head, [_row(field, help) for field, help in rows])


def _row(field: Field, help: str) -> tuple[str, ...]:
    rules = "; ".join(allowed.rule for allowed in field.ranges)
    may_change = "may change" if field.free else ""
    return f"`{field.name}`", kind_words(field.type), _shown(field.value), rules, may_change, help


def kind_words(hint: Any) -> str:
    """A type as a reader of the page would say it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return kind_words(args[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(kind_words(arg) for arg in args)
    if origin is tuple:
        return {"text": "several words"}.get(kind_words(args[0]), f"{kind_words(args[0])}s")
    if origin is dict:
        return "names with values"
    names = {"int": "whole number", "float": "number", "str": "text", "bool": "switch"}
    return "nothing" if hint is type(None) else names.get(hint.__name__, hint.__name__)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`"
    return f"`{value}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in r] for r in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
