"""Seconds on a GPU, predicted from what was compiled; every assumption is a number to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CARDS", "Assumptions", "Card", "predicted_s"]


@dataclass(frozen=True)
class Card:
    """What its maker says."""

    bandwidth: float  # bytes/s of its memory
    flops: float  # per second, float32 products with inputs rounded to TF32
    link: float  # bytes/s to the other GPUs of the machine, one direction


CARDS = {
    "A100": Card(bandwidth=1.555e12, flops=156e12, link=300e9),
    "H100": Card(bandwidth=3.35e12, flops=495e12, link=450e9),
}


@dataclass(frozen=True)
class Assumptions:
    """None of these was measured here."""

    launch_s: float = 4e-6  # from one kernel to the next, as long as each is shorter than that
    bandwidth_share: float = 0.7  # of what the maker says
    flops_share: float = 0.3  # small matrices fill a card badly
    collective_s: float = 20e-6  # before the first byte of a sum over GPUs travels


def predicted_s(
    row: dict[str, Any], card: Card, devices: int, given: Assumptions | None = None
) -> float:
    """Of one call of a program: launches, memory and arithmetic one after the other.

    They overlap on a card, so the truth should be between the largest of the three and their sum,
    which this is.
    """
    given = given or Assumptions()
    launching = row["launches"] * given.launch_s
    moving = row["moved_bytes"] / (card.bandwidth * given.bandwidth_share)
    computing = row["flops"] / (card.flops * given.flops_share)
    around = 2 * (devices - 1) / devices * row["collective_bytes"] / card.link
    return launching + moving + computing + around + row["collectives"] * given.collective_s
