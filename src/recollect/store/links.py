"""Copies between a device and the host: streams, events, memory.

All device code of the host store is here. Tests replace it by a class whose "device" is the CPU and
whose copies are late. Copies run on two streams of their own, one for each direction. The CPU never
waits here: streams wait for events.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

#: Source and target, with the same number of bytes.
Piece = tuple[Tensor, Tensor]


class CudaLink:
    """One CUDA device, and the copies between it and the host.

    Events and streams are opaque to callers, which only pass them back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)

    def usable(self) -> bool:
        """Whether copies can be started now; not while the stream is captured into a graph."""
        return not torch.cuda.is_current_stream_capturing()

    def capacity(self) -> int:
        device = self._device
        return int(torch.cuda.get_device_properties(device).total_memory)

    def stream(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def empty(self, size: int) -> Tensor:
        """``size`` bytes of device memory, allocated on the caller's stream."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def pin(self, size: int) -> Tensor:
        """``size`` bytes of pinned host memory; RuntimeError if they cannot be pinned."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy_out(self, pieces: Iterable[Piece], after: Iterable[Any]) -> Any:
        """Start copies to the host, after the work of the caller's stream and the events ``after``.

        Returns the event of their end, as does `copy_in`.
        """
        return self._start(self._out, pieces, after)

    def copy_in(self, pieces: Iterable[Piece], after: Iterable[Any]) -> Any:
        """Start copies to the device, in the same way."""
        return self._start(self._in, pieces, after)

    def _start(
        self, side: torch.cuda.Stream, pieces: Iterable[Piece], after: Iterable[Any]
    ) -> torch.cuda.Event:
        side.wait_event(self.stream().record_event())
        for event in after:
            side.wait_event(event)
        with torch.cuda.stream(side):
            self._copy(pieces)
            done: torch.cuda.Event = side.record_event()
        return done

    def _copy(self, pieces: Iterable[Piece]) -> None:
        for source, target in pieces:
            host = source if target.is_cuda else target
            # Copies of pageable memory must block the CPU, or it could read them too early.
            target.copy_(source, non_blocking=host.is_pinned())

    def is_done(self, event: Any) -> bool:
        return bool(event.query())

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def trim(self) -> None:
        """Free unused pinned memory that torch caches."""
        # Older releases cannot empty that cache.
        empty = getattr(torch.accelerator, "empty_host_cache", None)
        if empty is not None:
            empty()


def cuda_links() -> Callable[[Tensor], CudaLink | None]:
    """Finds the link of a tensor: one for each CUDA device, made when first needed; else None."""
    link_of = functools.cache(CudaLink)
    return lambda tensor: link_of(tensor.device) if tensor.is_cuda else None
