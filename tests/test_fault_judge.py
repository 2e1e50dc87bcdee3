"""The judge of the fault trials can fail: on a healthy run, and on every report that is wrong."""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import asdict, replace

import pytest

from spmdrl.parallel.spawn import mpirun_command
from tests.children import ROOT, train_command
from tests.faults.judge import KINDS, PHASES, Fault, judge
from tests.faults.places import PLACES, SIZES, places_of
from tests.faults.trials import Moment, Trial, judged, read

TRACEBACK = """Traceback (most recent call last):
  File "spmdrl/runtime/loop.py", line 91, in train
    rollout, episodes = collector.collect(state, key)
                        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
AFTER = """
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD
  Proc: [[34158,1],1]
--------------------------------------------------------------------------
prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort".
"""
# Of each kind: what was done, and the report, with {rank}, {update} and {phase} left open.
CASES: dict[str, tuple[Fault, str]] = {
    "death": (
        Fault("death", 4, 1, ("collect",), (5, 7)),
        "spmdrl: rank {rank} of 4 on node3 (pid 4711) died (killed, or by os._exit) in update "
        "{update}, phase {phase}; the job ends. The same command resumes from a checkpoint\n",
    ),
    "exception": (
        Fault("exception", 4, 1, ("collect",), (7, 7), "RuntimeError: the environment broke"),
        "spmdrl: rank {rank} of 4 on node3 failed in update {update}, phase {phase}:\n"
        + TRACEBACK
        + "RuntimeError: the environment broke\n",
    ),
    "hang": (
        Fault("hang", 4, 1, ("collect",), (5, 7)),
        "spmdrl: rank 3 of 4 on node3 has been in update 7, phase wait for 4 s, longer than its "
        "limit of 4 s. Rank {rank} has been silent for 4 s, since {phase} of update {update}. "
        "Raise --sync.phase-timeout-s if that is expected.\n",
    ),
    "not finite": (
        Fault("not finite", 4, 1, ("update",), (7, 7), "observation"),
        "spmdrl: rank {rank} of 4 on node3 failed in update {update}, phase {phase}:\n"
        + TRACEBACK
        + "spmdrl.parallel.guards.NotFiniteError: non-finite observation on rank {rank} in update "
        "{update}; the parameters were not changed. Look at the environment\n",
    ),
    "flipped bit": (
        Fault("flipped bit", 4, 1, ("check",), (7, 7)),
        "spmdrl: rank {rank} of 4 on node3 failed in update {update}, phase {phase}:\n"
        + TRACEBACK
        + "spmdrl.parallel.guards.OutOfSync: parameters or optimiser state differ on rank {rank} "
        "device 0; memory or a library is faulty there\n",
    ),
    "different config": (
        Fault("different config", 4, 1, ("start",), says="command line"),
        "spmdrl: rank {rank} on node3 and rank 0 on node1 have different command line (phase "
        "{phase}): ['a', '--seed', '77'] against ['a']. Start all ranks with the same command\n",
    ),
    "different jax": (
        Fault("different jax", 4, 1, ("start",), says="versions"),
        "spmdrl: rank {rank} on node3 and rank 0 on node1 have different versions (phase {phase}): "
        "jax 0.0.1 against 0.10.2. Start all ranks with the same command\n",
    ),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def report(kind: str, rank: int = 1, update: int = 7, phase: str | None = None) -> str:
    fault, text = CASES[kind]
    return text.format(rank=rank, update=update, phase=phase or fault.phases[0])


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> str:
    """All that a run of two ranks prints in which nothing breaks."""
    run_dir = tmp_path_factory.mktemp("healthy") / "run"
    command = train_command(*SIZES, "--total-steps", 3 * 8 * 16, "--run-dir", run_dir)
    done = subprocess.run(
        [*mpirun_command(2), *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    for rank in (0, 1):  # which is why that alone proves nothing
        assert f"rank {rank}" in done.stdout
    return done.stdout


def test_every_place_has_a_kind_and_every_kind_a_place_and_a_case():
    assert {place.kind for place in PLACES} == set(KINDS) == set(CASES)
    assert all(places_of(kind) for kind in KINDS)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_healthy_run_is_no_report_of_any_fault(place, healthy):
    for rank in (0, 1):
        verdict = judged(place, 2, rank, Moment(0.0, (0, 10**6)), healthy + AFTER)
        assert not verdict.good
        assert verdict.line == ""


@EVERY_KIND
def test_the_right_report_is_found_among_everything_else(kind, healthy):
    verdict = judge(CASES[kind][0], healthy + report(kind) + AFTER)
    assert verdict.good, verdict.why
    assert verdict.line.startswith("spmdrl: rank ")
    assert "rank 1" in verdict.line.lower()


@EVERY_KIND
def test_open_mpi_may_leave_a_null_before_the_report(kind, healthy):
    verdict = judge(CASES[kind][0], healthy + AFTER + "\0" + report(kind))
    assert verdict.good, verdict.why
    assert verdict.line.startswith("spmdrl: rank ")


@EVERY_KIND
def test_another_rank_is_wrong(kind, healthy):
    for rank in (0, 2, 3, 11):
        assert not judge(CASES[kind][0], healthy + report(kind, rank=rank) + AFTER).good


@EVERY_KIND
def test_another_phase_is_wrong(kind, healthy):
    for phase in set(PHASES) - set(CASES[kind][0].phases):
        assert not judge(CASES[kind][0], healthy + report(kind, phase=phase) + AFTER).good


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("different")])
def test_another_update_is_wrong(kind, healthy):
    for update in (0, 4, 8, 77):
        assert not judge(CASES[kind][0], healthy + report(kind, update=update) + AFTER).good


@EVERY_KIND
def test_a_report_that_does_not_start_its_line_is_wrong(kind, healthy):
    assert not judge(CASES[kind][0], healthy + "rank 1: " + report(kind) + AFTER).good


@EVERY_KIND
def test_a_second_report_about_another_rank_is_wrong(kind, healthy):
    for innocent in (0, 2):
        other = report(kind, rank=innocent)
        assert not judge(CASES[kind][0], healthy + report(kind) + other + AFTER).good
        assert not judge(CASES[kind][0], healthy + other + report(kind) + AFTER).good
        failed = f"spmdrl: rank {innocent} of 4 on node3 failed in update 7, phase update:\n"
        assert not judge(CASES[kind][0], healthy + report(kind) + failed + AFTER).good


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hang"])
def test_the_same_report_twice_is_wrong(kind, healthy):
    verdict = judge(CASES[kind][0], healthy + 2 * report(kind) + AFTER)
    assert "2 reports instead of 1" in verdict.why


def test_all_ranks_that_wait_may_name_the_one_that_hangs():
    assert judge(CASES["hang"][0], 3 * report("hang")).good
    assert not judge(CASES["hang"][0], 2 * report("hang") + report("hang", rank=2)).good


@EVERY_KIND
def test_a_traceback_too_many_is_wrong(kind):
    assert not judge(CASES[kind][0], report(kind) + TRACEBACK).good


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("not finite", "on rank 1 in", "on rank 0, rank 1 in"),
        ("not finite", "on rank 1 in", "on rank 1, rank 2 in"),
        ("not finite", "non-finite observation", "non-finite reward"),
        ("not finite", "Look at", "Look at rank 2 and"),
        ("flipped bit", "on rank 1 device 0", "on rank 1 device 0, rank 2 device 0"),
        ("flipped bit", "on rank 1 device 0", "on rank 0 device 0, rank 1 device 0"),
        ("exception", "the environment broke", "the learner broke"),
        ("death", "the job ends", "the job ends; so was rank 2"),
        ("hang", "Raise", "Rank 2 is furthest behind: wait of update 7. Raise"),
        ("different jax", "versions", "devices"),
    ],
)
def test_a_report_that_says_something_else_besides_is_wrong(kind, right, wrong):
    fault = CASES[kind][0]
    assert right in report(kind)
    assert judge(fault, report(kind)).good
    assert not judge(fault, report(kind).replace(right, wrong)).good


def test_an_innocent_rank_must_not_report_what_the_ranks_agree_on():
    for kind in ("not finite", "flipped bit"):
        text = report(kind).replace("spmdrl: rank 1 of 4", "spmdrl: rank 0 of 4")
        assert not judge(CASES[kind][0], text).good


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("reporter", [0, 1])
def test_of_two_ranks_that_differ_both_are_named(guilty, reporter):
    """Nothing can tell which of them is wrong."""
    fault = replace(CASES["flipped bit"][0], ranks=2, rank=guilty)
    text = report("flipped bit", rank=reporter).replace("of 4", "of 2")
    one = f"on rank {reporter} device 0"
    assert not judge(fault, text).good
    assert judge(fault, text.replace(one, "on rank 0 device 0, rank 1 device 0")).good


def test_a_rank_killed_before_its_first_heartbeat_is_named_by_the_launcher():
    text = (
        "spmdrl: received SIGTERM in phase start, from you or because a rank has ended\n"
        "prterun noticed that process rank 1 with PID 4711 on node vm exited on\n"
        "signal 9 (Killed).\n"
    )
    fault = CASES["death"][0]
    early = replace(fault, before_heartbeat=True)
    assert judge(early, text).good
    assert judge(early, report("death")).good
    assert not judge(fault, text).good
    assert not judge(early, text.replace("process rank 1", "process rank 2")).good
    assert not judge(early, text + report("death", rank=2)).good


def test_a_fault_that_never_happened_fails_its_trial():
    (place,) = [place for place in PLACES if place.name == "raise"]
    verdict = judged(place, 4, 1, None, report("exception"))
    assert not verdict.good
    assert verdict.why == "the fault never happened"


GOOD = Trial("death", "SIGKILL", 2, 1, 0.5, 137, "spmdrl: rank 1 of 2 ...", "", 0)


def test_a_trial_holds_only_when_all_is_well():
    assert GOOD.held
    for wrong in (
        {"seconds": 5.1}, {"seconds": float("inf")}, {"code": 0}, {"line": ""},
        {"why": "2 reports instead of 1"}, {"orphans": 1},
    ):  # fmt: skip
        assert not replace(GOOD, **wrong).held


def test_trials_of_older_rules_are_not_counted(tmp_path):
    file = tmp_path / "faults.jsonl"
    old = {"kind": "SIGKILL", "fault": "kill", "ranks": 2, "rank": 0, "named": True, "phase": True}
    rows = [old, asdict(GOOD), asdict(replace(GOOD, judge=1))]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(file) == [GOOD]


def test_only_ranks_that_can_be_guilty_are_chosen():
    rng, chosen = random.Random(0), {}
    for place in PLACES:
        chosen[place.name] = {place.choose_rank(4, rng) for _ in range(200)}
    assert chosen["SIGKILL"] == {0, 1, 2, 3}
    assert chosen["logger"] == {0}
    assert chosen["config"] == chosen["version"] == {1, 2, 3}
