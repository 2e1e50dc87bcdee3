"""The arithmetic of the benchmarks, by numbers worked out by hand."""

import math
import sys
from pathlib import Path

import pytest

# Last: benchmarks/profile.py must not hide the standard library's module.
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import comm
import common
import cost_model
import flags
import scaling
import trainer
from cost_model import Link, Work

LINK = Link(latency=0.001, bandwidth=1e6)  # 1 ms, 1 MB/s
FAST = Link(latency=0.001, bandwidth=1e7)


def test_interval_of_a_median():
    assert common.spread([3.0]) == common.Spread(3, 3, 3)
    assert common.spread([5, 1, 4, 2, 3]) == common.Spread(3, 1, 5)  # 94 % with all five
    # 10 values: all but one at each end still hold the median with 1 - 2 * 11 / 1024 = 98 %,
    # all but two with 1 - 2 * 56 / 1024 = 89 %, which is too little
    assert common.spread(range(10)) == common.Spread(4.5, 1, 8)


def test_brackets_are_explained():
    assert "90% confidence" in common.about_spread(5)
    assert "lowest" in common.about_spread(3)


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
        {"progress/steps": 300, "perf/sps": 50.0, "time/collect": 0.8, "time/comm": 0.4},
    ]
    timing = trainer.read_timing(rows, skip=1)
    assert timing.sps == pytest.approx(200 / 3)  # 100 steps in 1 s, then 100 in 2 s
    assert timing.period == pytest.approx(1.5)
    assert timing.phases["collect"] == pytest.approx(0.6)
    assert timing.comm == pytest.approx(0.3)
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
    assert cost_model.schedule(name, 8, 1000) == (messages, volume)
    expected = 0.001 * messages + volume / 1e6
    assert cost_model.allreduce_s(LINK, 8, 1000, name) == pytest.approx(expected)


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
    assert cost_model.algorithm(nodes, size) == name


def test_period_of_allreduce():
    work = Work(collect=1.0, update=2.0, update_more=2.0, params=250_000, rollout=10_000)
    assert cost_model.period_allreduce(work, LINK, 1) == 3.0
    # two nodes: 16 times 2 messages and 1 MB, then 6 times 1 message of 8 bytes
    expected = 3.0 + 16 * (0.002 + 1.0) + 6 * (0.001 + 8e-6)
    assert cost_model.period_allreduce(work, LINK, 2) == pytest.approx(expected)


def test_period_of_gather():
    work = Work(collect=1.0, update=2.0, update_more=1.5, params=250_000, rollout=10_000)
    # four nodes: 13 gathers of 3 messages, 3 rollouts of 10 kB, rank 0 learns for 2 + 3 * 1.5 s,
    # the parameters (1 MB) go back in 2 turns, and 6 small calls of 2 messages and 16 bytes
    expected = 1.0 + 13 * 0.003 + 0.03 + 6.5 + (0.002 + 0.2) + 6 * (0.002 + 16e-6)
    assert cost_model.period_gather(work, LINK, FAST, 4) == pytest.approx(expected)


def test_fit_finds_the_link_again():
    rows = [(m, b, LINK.time(m, b)) for m, b in [(2, 100), (2, 10_000), (4, 1e6)]]
    found = cost_model.fit_link(rows)
    assert found.latency == pytest.approx(LINK.latency)
    assert found.bandwidth == pytest.approx(LINK.bandwidth)


def test_line():
    assert cost_model.line([1, 2, 4], [3, 5, 9]) == pytest.approx((2, 3))


def made_up_measurements():
    """Two hosts behind LINK, whose update takes 2 s, and 1.5 s more for the other's rows."""
    network = []
    for size in cost_model.MICRO_BYTES:
        network.append(["allreduce", size, cost_model.allreduce_s(LINK, 2, size)])
        network.append(["gather", size, cost_model.gather_s(LINK, 2, size)])
        network.append(["broadcast", size, cost_model.broadcast_s(LINK, 2, size)])

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
    allreduce, gather = cost_model.check(made_up_measurements())
    work = Work(collect=1.0, update=2.0, update_more=1.5, params=9155, rollout=40_000)
    assert allreduce["predicted"] == pytest.approx(cost_model.period_allreduce(work, LINK, 2))
    assert gather["predicted"] == pytest.approx(cost_model.period_gather(work, LINK, LINK, 2))
    assert (allreduce["measured"], gather["measured"]) == (4.0, 10.0)


def test_document_says_what_was_missed():
    found = made_up_measurements()
    text = cost_model.document(found, cost_model.check(found), cost_model.extrapolate(found))
    # allreduce: 3 + 16 * (2 ms + 36.62 ms) + 6 ms = 3.62 s, 9 % less than the 4 s; gather: 50 %
    assert "| 9k parameters | 2 | allreduce | 3,624 | 4,000 | -9% | within 20 % |" in text
    assert "1 of 2 predictions are within 20 %" in text
    assert "missed" in text


def test_most_nodes_that_keep_a_share():
    rows = [{"nodes": 2, "gather": 0.9}, {"nodes": 4, "gather": 0.6}, {"nodes": 8, "gather": 0.4}]
    assert cost_model.most_nodes(rows, "gather", 0.8) == "2 nodes"
    assert cost_model.most_nodes(rows, "gather", 0.5) == "4 nodes"
    assert cost_model.most_nodes(rows, "gather", 0.95) == "1 node"


def test_a_flag_is_compared_within_each_round(monkeypatch):
    # Two rounds; the machine is twice as fast in the second: 0.5 both times.
    rates = iter([100.0, 50.0, 200.0, 100.0])
    seen, texts = [], []
    monkeypatch.setattr(flags, "save", lambda name, data, text: texts.append(text))

    def rate(task):
        seen.append(task.flags)
        return next(rates)

    flags.compare("costs", "--flag", [trainer.Task("a", "cartpole", 8, 16, 1, 1)], 2, rate, "Why.")
    assert seen == [(), ("--flag",), (), ("--flag",)]
    assert "| a, 8 x 16 | 150 | 75.0 | 0.50 (0.50–0.50) |" in texts[0]
    assert "with `--flag`, steps/s" in texts[0]
