"""A thinned curve looks as the whole one."""

import random

import pytest

from recollect.report.script import thinned

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
given = hypothesis.given


def test_a_short_curve_stays_as_it_is():
    curve = [(0.0, 1), (0.5, 9), (1.0, 2)]
    assert thinned(curve, 100) == curve
    assert thinned([], 100) == []


def test_many_points_become_few_and_keep_the_extremes_of_every_bucket():
    chance = random.Random(0)
    curve = [(n / 100_000, chance.randrange(10**9)) for n in range(100_000)]
    thin = thinned(curve, 200)
    assert len(thin) <= 800
    for start in range(0, 100_000, 500):
        part = curve[start : start + 500]
        times = {time for time, _ in part}
        left = [nbytes for time, nbytes in thin if time in times]
        assert max(left) == max(nbytes for _, nbytes in part)
        assert min(left) == min(nbytes for _, nbytes in part)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=300), st.integers(1, 20))
def test_ends_peak_and_order_are_kept(heights, buckets):
    # Several changes at the same moment are usual: an op frees what it replaces.
    curve = [(n // 3 / 10, height) for n, height in enumerate(heights)]
    thin = thinned(curve, buckets)
    whole = iter(curve)
    assert all(point in whole for point in thin), "in order"
    assert (thin[0], thin[-1]) == (curve[0], curve[-1])
    assert max(thin, key=lambda p: p[1]) == max(curve, key=lambda p: p[1])
    assert len(thin) <= 4 * buckets


def test_a_curve_without_duration_is_thinned_too():
    assert thinned([(1.0, n) for n in range(50)], 5) == [(1.0, 0), (1.0, 49)]
