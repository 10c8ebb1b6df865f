"""A recording under another schedule is what would have been recorded under that one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from recollect.planning.recording.batch import split_batch
from recollect.replay.engine import observe_region
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recorded_graph import RecordedOp
from recollect.replay.recording import Recording
from tests.planning._models import CASES, made


def recorded(name: str, by: NamedSchedule) -> tuple[Recording, Any]:
    """A call of a case, always the same, recorded under a schedule."""
    case = made(name)
    args, kwargs = split_batch(case.batch, case.model)
    torch.manual_seed(1)
    out, recording = observe_region(
        case.model.forward, args, kwargs, lambda recorder, remat: (recorder.pack, remat.unpack), by
    )
    return recording, out


def some_results(recording: Recording, seed: int) -> NamedSchedule:
    """A schedule that keeps some results of some ops."""
    draw = random.Random(seed)
    ops = [op for op in recording.graph.ops if op.key is not None and draw.random() < 0.5]
    kept = [
        (str(op.key), tuple(n for n in range(len(op.makes)) if draw.random() < 0.8)) for op in ops
    ]
    return NamedSchedule(tuple(kept))


def decisions(op: RecordedOp) -> tuple[Any, ...]:
    return op.key, op.planned, op.arrivals, op.keep is None, op.later, op.is_lost, op.ruling


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_recorded(name: str) -> None:
    first, _ = recorded(name, NamedSchedule())
    for seed in range(3):
        by = some_results(first, seed)
        ours, theirs = first.under(by), recorded(name, by)[0]
        assert [*map(decisions, ours.graph.ops)] == [*map(decisions, theirs.graph.ops)]
        assert vars(ours.schedule) == vars(theirs.schedule)
        # And back: nothing of the first recording has changed.
        again = ours.under(NamedSchedule())
        assert again.schedule.kept == first.schedule.kept
        assert again.schedule.order == first.schedule.order
