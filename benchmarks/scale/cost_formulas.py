"""How long one update takes on so many nodes: formulas, and the network's part fitted to times.

A message of n bytes takes latency + n / bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "MINIBATCHES",
    "Link",
    "Work",
    "allreduce_s",
    "broadcast_s",
    "fit_all",
    "gather_s",
    "line",
    "period_allreduce",
    "predict",
]

MINIBATCHES = 16
FIELDS = 13  # arrays of a rollout, each gathered by itself
# The ranks' record, the episodes that ended, the algorithm's sums before the minibatches.
SMALL_CALLS = 3


@dataclass(frozen=True)
class Link:
    latency: float  # seconds
    bandwidth: float  # bytes a second

    def time(self, messages: float, volume: float) -> float:
        """So many messages one after the other that carry `volume` bytes together."""
        return messages * self.latency + volume / self.bandwidth


def algorithm(nodes: int, size: int) -> str:
    """What Open MPI 5 picks for an allreduce by its fixed rules, where these are simple.

    They are for 16 KB and more; below, only the tiny messages of this trainer matter.
    """
    if size < 4096:
        return "recursive doubling"
    if nodes < 4:
        return "ring" if size < 1 << 18 else "rabenseifner"
    if 64 <= nodes < 256 and size < 1 << 18:
        return "reduce and broadcast" if nodes >= 128 and size < 1 << 17 else "recursive doubling"
    return "rabenseifner"


def schedule(name: str, nodes: int, size: int) -> tuple[float, float]:
    """Messages one after the other, and the bytes that they carry past one node."""
    turns = math.ceil(math.log2(nodes))
    if name == "ring":
        return 2 * (nodes - 1), 2 * (nodes - 1) / nodes * size
    if name == "recursive doubling":
        return turns, turns * size
    if name == "reduce and broadcast":
        return 2 * turns, 2 * turns * size
    return 2 * turns, 2 * (nodes - 1) / nodes * size  # rabenseifner: halving, then doubling


def allreduce_s(link: Link, nodes: int, size: int, name: str = "") -> float:
    return link.time(*schedule(name or algorithm(nodes, size), nodes, size))


def gather_s(link: Link, nodes: int, size: int) -> float:
    """Every node's `size` bytes through the one link of rank 0, after the lengths are known."""
    return link.time(math.ceil(math.log2(nodes)) + 1, (nodes - 1) * size)


def broadcast_s(link: Link, nodes: int, size: int) -> float:
    """A tree; a long message is cut into pieces that follow each other."""
    turns = math.ceil(math.log2(nodes))
    return link.time(turns, size * min(turns, 2))


@dataclass(frozen=True)
class Work:
    """Seconds of one node's part of an update without communication, and its sizes."""

    collect: float
    update: float
    update_more: float  # of each further node's rows, when one node learns from all
    params: int
    rollout: int  # bytes

    @property
    def alone(self) -> float:
        return self.collect + self.update


def period_allreduce(work: Work, link: Link, nodes: int, name: str = "") -> float:
    if nodes == 1:
        return work.alone
    gradients = MINIBATCHES * allreduce_s(link, nodes, 4 * work.params, name)
    return work.alone + gradients + SMALL_CALLS * allreduce_s(link, nodes, 8)


def period_gather(work: Work, link: Link, back: Link, nodes: int) -> float:
    """Rank 0 receives everything, learns from all rows, and sends the parameters back."""
    if nodes == 1:
        return work.alone
    calls = (FIELDS - 1) * gather_s(link, nodes, 0) + gather_s(link, nodes, work.rollout)
    learn = work.update + (nodes - 1) * work.update_more
    model = broadcast_s(back, nodes, 4 * work.params)
    return work.collect + calls + learn + model + SMALL_CALLS * allreduce_s(link, nodes, 8)


def fit_link(rows: Sequence[tuple[float, float, float]]) -> Link:
    """From (messages, bytes, seconds): least squares of the relative error, both at least 0."""
    matrix = np.array([[m / s, b / s] for m, b, s in rows])
    (latency, per_byte), *_ = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)
    if latency <= 0:  # lost in the noise beside the bytes
        latency, per_byte = 0.0, np.median([s / b for m, b, s in rows])
    return Link(float(latency), 1 / float(per_byte))


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope and height at x = 1 of the straight line through the points."""
    slope, height = np.polyfit(np.asarray(xs) - 1.0, ys, 1)
    return float(slope), float(height)


def fit_all(rows: Sequence[Sequence[Any]], nodes: int) -> dict[str, Link]:
    """A link for each kind of collective, from the times of its sizes."""

    def of(kind: str) -> Link:
        turns = math.ceil(math.log2(nodes))
        points = []
        for found, size, seconds in rows:
            if found == kind == "allreduce":
                points.append((*schedule(algorithm(nodes, size), nodes, size), seconds))
            elif found == kind == "gather":
                points.append((turns + 1, (nodes - 1) * size, seconds))
            elif found == kind:
                points.append((turns, size * min(turns, 2), seconds))
        return fit_link(points)

    return {kind: of(kind) for kind in ("allreduce", "gather", "broadcast")}


def predict(work: Work, links: dict[str, Link], way: str, nodes: int) -> float:
    if way == "allreduce":
        return period_allreduce(work, links["allreduce"], nodes)
    return period_gather(work, links["gather"], links["broadcast"], nodes)
