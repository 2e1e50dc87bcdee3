"""One rank of a real job breaks, and the job ends at once; the long form is faults/trials.py."""

from __future__ import annotations

import os
import random

import pytest

from tests.faults.places import PLACES
from tests.faults.trials import run_trial


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.kind}: {place.name}")
def test_a_broken_rank_ends_the_job_and_is_named(place, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "programs"  # of all these trials
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    trial, output = run_trial(place, 2, random.Random(place.name), env)
    assert not trial.why, output[-3000:]
    assert trial.line
    assert trial.code != 0, output[-3000:]
    assert trial.orphans == 0
    # How fast is the long form's business: here a machine may be busy.
    assert trial.seconds < 60, output[-3000:]
