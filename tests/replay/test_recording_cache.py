"""What is remembered of functions."""

import torch
from torch import nn
from torch.profiler import record_function

import recollect
from recollect.replay import recording_cache
from recollect.replay.recording_cache import CacheEntry, recordings_preserved


def slots(owner):
    return list(recording_cache._entries.get(owner, {}).values())


def test_recordings_are_put_back():
    known, unknown = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    recollect.checkpoint(known, x, engine="replay")
    (entry,) = slots(known)
    recording = entry.recording
    with recordings_preserved():
        (copy,) = slots(known)
        assert copy is not entry
        assert copy.recording is recording
        copy.recording = None
        recollect.checkpoint(unknown, x, engine="replay")
        assert len(slots(unknown)) == 1
    assert slots(known) == [entry]
    assert entry.recording is recording
    assert slots(unknown) == []


def test_a_recording_under_another_schedule_may_differ_once_more():
    """It is no call of this kind, so that it differs says nothing of those."""
    module, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    recollect.checkpoint(module, x, engine="replay")
    (known,) = slots(module)
    entry = CacheEntry()
    entry.give(known.recording)
    for _ in range(2):
        entry.checked("another function")
        assert entry.unsettled is None
    entry.checked("another function")
    assert entry.unsettled is not None


class Profiled(nn.Module):
    """Marks its parts for a profiler."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        for number in range(3):
            with record_function(f"block {number}"):
                x = x + self.down(torch.sin(self.up(x)))
        return x


def test_ranges_of_a_profiler_are_recorded_once():
    model, x = Profiled(), torch.ones(4, 16, requires_grad=True)
    for _ in range(3):
        recollect.checkpoint(model, x, engine="replay").sum().backward()
        (entry,) = slots(model)
        assert entry.recording is not None
        assert entry.recording is entry._last
        assert entry.unsettled is entry.difference is None


def test_ranges_of_a_profiler_under_a_plan_are_recorded_once():
    model, x = Profiled(), torch.ones(64, 16)
    frontier = recollect.frontier(model, x)
    plan = frontier.plan_for((frontier.least + frontier.plain_peak) // 2)
    plan.apply(model)
    model(x).sum().backward()
    entries = slots(model)
    recordings = [entry.recording for entry in entries]
    model.zero_grad()  # with gradients it would be another step
    model(x).sum().backward()
    assert entries
    assert [entry.recording for entry in slots(model)] == recordings
    assert all(entry.unsettled is entry.difference is None for entry in entries)
