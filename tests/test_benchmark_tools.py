"""The logic of the throughput, old-new, start-up, memory, report and check commands."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import report
from benchmarks.lib import assembly, import_clock, limits
from benchmarks.lib.common import ROOT, Spread
from benchmarks.lib.trainer import Task
from benchmarks.speed import check, memory, old_new, throughput
from benchmarks.speed import compile as start_up
from benchmarks.speed.throughput import Case, Setting
from spmdrl.config import load
from spmdrl.types import ActionSpace

# ---------------------------------------------------------------------------------------------
# Limits


def test_one_after_the_other():
    assert limits.harmonic(2.0, 2.0) == 1.0
    assert limits.harmonic(3.0, 6.0) == pytest.approx(2.0)
    assert limits.harmonic(5.0) == 5.0


def test_products_of_the_nature_cnn():
    found = limits.products(images=1, outputs=7)
    # multiplications: the first layer forward and for its weights, the others a third time for
    # what they hand back
    first, later = 400 * 256 * 32, [81 * 512 * 64, 49 * 576 * 64, 3136 * 512, 512 * 7]
    assert sum(m * k * n for m, k, n in found) == 2 * first + 3 * sum(later)
    assert len(found) == 2 + 3 * 4
    assert limits.products(32, 7)[1] == (256, 32 * 400, 32)  # patches transposed, times gradient


def test_worker_has_its_share():
    bounds = limits.Bounds("cartpole", envs=64, steps=32, workers=2, place=1)
    config = bounds.read()
    assert (config.env.num_envs, config.algo.num_steps) == (32, 32)
    assert (bounds.topology.rank, bounds.topology.local_size) == (1, 2)


def test_random_actions_are_valid():
    choices = assembly.random_actions(ActionSpace("discrete", (), np.dtype("i4"), (3,), 1), 50, 4)
    assert choices.shape == (50, 4)
    assert set(choices.ravel()) == {1, 2, 3}
    low, high = np.array([-1.0, 0.0]), np.array([0.0, 5.0])
    box = ActionSpace("box", (2,), np.dtype("f8"), low=low, high=high)
    forces = assembly.random_actions(box, 50, 4)
    assert forces.shape == (50, 4, 2)
    assert ((forces >= low) & (forces <= high)).all()


@pytest.mark.parametrize("way", ["xla", "python"])
def test_raw_calls_make_the_steps_they_count(way):
    worker = limits.Worker(limits.Bounds("cartpole", envs=2, steps=8, workers=1))
    worker.prepare(f"raw {way}")
    pool = worker._env.pool
    pool.reset()
    steer = np.tile(np.array([[0], [1]], np.int32), (4, 2))  # left and right: nobody falls so soon
    make = limits.raw_scan if way == "xla" else limits.raw_loop
    make(pool, steer)()
    info = pool.step(steer[0])[4]
    assert list(info["elapsed_step"]) == [9, 9]


@pytest.mark.slow
def test_update_alone_learns_from_the_made_up_rollout():
    path = str(ROOT / "configs" / "cartpole.py")
    call = assembly.update_alone(load([path, "--env.num-envs", "2", "--algo.num-steps", "8"]))
    first, second = call(), call()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(first))
    # The same rollout again, so only new parameters can change the loss.
    assert first.metrics["loss/value"] != second.metrics["loss/value"]


def test_rate_counts_all_calls_within_the_time(monkeypatch):
    worker = limits.Worker(limits.Bounds("cartpole", envs=2, steps=8, workers=1))
    now = iter([0.0, 0.0, 1.0, 2.0, 4.0])  # the start, then before each call
    monkeypatch.setattr(limits.time, "perf_counter", lambda: next(now))
    worker._calls["toy"] = (lambda: None, 100.0)
    assert worker.measure("toy", seconds=3.0) == 300 / 4


@pytest.mark.slow
def test_parts_of_an_iteration_are_all_there():
    path = str(ROOT / "configs" / "cartpole.py")
    calls = assembly.calls_of_iteration(load([path, "--algo.num-steps", "8"]))
    names = {"collect", "env", "infer", "update", "prepare", "gradient", "apply"}
    assert calls.keys() == names
    with jax.transfer_guard("disallow"):
        assert calls["collect"]().obs.shape == (8, 4, 4)
        state, _ = calls["update"]()
        assert int(jax.device_get(state.step)) == 1
        gradient = jax.tree.leaves(jax.device_get(calls["gradient"]()))
    assert all(np.isfinite(x).all() for x in gradient)
    assert any(np.any(x != 0) for x in gradient)


# ---------------------------------------------------------------------------------------------
# Throughput

CASE = Case("CartPole 8", "cartpole", 8, 128, 4, 1, "raw+learn")
OURS, RAW, LEARN = Setting("spmdrl", "", 2), Setting("raw", "xla", 2), Setting("learn", "", 1)
SLOW = Setting("raw", "python", 1)


def test_settings_cover_every_side():
    found = throughput.settings(CASE)
    assert len(found) == 2 + 4 + 2  # ours, raw from XLA and Python, learn
    image = Case("Pong 8", "pong", 8, 128, 1, 1, "raw+roof")
    assert {s.what for s in throughput.settings(image)} >= {"roof 32", "roof 256", "learn"}


def test_slow_settings_are_left_out_after_the_first_round():
    rates: dict[Any, list[float]] = {OURS: [], RAW: [], SLOW: []}
    assert throughput.promising(rates) == [OURS, RAW, SLOW]
    rates = {OURS: [10.0], RAW: [100.0], SLOW: [79.0]}
    assert throughput.promising(rates) == [OURS, RAW]
    rates[SLOW] = [81.0]
    assert throughput.promising(rates) == [OURS, RAW, SLOW]


def test_shares_are_taken_in_each_round():
    # limits of the rounds: 50, 100, 25; shares 0.8, 0.5, 0.8
    rates = {OURS: [40.0, 50.0, 20.0], RAW: [100.0, 200.0, 50.0], LEARN: [100.0, 200.0, 50.0]}
    found = throughput.summarize(CASE, rates | {SLOW: [300.0]})
    assert found["share"].median == pytest.approx(0.8)
    assert (found["share"].low, found["limit"].median) == (pytest.approx(0.5), pytest.approx(50))
    assert found["setting"]["raw"] == "XLA, 2 processes"  # not the one that was left out


def test_ranks_share_the_environments():
    one, two = CASE.task(1), CASE.task(2)
    assert (one.envs, two.envs) == (8, 4)
    run = Path("run")
    assert one.arguments(1, run)[1:] == two.arguments(2, run)[1:]


def test_long_cases_have_fewer_rounds():
    found = {case.name: case.rounds(5) for case in throughput.CASES}
    assert (found["Pong 8"], found["Pong 64"]) == (5, 3)


def test_new_cases_take_their_place_among_the_old():
    names = [case.name for case in throughput.CASES]
    known = throughput.joined({names[2]: 2}, names[0], {"share": throughput.spread([0.5])})
    assert list(known) == [names[0], names[2]]
    assert known[names[0]]["share"] == {"median": 0.5, "low": 0.5, "high": 0.5}


# ---------------------------------------------------------------------------------------------
# Old and new


def test_sides_take_turns_and_who_was_second_is_first():
    sides = [side for turn, case, side in old_new.order(["a", "b"], 4) if case == "a" and turn > 0]
    assert sides == ["old", "new", "new", "old"] * 2
    warm_up = [(case, side) for turn, case, side in old_new.order(["a", "b"], 4) if turn == 0]
    assert sorted(warm_up) == [("a", "new"), ("a", "old"), ("b", "new"), ("b", "old")]


def test_round_that_fills_the_caches_does_not_count():
    runs = {"old": iter([1.0, 100.0, 50.0]), "new": iter([9.0, 90.0, 45.0])}
    train = lambda case, side: {"sps": next(runs[side]), "start_s": 2.0}  # noqa: E731
    found = old_new.summarize(old_new.measure(["a"], 2, train))["a"]
    assert found["sps"]["ratio"] == Spread(0.9, 0.9, 0.9)
    assert found["sps"]["old"].median == 75
    assert found["start_s"]["ratio"].median == 1


def test_speed_of_a_run_is_the_median_of_its_later_rows():
    rows = [{"perf/sps": sps} for sps in (1.0, 2.0, 80.0, 100.0, 500.0)]
    assert old_new.row_median(rows, skip=2) == 100


@pytest.mark.parametrize(
    ("ratio", "more_is_better", "verdict"),
    [
        (Spread(0.90, 0.85, 0.94), True, "slower"),
        (Spread(0.90, 0.85, 0.96), True, "unclear"),  # reaches into the band
        (Spread(0.97, 0.90, 1.02), True, "same"),
        (Spread(1.20, 1.10, 1.30), True, "faster"),
        (Spread(1.20, 1.10, 1.30), False, "slower"),  # seconds
        (Spread(0.80, 0.70, 0.90), False, "faster"),
    ],
)
def test_slower_means_the_whole_interval_is_beyond_the_band(ratio, more_is_better, verdict):
    assert old_new.verdict(ratio, 0.05, more_is_better) == verdict


def test_noise_band_is_read_from_the_last_control(tmp_path):
    summary = {"a": {"sps": {"ratio": Spread(0.96, 0.9, 1.0)},
                     "start_s": {"ratio": Spread(1.001, 1.0, 1.1)}}}  # fmt: skip
    assert old_new.known_bands(tmp_path / "none.json") == {}
    file = tmp_path / "old_new_control.json"
    file.write_text(json.dumps({"summary": summary}, default=vars))
    band = old_new.known_bands(file)
    assert band == {("a", "sps"): pytest.approx(0.04), ("a", "start_s"): old_new.LEAST_BAND}
    slower = {"a": {"sps": {"ratio": Spread(0.955, 0.95, 0.958)}}}
    assert old_new.judge(slower, band) == {("a", "sps"): "slower"}
    assert old_new.judge(slower, {}) == {("a", "sps"): "same"}  # within the assumed band


def run_old_new(monkeypatch, tmp_path, *argv):
    saved: list[tuple[Any, ...]] = []
    monkeypatch.setattr(old_new, "save", lambda name, data, text: saved.append((name, data, text)))
    monkeypatch.setattr(old_new, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["old_new", *map(str, argv)])
    return old_new.main(), saved


@pytest.mark.parametrize("argv", [(ROOT,), ("missing",), ("missing", "--control")])
def test_a_tree_that_is_none_or_this_one_is_refused(monkeypatch, tmp_path, argv):
    with pytest.raises(SystemExit) as refused:
        run_old_new(monkeypatch, tmp_path, *argv)
    assert refused.value.code == 2


def test_a_tree_whose_code_is_not_imported_is_refused(tmp_path):
    """An empty package would leave the installed one in its place, and old would be new."""
    (tmp_path / "spmdrl").symlink_to(ROOT / "spmdrl")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    with pytest.raises(old_new.BadTree, match="not the one that Python imports"):
        old_new.Side(tmp_path, tmp_path / "cache").check([])


@pytest.mark.nightly  # it measures, so it needs a machine that does nothing else
def test_a_tree_that_starts_later_is_found(monkeypatch, tmp_path):
    """Real runs: the copy differs only in a pause when it is imported."""
    for name in ("spmdrl", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    with (tmp_path / "spmdrl" / "__init__.py").open("a") as file:
        file.write("\nimport time\n\ntime.sleep(8)\n")
    tiny = Task("tiny", "cartpole", envs=8, steps=16, updates=3, skip=1)
    monkeypatch.setattr(old_new, "CASES", {"tiny": tiny})
    flags = ("--cases", "tiny", "--rounds", "1")
    code, ((name, data, text),) = run_old_new(monkeypatch, tmp_path, ROOT, tmp_path, *flags)
    assert (code, name) == (1, "old_new")
    (old,), (new,) = (data["runs"]["tiny"][side] for side in ("old", "new"))
    assert 8 < new["start_s"] < 60
    assert old["start_s"] < new["start_s"] - 4
    assert old["sps"] > 100
    assert new["sps"] > 100
    assert str(tmp_path) not in text
    assert str(ROOT) not in text


# ---------------------------------------------------------------------------------------------
# Start-up and memory


def test_imports_within_imports_count_once():
    clock = import_clock.ImportClock()
    inner = clock._import

    def nested(name, *args, **kwargs):
        if name == "outer":
            clock("inner")
            import_clock.time.sleep(2 * import_clock.SHORTEST_S)
        return inner("os")

    clock._import = nested
    clock("outer")
    assert len(clock.spans) == 1


def test_imports_after_the_first_update_do_not_count():
    assert import_clock.seconds_before([(10.0, 1.5), (12.0, 0.5), (20.0, 4.0)], 15.0) == 2.0


def test_start_is_read_from_the_first_row(tmp_path):
    row = {"time/collect": 1.0, "time/update": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    os.utime(tmp_path / "metrics.jsonl", (1010.0, 1010.0))
    (tmp_path / "alone.json").write_text("[[1001.0, 0.5]]")
    (tmp_path / "0.json").write_text("[[1003.0, 2.0], [1011.0, 9.0]]")
    clocks = [tmp_path / "alone.json", tmp_path / "0.json"]
    start = start_up.read_start(tmp_path, clocks, began=1000.0)
    assert start == start_up.Start(total=10.0, imports=2.5, collect=1.0, update=2.0)
    assert start.after_imports == 7.5


def test_processes_of_a_run():
    assert memory.family(1, {1: 0, 2: 1, 3: 2, 4: 9}) == {1, 2, 3}
    assert memory.field("Name:\tpython\nVmHWM:\t  2048 kB\n", "VmHWM") == 2048
    assert memory.field("Name:\tpython\n", "VmHWM") is None
    environ = "A=1\0OMPI_COMM_WORLD_RANK=1\0"
    assert memory.rank_of(environ, 2) == 1
    assert memory.rank_of("A=1\0", 2) is None  # mpirun, and who started it
    assert memory.rank_of("A=1\0", 1) == 0


def test_own_peak_is_found():
    peaks = memory.Peaks(os.getpid(), ranks=1)
    peaks.look()
    assert peaks.of_rank[0] > 10


def test_line_through_the_memory():
    assert memory.line([0, 1024, 2048], [100, 101, 102]) == pytest.approx((100, 1.0))


# ---------------------------------------------------------------------------------------------
# Check


def share(median, half):
    return {"median": median, "low": median - half, "high": median + half}


@pytest.mark.parametrize(
    ("now", "before", "verdict"),
    [
        (share(0.80, 0.01), share(0.80, 0.01), "same"),
        (share(0.73, 0.01), share(0.80, 0.01), "same"),  # intervals apart, but less than 10 %
        (share(0.70, 0.01), share(0.80, 0.01), "worse"),
        (share(0.60, 0.15), share(0.80, 0.10), "same"),  # noisy: up to 0.75 and down to 0.70
        (share(0.90, 0.01), share(0.80, 0.01), "better"),
        (None, share(0.80, 0.01), "not measured"),
        (share(0.80, 0.01), None, "not in the baseline"),
    ],
)
def test_noise_band(now, before, verdict):
    assert check.verdict(now, before) == verdict


def run_check(monkeypatch, tmp_path, *argv):
    monkeypatch.setattr(check, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["check.py", "--against", str(tmp_path / "base.json"), *argv])
    return check.main()


def write_shares(tmp_path, **medians):
    cases = {n: {"share": share(m, 0.01), "machine": {}} for n, m in medians.items()}
    (tmp_path / "throughput.json").write_text(json.dumps({"cases": cases}))


def test_check_ends_with_1_for_what_is_worse_or_missing(monkeypatch, tmp_path, capsys):
    write_shares(tmp_path, a=0.8, b=0.9)
    assert run_check(monkeypatch, tmp_path, "--write") == 0
    assert run_check(monkeypatch, tmp_path) == 0
    write_shares(tmp_path, a=0.5, b=0.9, c=0.7)
    assert run_check(monkeypatch, tmp_path) == 1
    out = capsys.readouterr().out
    assert "1 of 3 cases failed: a" in out
    assert "not in the baseline" in out
    write_shares(tmp_path, a=0.8)
    assert run_check(monkeypatch, tmp_path) == 1
    assert "1 of 2 cases failed: b" in capsys.readouterr().out


def test_check_without_a_baseline_says_what_to_do(monkeypatch, tmp_path):
    write_shares(tmp_path, a=0.8)
    with pytest.raises(SystemExit, match="--write"):
        run_check(monkeypatch, tmp_path)


# ---------------------------------------------------------------------------------------------
# Report


def test_page_holds_tables_pictures_and_when_it_was_measured(tmp_path):
    (tmp_path / "scaling.md").write_text("# Top\n\n| a | b |\n|---|---|\n| <x> | **1** |\n")
    (tmp_path / "other_thing.md").write_text("Text.\n")
    (tmp_path / "scaling.png").write_bytes(b"\x89PNG")
    machine = {"when": "2030-01-02 03:04", "cpu": "C", "cores": 2, "system": "S",
               "load_average": 0.5, "versions": {"jax": "1"}}  # fmt: skip
    (tmp_path / "scaling.json").write_text(json.dumps({"machine": machine}))
    text = report.page(report.sections(tmp_path))
    assert text.index('<section id="scaling">') < text.index('<section id="other_thing">')
    assert "<h3>Top</h3>" in text  # below the section's own
    assert "<td>&lt;x&gt;</td>\n<td><strong>1</strong></td>" in text
    assert 'src="data:image/png;base64,iVBORw=="' in text
    assert "Measured 2030-01-02 03:04; C, 2 cores" in text


def test_interrupted_results_have_a_machine():
    assert report.machine_of({"cases": {"a": {"machine": {"cores": 2}}}}) == {"cores": 2}
    assert report.machine_of([1]) == {}
