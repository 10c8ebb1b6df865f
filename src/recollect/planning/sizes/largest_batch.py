"""``recollect.largest_batch``: the largest batch that fits into a budget, and how fast it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recollect._torch.fsdp import is_shared
from recollect.checks.place import hide_own_frames
from recollect.planning.budget import check_budget, is_fraction, resolve_budget
from recollect.planning.prepare import Offload, Request, check_unplanned
from recollect.planning.progress import Progress, reporter
from recollect.planning.recording.step import Loss, device_of
from recollect.planning.sizes.forecast import SizedSteps
from recollect.planning.sizes.largest import LargestBatch, LargestSearch

#: The largest size that is considered: if memory does not grow, the search has to end somewhere.
MOST = 2**20


def largest_batch(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    budget: float | str = "auto",
    *,
    time: float | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    offload: Offload = "auto",
    holds_output: bool = True,
    multiple_of: int = 1,
    most: int = MOST,
    progress: bool | Progress | None = None,
) -> LargestBatch:
    """Find the largest batch for which a plan fits into a budget, and how fast it is.

    The plain step is recorded at a few sizes that fit without a plan, small ones first. They show
    how memory grows with the size, from which the largest size is predicted. Its plan is then made
    and tried, as by `recollect.plan`. Except for the first step, no step runs that is predicted to
    exceed the budget by more than 1%. Everything is restored, as by `recollect.plan`, including
    random streams that ``make_batch`` draws from.

    Args:
        model: The model to train.
        make_batch: ``make_batch(n)`` returns a batch of size ``n``, as `recollect.plan` takes it.
            ``n`` may be the number of samples, or the length of sequences: a "sample" is then an
            element of a sequence.
        budget: The highest allowed peak of bytes: a number, ``"12GiB"``, ``"8GB"``, or ``"auto"``:
            what the device has.
        time: The limit on the time per sample, as a multiple of plain's, such as 1.2; None: no
            limit. The time per sample is the measured time of a step divided by its size. Plain's
            is measured right after it, at the largest size that fits without a plan. If time
            limits the size, the size is found to within 2%.
        loss: As in `recollect.plan`.
        optimizer: Its state and what its step allocates count too.
        offload: As in `recollect.plan`.
        holds_output: As in `recollect.plan`.
        multiple_of: Only multiples of it are considered.
        most: The largest size that is considered.
        progress: True: show progress, as a bar if tqdm is installed, else in lines. Or a function
            of the current stage (a text) and the fraction done.

    Raises:
        InfeasibleBudget: Not even the smallest size fits. Says the least feasible budget for it.

    Example::

        found = recollect.largest_batch(model, lambda n: torch.randn(n, 64), "12GiB", time=1.2)
        print(found)
        found.plan.apply(model)
    """
    check_bytes(budget)
    check_count(multiple_of, "multiple_of")
    check_count(most, "most")
    check_time(time)
    if most < multiple_of:
        raise ValueError(
            f"most={most} is less than multiple_of={multiple_of}, so there is no size to consider"
        )
    report = reporter(progress)
    request = Request(model, None, loss, optimizer, offload, holds_output)
    steps = SizedSteps(request, make_batch, report)
    check_unplanned(model, runs_steps=False)
    if is_shared(model):
        raise ValueError(
            "model: its parameters are distributed over processes, and sizes are looked for in one "
            "process. recollect.plan(model, batch, budget) on every rank says whether a size fits"
        )
    limit = resolve_budget(budget, 0, device_of(model))
    try:
        return LargestSearch(steps, limit, time, int(multiple_of), int(most), report).run()
    except Exception as error:
        hide_own_frames(error)
        raise


def check_bytes(budget: Any) -> None:
    """Refuse an invalid budget, and one that depends on the size."""
    check_budget(budget)
    if is_fraction(budget):
        raise ValueError(
            f"budget={budget!r} is a fraction of the plain step's peak, which grows with the size "
            "that is looked for. Give bytes, as budget='12GiB', or 'auto': what the device has"
        )


def check_count(value: Any, name: str = "it") -> None:
    """Refuse what is no count from 1 on."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} should be a whole number, but got {value!r}")
    if value < 1:
        raise ValueError(f"{name} should be 1 or more, but is {value!r}")


def check_time(time: Any) -> None:
    """Refuse an invalid limit on time."""
    if time is None:
        return
    if isinstance(time, bool) or not isinstance(time, Real):
        raise TypeError(
            "time should be a multiple of plain's time per sample, such as 1.2, or None, but got "
            f"{time!r}"
        )
    if not 1 <= float(time) < math.inf:
        raise ValueError(
            f"time={time!r} should be 1 or more: it is a multiple of plain's time per sample, such "
            "as 1.2. A plan is not faster than plain"
        )
