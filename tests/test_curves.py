"""Several seeds as one curve with a band: by hand, by numpy and against scipy."""

import numpy as np
import pytest
import scipy.stats

from spmdrl.curves.statistics import CENTERS, Curve, combine, difference, interval, smoothed


def curve(x, y) -> Curve:
    return Curve(np.asarray(x, float), np.asarray(y, float))


@pytest.mark.parametrize("count", range(1, 13))
def test_the_iqm_is_the_trimmed_mean(count):
    values = np.random.default_rng(count).normal(size=(count, 7))
    assert CENTERS["iqm"](values) == pytest.approx(scipy.stats.trim_mean(values, 0.25, axis=0))


def test_a_single_run_is_as_it_is():
    series = combine([curve([1, 2, 3], [4, 6, 5])])
    assert series.x.tolist() == [1, 2, 3]
    assert series.center.tolist() == [4, 6, 5]
    assert series.low is None
    assert series.high is None


def test_curves_that_share_their_points_are_not_interpolated():
    series = combine([curve([1, 2, 4], [0, 2, 4]), curve([1, 2, 4], [2, 2, 8])])
    assert series.x.tolist() == [1, 2, 4]
    assert series.center.tolist() == [1, 2, 6]
    assert series.low is not None
    assert series.high is not None
    assert (series.low[1], series.high[1]) == (2, 2)
    assert series.low[2] < 6 < series.high[2]


def test_curves_of_other_points_are_compared_where_both_are():
    series = combine([curve([0, 10], [0, 10]), curve([2, 6, 8], [4, 8, 10])])
    assert (series.x[0], series.x[-1]) == (2, 8)
    assert series.center == pytest.approx(series.x + 1)


def test_long_curves_are_thinned_to_what_a_picture_shows():
    x = np.arange(10_000.0)
    for curves in ([curve(x, x)], [curve(x, x), curve(x, x)], [curve(x, x), curve(x + 0.5, x)]):
        series = combine(curves)
        assert len(series.x) <= 500
        assert series.x[-1] == pytest.approx(9_999, abs=1)


def test_the_interval_is_that_of_the_bootstrap():
    values = np.random.default_rng(1).normal(5.0, 2.0, 12)
    ours = interval(values.tolist())
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert ours.center == pytest.approx(values.mean())
    assert ours.low == pytest.approx(theirs.low, abs=0.1)
    assert ours.high == pytest.approx(theirs.high, abs=0.1)
    assert interval(values.tolist()) == ours, "the same picture at every call"


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    found = [interval(rng.normal(size=20).tolist()) for _ in range(200)]
    hits = [i.low is not None and i.high is not None and i.low < 0 < i.high for i in found]
    assert 0.88 <= np.mean(hits) <= 0.98


def test_a_difference_is_the_second_taken_from_the_first():
    one = difference([5.0, 6.0, 7.0], [1.0, 2.0, 3.0])
    assert one.center == pytest.approx(4.0)
    assert one.low is not None
    assert one.high is not None
    assert 2.0 <= one.low < 4.0 < one.high <= 6.0
    assert difference([5.0], [1.0, 2.0]).low is None


def test_smoothing_keeps_a_slope_and_the_ends():
    slope = curve(range(9), range(9))
    assert smoothed(slope, 5).y == pytest.approx(slope.y)
    assert smoothed(slope, 1) is slope
    bump = smoothed(curve(range(5), [0, 0, 9, 0, 0]), 3)
    assert bump.y == pytest.approx([0, 3, 3, 3, 0])
