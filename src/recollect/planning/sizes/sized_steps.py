"""A training step at several sizes: ``make_batch(size)``, checked, and a planner for it (P1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from recollect.planning.planner import Planner, Record
from recollect.planning.prepare import Request, prepare_step
from recollect.planning.progress import Progress
from recollect.planning.recording.batch import check_batch, split_batch, tensors_of_batch
from recollect.planning.recording.model_state import check_model
from recollect.planning.recording.record import record_step
from recollect.report.units import bytes_text
from recollect.state.rng import read_streams, settle_streams, write_streams


class SizedSteps:
    """The training steps of a model with batches of several sizes.

    Holds no batch: on a device one would count in the peak of all other sizes.

    Args:
        request: The steps, without a batch.
        make_batch: Makes the batch of a size.
        progress: Called with what is being done.
    """

    def __init__(
        self, request: Request, make_batch: Callable[[int], Any], progress: Progress
    ) -> None:
        if not callable(make_batch):
            raise TypeError(
                "make_batch should be a function of a size that returns a batch of that size, such "
                f"as lambda n: torch.randn(n, 64), but got {type(make_batch).__name__}"
            )
        self.model = request.model
        check_model(self.model)
        self._request = request
        self._make_batch = make_batch
        self._progress = progress
        #: By size: the bytes of the tensors in its batch.
        self._nbytes: dict[int, int] = {}

    def planner(self, size: int, record: Record = record_step) -> Planner:
        """A planner for the step at a size, which is recorded by ``record``."""

        def progress(what: str, done: float) -> None:
            self._progress(f"size {size}: {what}", done)

        request = replace(self._request, batch=self._batch(size))
        return Planner.of(request, progress, record=record)

    def plain_seconds(self, size: int) -> float:
        """Time the plain step at a size."""
        self._progress(f"size {size}: timing the plain step", 0.0)
        step = prepare_step(replace(self._request, batch=self._batch(size)))
        with step.undone():
            step.run()
            return step.measured_seconds().seconds

    def _batch(self, size: int) -> Any:
        streams = read_streams(())
        try:
            with torch.inference_mode(False):  # as the step runs: else autograd cannot save it
                batch = self._make_batch(size)
        finally:
            write_streams(settle_streams(streams))
        check_batch(batch, self.model)
        tensors = tensors_of_batch(*split_batch(batch, self.model))
        if not tensors:
            raise TypeError(
                f"make_batch should return a batch of the size that it is given, with tensors in "
                f"it, but make_batch({size}) returned {type(batch).__name__} without one. Return "
                "what the model is called with, such as lambda n: torch.randn(n, 64)"
            )
        self._nbytes[size] = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
        self._check_growth()
        return batch

    def _check_growth(self) -> None:
        """Refuse batches that do not grow with their size: all sizes would seem to fit."""
        sizes = sorted(self._nbytes)
        for smaller, larger in pairwise(sizes):
            if self._nbytes[larger] <= self._nbytes[smaller]:
                raise ValueError(
                    f"make_batch: the tensors of make_batch({larger}) have "
                    f"{bytes_text(self._nbytes[larger])}, and those of make_batch({smaller}) "
                    f"{bytes_text(self._nbytes[smaller])}: batches should grow with their size, as "
                    "by lambda n: torch.randn(n, 64). If it rounds sizes up, as to a multiple of "
                    "8, say so: multiple_of=8"
                )
