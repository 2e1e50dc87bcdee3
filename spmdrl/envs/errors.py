"""What goes wrong inside an environment, told so that its author finds the place."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from spmdrl.config.own_code import explain

__all__ = ["EnvError", "explain", "listed", "raised"]

PACKAGE = str(Path(__file__).parents[1])


class EnvError(RuntimeError):
    """An environment raised, died or is silent: which one, when, and below it its own traceback.

    The traceback of the trainer says nothing about it. The environment's is a note of the exception
    and never a format string: source lines may have a % in them.
    """

    def __init__(self, headline: str, details: str = ""):
        super().__init__(headline)
        self.details = details
        if details:
            self.add_note(details)

    def report(self) -> str:
        """Headline and details, without any frame of the trainer."""
        return f"{self}\n{self.details}" if self.details else str(self)


def raised(who: str, error: BaseException) -> EnvError:
    """What to tell about an exception from the environment's own code."""
    frames = _of_the_environment(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return EnvError(f"{who} raised {type(error).__name__}: {error}", text)


def _of_the_environment(frames: TracebackType | None) -> TracebackType | None:
    """Without the frames before the environment's own code."""
    rest = frames
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(PACKAGE):
        rest = rest.tb_next
    return rest or frames


def listed(ids: Sequence[int]) -> str:
    """environment 3; environments 4 to 7."""
    if len(ids) == 1:
        return f"environment {ids[0]}"
    return f"environments {ids[0]} to {ids[-1]}"
