"""What one call of a compiled program does on a GPU, read from XLA's text of it.

Every instruction that is left at the top of a computation is one launch: a fusion is one kernel, a
library call at least one. Bodies of loops count as often as the loop runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Work", "flops", "read_program"]

LAUNCHED = {
    "fusion", "custom-call", "copy", "sort", "dot", "convolution", "reduce", "scatter", "gather",
    "transpose", "select-and-scatter", "rng-bit-generator", "cholesky", "copy-start",
    "reduce-window",
}  # fmt: skip
COLLECTIVES = {
    "all-reduce", "all-reduce-start", "all-gather", "all-gather-start", "reduce-scatter",
    "collective-permute", "collective-permute-start", "all-to-all",
}  # fmt: skip
CALLS = {"call", "conditional", "async-start"}
SLICES = {"dynamic-slice", "gather", "slice"}  # they read as much as they give
BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4,
    "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip

HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
CALLEES = re.compile(
    r"(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    op: str
    rest: str  # operands and attributes
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest[: _closing(self.rest)])

    @property
    def callees(self) -> list[str]:
        found = [one or many for one, many in CALLEES.findall(self.rest)]
        return [name.strip(" %") for names in found for name in names.split(",")]

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return sum(
            BYTES.get(kind, 0) * math.prod(int(n) for n in dims.split(",") if n)
            for kind, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", self.shape)
        )


@dataclass
class Work:
    """Of one call; `loops` has the trip counts, None where only the device knows."""

    kinds: Counter[str] = field(default_factory=Counter)
    loops: list[int | None] = field(default_factory=list)
    collectives: int = 0
    collective_bytes: int = 0
    copies: int = 0  # launches that only move data
    moved_bytes: int = 0  # read and written, caches apart

    @property
    def launches(self) -> int:
        return sum(self.kinds.values())


def read_program(text: str) -> Work:
    """From `compiled.as_text()`."""
    program, work = _Program(text), Work()
    program.add(program.entry, 1, work)
    return work


def _closing(text: str) -> int:
    """Where the bracket ends that was open before the text."""
    depth = 1
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return place
    return len(text)


class _Program:
    def __init__(self, text: str):
        self.bodies: dict[str, dict[str, Instruction]] = {}
        self.entry = name = ""
        for line in text.splitlines():
            head = HEAD.match(line)
            if head:
                name = head[2]
                self.bodies[name] = {}
                self.entry = name if head[1] else self.entry
                continue
            found = INSTRUCTION.match(line)
            if found and name:
                root, key, shape, op, rest = found.groups()
                self.bodies[name][key] = Instruction(key, shape, op, rest, bool(root))

    def add(self, body: str, times: int, work: Work) -> None:
        """What this computation does, so many times."""
        for one in self.bodies.get(body, {}).values():
            if one.op == "while":
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest)
                count = int(trips[1]) if trips else None
                work.loops.append(count)
                inner = re.search(r"body=%?([\w.\-]+)", one.rest)
                self.add(inner[1] if inner else "", times * (count or 1), work)
            elif one.op in CALLS:
                for callee in one.callees:
                    self.add(callee, times, work)
            elif one.op in LAUNCHED | COLLECTIVES:
                self._add_launch(body, one, times, work)

    def _add_launch(self, body: str, one: Instruction, times: int, work: Work) -> None:
        target = re.search(r'custom_call_target="([^"]+)"', one.rest)
        work.kinds[target[1] if target else one.op] += times
        moves = one.op in ("copy", "copy-start", "transpose")
        if moves or (one.op == "fusion" and re.search("copy|transpose", one.name)):
            work.copies += times
        if one.op in COLLECTIVES:
            work.collectives += times
            work.collective_bytes += times * sum(self._sizes(body, one))
        work.moved_bytes += times * (self._read(body, one) + self._written(one))

    def _sizes(self, body: str, one: Instruction) -> list[int]:
        known = self.bodies[body]
        return [known[name].size if name in known else 0 for name in one.operands]

    def _read(self, body: str, one: Instruction) -> int:
        sizes = self._sizes(body, one)
        if one.op != "fusion":
            return sum(sizes)
        inside = self.bodies.get(one.callees[0], {}) if one.callees else {}
        parameters = {
            int(x.rest.split(")")[0]): x.name for x in inside.values() if x.op == "parameter"
        }
        return sum(self._read_of(inside, parameters.get(i, ""), n) for i, n in enumerate(sizes))

    def _read_of(self, inside: dict[str, Instruction], parameter: str, size: int) -> int:
        """Of one operand of a fusion: all, unless only slices of it are looked at."""
        users = [x for x in inside.values() if parameter in x.operands]
        if users and all(x.op in SLICES and x.operands[0] == parameter for x in users):
            return min(size, sum(x.size for x in users))
        in_place = [x for x in users if x.op == "dynamic-update-slice"]
        if users and len(in_place) == len(users) and users[0].operands[0] == parameter:
            return 0  # what is not replaced stays where it is
        return size

    def _written(self, one: Instruction) -> int:
        inside = self.bodies.get(one.callees[0], {}) if one.op == "fusion" and one.callees else {}
        roots = [x for x in inside.values() if x.is_root]
        if roots and roots[0].op == "dynamic-update-slice":
            update = roots[0].operands[1]
            return inside[update].size if update in inside else one.size
        return one.size


# ---------------------------------------------------------------------------------------------
# Arithmetic, from the traced program: there every loop says how often it runs


def flops(jaxpr: Any) -> int:
    """Of the matrix products and convolutions, on one device."""
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * _results(equation) * math.prod(shape[i] for i in contracted)
        elif name == "conv_general_dilated":
            kernel, layout = equation.invars[1].aval.shape, params["dimension_numbers"].rhs_spec
            taps = math.prod(kernel) // kernel[layout[0]]
            # A dilated input is mostly zeros, which no library multiplies.
            total += 2 * _results(equation) * taps // math.prod(params["lhs_dilation"])
        times = params.get("length", 1) if name == "scan" else 1
        total += times * sum(flops(inner) for inner in _inner(params))
    return total


def _results(equation: Any) -> int:
    return math.prod(equation.outvars[0].aval.shape)


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns"):
                yield one
            elif hasattr(getattr(one, "jaxpr", None), "eqns"):
                yield one.jaxpr
