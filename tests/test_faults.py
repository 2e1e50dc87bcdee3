"""One rank of a real job breaks, and the job ends at once; the long form is faults/trials.py."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("faults")))
from trials import FAULTS, run_trial


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "fault"), [(kind, fault) for kind, faults in FAULTS.items() for fault in faults]
)
def test_a_broken_rank_ends_the_job_and_is_named(kind, fault, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "programs"  # of all these trials
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    trial, output = run_trial(kind, fault, 2, random.Random(fault), env)
    assert trial.code != 0, output[-3000:]
    assert trial.named, output[-3000:]
    assert trial.phase, output[-3000:]
    assert trial.orphans == 0
    # How fast is the long form's business: here a machine may be busy.
    assert trial.seconds < 60, output[-3000:]
