"""Samples that agree."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from recollect.planning.recording import sampling
from recollect.planning.recording.sampling import Timing, sampled, timing_of
from tests.planning._clock import TICK, Clock

pytestmark = pytest.mark.usefixtures("no_bound")


def test_outliers_do_not_count(clock: Clock) -> None:
    for order in itertools.permutations([TICK, 1000 * TICK, 1000 * TICK]):
        found = itertools.cycle(order)
        result = sampled(lambda found=found: [next(found)])
        assert result.seconds == TICK
        assert result.is_steady
        assert result.spread == 0


def test_sampling_stops_as_soon_as_samples_agree(clock: Clock) -> None:
    taken: list[float] = []

    def sample() -> list[float]:
        taken.append(1.0)
        return [1.0]

    assert sampled(sample, seconds=100).seconds == 1.0
    assert len(taken) == 3


@pytest.mark.parametrize(("limits", "count"), [({"most": 7}, 7), ({"seconds": 4.0}, 3)])
def test_sampling_ends_if_they_never_agree(clock: Clock, limits: Any, count: int) -> None:
    taken = [2.0**n for n in range(20)]
    found = iter(taken)
    result = sampled(lambda: [next(found)], **{"seconds": math.inf, **limits})
    assert next(found) == taken[count]
    assert result.seconds == 1.0
    assert result.spread == pytest.approx(1.0, abs=1e-5)
    assert not result.is_steady


def test_of_a_device_a_low_quantile_counts(clock: Clock) -> None:
    found = timing_of([9.0, 1.0, 1.01, 1.02, 0.5], low=0.25)
    assert found.seconds == 1.0
    assert found.is_steady


def test_long_samples_have_to_agree_by_half(clock: Clock) -> None:
    # Two of them were lucky: of such a machine nothing is known.
    samples = [1.0, 1.0, 4.0, 4.1, 4.2, 5.0]
    assert timing_of(samples).is_steady
    assert timing_of(samples, long=True).spread == pytest.approx(3.1)
    assert timing_of([1.0, 1.01, 1.02, 7.0, 9.0], long=True).is_steady


def test_nothing_is_known_of_a_single_sample(clock: Clock) -> None:
    assert not timing_of([1.0]).is_steady


def test_a_link_is_measured_again_when_it_is_stale(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []

    def timed(*_: Any) -> Timing:
        taken.append(sampling.now())
        return Timing(0.01, 0.0, sampling.now())

    monkeypatch.setattr(sampling, "_copying", timed)
    monkeypatch.setattr(sampling, "_known_links", {})
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    device = torch.device("cuda:0")
    first = sampling.measured_link(device)
    assert sampling.measured_link(device) == first
    assert len(taken) == 2
    clock.now += 301
    sampling.measured_link(device)
    assert len(taken) == 4
