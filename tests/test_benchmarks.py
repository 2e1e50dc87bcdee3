"""The arithmetic of the benchmarks, by numbers worked out by hand."""

import math
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cost import ab
from benchmarks.lib import common, trainer
from benchmarks.scale import comm, cost_formulas, predictions, scaling, scaling_page
from benchmarks.scale.cost_formulas import Link, Work
from benchmarks.scale.network_rank import MICRO_BYTES
from spmdrl.config import load

README = common.ROOT / "benchmarks" / "README.md"
LINK = Link(latency=0.001, bandwidth=1e6)  # 1 ms, 1 MB/s
FAST = Link(latency=0.001, bandwidth=1e7)


def test_interval_of_a_median():
    assert common.spread([3.0]) == common.Spread(3, 3, 3)
    assert common.spread([5, 1, 4, 2, 3]) == common.Spread(3, 1, 5)  # 94 % with all five
    # 10 values: all but one at each end still hold the median with 1 - 2 * 11 / 1024 = 98 %,
    # all but two with 1 - 2 * 56 / 1024 = 89 %, which is too little
    assert common.spread(range(10)) == common.Spread(4.5, 1, 8)


def test_cases_take_turns():
    assert common.in_turns(["a", "b"], 2) == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234.5, "1,234"), (99.5, "99.5"), (0.0123, "0.0123"), (3, "3.00")],
)
def test_numbers_keep_three_digits(value, text):
    assert common.number(value) == text


def test_bytes_of_an_update():
    assert comm.allreduce_bytes(1000) == 64_000  # 4 bytes, 16 minibatches
    assert comm.network_bytes(2, 1000) == 128_000  # there and back
    assert comm.network_bytes(4, 1000) == 384_000
    # a step: 4 floats of observation, 4 floats, 4 flags, an int; an environment: the last
    # observation, a flag and an id
    assert comm.rollout_bytes("vector", 128) == 128 * (16 + 16 + 4 + 4) + 16 + 1 + 4
    assert comm.rollout_bytes("image", 128) == 128 * (28_224 + 24) + 28_224 + 5


def test_crossover_between_two_points():
    assert comm.crossover([10, 20, 40], [1, 3, 4], other=2) == (15, True)
    assert comm.crossover([10, 20, 40], [1, 3, 4], other=3.5) == (30, True)


def test_crossover_beyond_the_points():
    assert comm.crossover([10, 20, 40], [1, 3, 4], other=5) == (60, False)
    assert comm.crossover([10, 20], [2, 3], other=1.5) == (5, False)
    assert comm.crossover([10, 20], [20, 21], other=1) == (0, False)  # gather is never cheaper
    assert comm.crossover([10, 20], [3, 3], other=1) == (0, False)
    assert comm.crossover([10, 20], [3, 3], other=4) == (math.inf, False)


def test_efficiency():
    assert scaling.efficiency(together=180, alone=100, ranks=2) == 0.9


def test_timing_leaves_out_the_first_rows_and_the_last():
    rows = [
        {"progress/steps": 100, "perf/sps": 1.0, "time/collect": 90.0},
        {"progress/steps": 200, "perf/sps": 100.0, "time/collect": 0.4, "time/comm": 0.2},
        {
            "progress/steps": 300,
            "perf/sps": 50.0,
            "time/collect": 0.8,
            "time/comm": 0.4,
            "time/save": 0.3,
        },
    ]
    timing = trainer.read_timing(rows, skip=1)
    assert timing.sps == pytest.approx(200 / 3)  # 100 steps in 1 s, then 100 in 2 s
    assert timing.period == pytest.approx(1.5)
    assert timing.phases["collect"] == pytest.approx(0.6)
    assert timing.comm == pytest.approx(0.3)
    assert timing.saving == pytest.approx(0.1)  # 0.3 s of 3 s
    assert trainer.read_timing(rows, skip=1, tail=1).sps == pytest.approx(100)


@pytest.mark.parametrize(
    ("name", "messages", "volume"),
    [
        ("ring", 14, 1750),
        ("recursive doubling", 3, 3000),
        ("reduce and broadcast", 6, 6000),
        ("rabenseifner", 6, 1750),
    ],
)
def test_messages_of_an_allreduce_over_eight_nodes(name, messages, volume):
    assert cost_formulas.schedule(name, 8, 1000) == (messages, volume)
    expected = 0.001 * messages + volume / 1e6
    assert cost_formulas.allreduce_s(LINK, 8, 1000, name) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("nodes", "size", "name"),
    [
        (2, 36_620, "ring"),
        (2, 40_000_000, "rabenseifner"),
        (8, 36_620, "rabenseifner"),
        (64, 36_620, "recursive doubling"),
        (128, 36_620, "reduce and broadcast"),
        (1024, 36_620, "rabenseifner"),
        (1024, 8, "recursive doubling"),
    ],
)
def test_algorithm_that_mpi_picks(nodes, size, name):
    assert cost_formulas.algorithm(nodes, size) == name


def test_period_of_allreduce():
    work = Work(collect=1.0, update=2.0, update_more=2.0, params=250_000, rollout=10_000)
    assert cost_formulas.period_allreduce(work, LINK, 1) == 3.0
    # two nodes: 16 times 2 messages and 1 MB, then 3 times 1 message of 8 bytes
    expected = 3.0 + 16 * (0.002 + 1.0) + 3 * (0.001 + 8e-6)
    assert cost_formulas.period_allreduce(work, LINK, 2) == pytest.approx(expected)


def test_period_of_gather():
    work = Work(collect=1.0, update=2.0, update_more=1.5, params=250_000, rollout=10_000)
    # four nodes: 13 gathers of 3 messages, 3 rollouts of 10 kB, rank 0 learns for 2 + 3 * 1.5 s,
    # the parameters (1 MB) go back in 2 turns, and 3 small calls of 2 messages and 16 bytes
    expected = 1.0 + 13 * 0.003 + 0.03 + 6.5 + (0.002 + 0.2) + 3 * (0.002 + 16e-6)
    assert cost_formulas.period_gather(work, LINK, FAST, 4) == pytest.approx(expected)


def test_fit_finds_the_link_again():
    rows = [(m, b, LINK.time(m, b)) for m, b in [(2, 100), (2, 10_000), (4, 1e6)]]
    found = cost_formulas.fit_link(rows)
    assert found.latency == pytest.approx(LINK.latency)
    assert found.bandwidth == pytest.approx(LINK.bandwidth)


def test_line():
    assert cost_formulas.line([1, 2, 4], [3, 5, 9]) == pytest.approx((2, 3))


def made_up_measurements():
    """Two hosts behind LINK, whose update takes 2 s, and 1.5 s more for the other's rows."""
    network = []
    for size in MICRO_BYTES:
        network.append(["allreduce", size, cost_formulas.allreduce_s(LINK, 2, size)])
        network.append(["gather", size, cost_formulas.gather_s(LINK, 2, size)])
        network.append(["broadcast", size, cost_formulas.broadcast_s(LINK, 2, size)])

    def run(way, hosts, update, period):
        row = {"task": "9k parameters", "way": way, "hosts": hosts}
        return row | {"seconds": {"collect": 1.0, "update": update}, "period": period}

    runs = [run("alone", 1, 2.0, 3.0), run("alone", 2, 2.0, 3.0), run("more rows", 2, 3.5, 5.0)]
    runs += [run("allreduce", 2, 3.0, 4.0), run("gather", 2, 6.0, 10.0)]
    return {
        "network": {"2": network}, "runs": runs, "sizes": {"9k parameters": [8, 125, 4]},
        "delay_by": "netem", "machine": {"cores": 2}, "made_by": "Made by hand.",
    }  # fmt: skip


def test_check_holds_predictions_against_measured_periods():
    allreduce, gather = predictions.check(made_up_measurements())
    work = Work(collect=1.0, update=2.0, update_more=1.5, params=9155, rollout=40_000)
    assert allreduce["predicted"] == pytest.approx(cost_formulas.period_allreduce(work, LINK, 2))
    assert gather["predicted"] == pytest.approx(cost_formulas.period_gather(work, LINK, LINK, 2))
    assert (allreduce["measured"], gather["measured"]) == (4.0, 10.0)


def test_page_counts_what_the_model_missed():
    found = made_up_measurements()
    checks, rows = predictions.check(found), predictions.extrapolate(found)
    text = scaling_page.document(found, checks, rows)
    # allreduce: 3 + 16 * (2 ms + 36.62 ms) + 3 ms = 3.62 s, 9 % less than the 4 s; gather: 50 %
    assert "| 9k parameters | 2 | allreduce | 3,621 | 4,000 | -9% | within 20 % |" in text
    assert "1 of 2 predictions are within 20 %" in text
    checks[1]["predicted"] = checks[1]["measured"]
    assert "2 of 2 predictions" in scaling_page.document(found, checks, rows)


def test_a_feature_is_compared_with_its_neighbour_in_time():
    # Two rounds; the machine is twice as fast in the second: 0.5 both times.
    rates = iter([100.0, 50.0, 200.0, 100.0])
    seen = []

    class Toy(ab.Comparison):
        def run(self, trainer, task):
            seen.append(task.flags)
            return common_timing(next(rates))

    task = trainer.Task("a", "cartpole", 8, 16, 1, 1)
    nobody: Any = None  # Toy asks no trainer
    runs = ab.measure(Toy(("--flag",), [task], ""), 2, nobody, "toy")
    assert seen == [(), ("--flag",), (), ("--flag",)]
    found = ab.summarize(runs["a"])
    assert found["ratio"] == common.Spread(0.5, 0.5, 0.5)
    assert (found["without"].median, found["with"].median) == (150.0, 75.0)


def common_timing(sps):
    return trainer.Timing(sps, period=1.0)


@pytest.mark.parametrize("name", ab.COMPARISONS)
def test_every_feature_has_flags_that_the_trainer_knows(name):
    chosen = ab.COMPARISONS[name]
    for task in chosen.tasks:
        plain, other = (
            load(of.arguments(1, Path("run"))[3:]) for of in (task, task.with_flags(*chosen.flags))
        )
        assert plain != other
        assert plain.num_updates == task.skip + task.updates + task.tail


def test_the_command_is_shown_as_it_was_typed(monkeypatch):
    about = {"cores": 2, "cpu": "C", "load_average": 0.0,
             "versions": dict.fromkeys(("jax", "envpool", "mpi4jax"), "1")}  # fmt: skip
    spec = types.SimpleNamespace(name="benchmarks.peers.__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["x", "/some/tree", "--rounds", "3"])
    text = common.made_by(about, {"/some/tree": "OLD_TREE"})
    assert text.startswith("Made by `python -m benchmarks.peers OLD_TREE --rounds 3` on 2 cores")


# ---------------------------------------------------------------------------------------------
# The package


COMMANDS = re.findall(r"`(?:sudo )?python -m (benchmarks\.\w+)[^`]*`", README.read_text())


def test_the_page_lists_every_command():
    folder = README.parent
    found = {
        "peers" if file.name == "comparison.py" else file.stem
        for file in [*folder.glob("*.py"), *folder.glob("*/*.py")]
        if "arguments(__doc__)" in file.read_text() and not file.stem.endswith("_rank")
    }
    assert {name.partition(".")[2] for name in COMMANDS} == found


@pytest.mark.parametrize("name", sorted(set(COMMANDS)))
def test_every_command_of_the_page_explains_itself(name):
    command = [sys.executable, "-m", name, "--help"]
    answer = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert f"python -m {name}" in answer.stdout


def test_no_two_modules_have_the_same_short_name():
    files = [f for name in ("speed", "scale", "cost", "peers", "gpu") for f in
             (README.parent / name).glob("*.py") if not f.stem.startswith("__")]  # fmt: skip
    names = [file.stem for file in files]
    assert len(names) > 10
    assert len(names) == len(set(names))
