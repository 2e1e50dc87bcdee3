"""A killed run is not a lost run; the long form is tests/faults/kills.py."""

from __future__ import annotations

import pytest

from tests.faults.kills import run_trials


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.slow)]
)
def test_killed_runs_end_like_the_one_that_was_not(ranks, tmp_path):
    # Seeds that kill by the update reached: by the clock, a fast run may be over before.
    trials = run_trials(2, ranks, tmp_path, first_seed=5)
    assert sum(t.kills for t in trials) >= 2
    assert all(t.held for t in trials)
