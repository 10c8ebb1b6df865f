"""What is remembered of functions."""

import torch
from torch import nn

import recollect
from recollect.replay import recording_cache
from recollect.replay.recording_cache import recordings_preserved


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
