"""The logic of the throughput, start-up, memory, report and check commands; nothing is timed."""

import json
import os
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

# Last: benchmarks/profile.py must not hide the standard library's module.
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import check
import compile as start_up
import import_clock
import limits
import memory
import report
import throughput
from throughput import Case, Setting

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
    choices = limits.random_actions(ActionSpace("discrete", (), np.dtype("i4"), (3,), 1), 50, 4)
    assert choices.shape == (50, 4)
    assert set(choices.ravel()) == {1, 2, 3}
    low, high = np.array([-1.0, 0.0]), np.array([0.0, 5.0])
    box = ActionSpace("box", (2,), np.dtype("f8"), low=low, high=high)
    forces = limits.random_actions(box, 50, 4)
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


def test_update_alone_goes_on_and_on():
    worker = limits.Worker(limits.Bounds("cartpole", envs=2, steps=8, workers=1))
    worker.prepare("learn")
    assert worker.measure("learn", seconds=0.0) > 0


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
    rates = {OURS: [], RAW: [], SLOW: []}
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


def made_up_case():
    rates = {OURS: [40.0], RAW: [100.0], LEARN: [100.0]}
    machine = {"when": "2030-01-02 03:04", "load_average": 0.1}
    return throughput.summarize(CASE, rates) | {"machine": machine}


def test_throughput_table():
    text = throughput.report(throughput.joined({}, CASE.name, made_up_case()), "Made by hand.")
    assert "| CartPole 8 | 40.0 (40.0–40.0) | 100 (100–100) | 100 (100–100) | – |" in text
    assert "| envpool, then update | 80% (80%–80%) | – |" in text
    assert "2030-01-02 03:04" in text


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


def test_start_table_says_whether_the_goal_is_met():
    fast, slow = (start_up.Start(t, 1.0, 0.5, 0.5) for t in (3.5, 9.0))
    found = {"MLP": {"1": {"cold": start_up.summarize([slow]), "warm": start_up.summarize([fast])}}}
    text = start_up.report(found, 1, "Made by hand.")
    assert "| MLP | 1 | warm | 3.50 (3.50–3.50) | 2.50 (2.50–2.50) |" in text
    assert text.count("| 3 | yes |") == 1


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
    base, each = memory.line([0, 1024, 2048], [100, 101, 102])
    assert (base, each) == (pytest.approx(100), pytest.approx(1.0))


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


def test_inline_marks():
    assert report.inline("a **b** `<c> *d*` & *e f*") == (
        "a <strong>b</strong> <code>&lt;c&gt; *d*</code> &amp; <em>e f</em>"
    )
    assert report.inline("2 * 3 * 4") == "2 * 3 * 4"


def test_numbers_stand_on_the_right():
    assert report.numeric(["1,234 (1–2)", "–", "86% (82%–89%)"])
    assert report.numeric(["+4.2", "-9%"])
    assert not report.numeric(["1 rank", "2 ranks"])
    assert not report.numeric(["–", ""])
    found = report.table_html(["| a | b |", "|---|---|", "| x | 1.5 |"])
    assert '<th>a</th><th class="number">b</th>' in found
    assert '<td>x</td><td class="number">1.5</td>' in found


def test_blocks():
    text = "One\nparagraph.\n\n### Head\n- a\n  b\n- c\n```\n<x>\n```\n"
    assert report.to_html(text).split("\n") == [
        "<p>One paragraph.</p>", "<h3>Head</h3>", "<ul><li>a b</li><li>c</li></ul>",
        "<pre><code>&lt;x&gt;</code></pre>",
    ]  # fmt: skip


class Nesting(HTMLParser):
    """Every element that is opened is closed, in order."""

    VOID = ("meta", "img", "br")

    def __init__(self):
        super().__init__()
        self.open, self.links, self.ids, self.sources = [], [], [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.links += [found["href"]] if "href" in found else []
        self.ids += [found["id"]] if "id" in found else []
        self.sources += [found["src"]] if "src" in found else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_whole_and_needs_nothing_else(tmp_path):
    (tmp_path / "scaling.md").write_text("Made by hand.\n\n| a | b |\n|---|---|\n| x | 1 |\n")
    (tmp_path / "other_thing.md").write_text("Text.\n")
    (tmp_path / "scaling.png").write_bytes(b"\x89PNG")
    machine = {"when": "2030-01-02 03:04", "cpu": "C", "cores": 2, "system": "S",
               "load_average": 0.5, "versions": {"jax": "1"}}  # fmt: skip
    (tmp_path / "scaling.json").write_text(json.dumps({"machine": machine}))
    text = report.page(report.sections(tmp_path))
    parser = Nesting()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert parser.ids == ["scaling", "other_thing"]
    assert parser.links == ["#scaling", "#other_thing"]
    assert all(source.startswith("data:image/png;base64,") for source in parser.sources)
    assert "Measured 2030-01-02 03:04; C, 2 cores" in text
    assert "prefers-color-scheme: dark" in text


def test_interrupted_results_have_a_machine():
    assert report.machine_of({"cases": {"a": {"machine": {"cores": 2}}}}) == {"cores": 2}
    assert report.machine_of([1]) == {}
