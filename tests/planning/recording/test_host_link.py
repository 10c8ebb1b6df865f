"""Tests of the link to the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recollect.planning.recording import host_link, sampling
from recollect.planning.recording.sampling import Timing
from tests.planning._clock import Clock


def test_a_link_is_measured_again_when_it_is_stale(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []

    def timed(*_: Any) -> Timing:
        taken.append(sampling.now())
        return Timing(0.01, 0.0, sampling.now())

    monkeypatch.setattr(host_link, "_copying", timed)
    monkeypatch.setattr(host_link, "_known_links", {})
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    device = torch.device("cuda:0")
    first = host_link.measured_link(device)
    assert host_link.measured_link(device) == first
    assert len(taken) == 2
    clock.now += 301
    host_link.measured_link(device)
    assert len(taken) == 4
