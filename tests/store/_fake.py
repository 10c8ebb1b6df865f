"""A device that is not there: CPU tensors, and copies that come late.

The computation runs at once, as CPU ops do. Copies wait in the queue of their stream until somebody
waits for them, or `FakeLink.step` lets some happen. They hold no reference to the memory of the
"device": to let go of it too early is noticed when the copy runs.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from recollect.store.host import HostStore
from recollect.store.transfers import OnHost


class Event:
    """Something that happens when its stream gets there."""

    def __init__(self, stream: Queue | None) -> None:
        self.stream = stream
        self.happened = stream is None

    def force(self) -> None:
        while not self.happened:
            self.stream.run_one()


class Queue:
    """A stream of copies: steps that run in order, later."""

    def __init__(self) -> None:
        self.steps: deque[Any] = deque()

    def run_one(self) -> None:
        self.steps.popleft()()

    def record(self) -> Event:
        event = Event(self)
        self.steps.append(lambda: setattr(event, "happened", True))
        return event


class FakeLink:
    """Copies between "device" and host that run late."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.out, self.back = Queue(), Queue()
        self.current = "main"
        self.capturing = False
        self.pins: list[int] = []
        self.pin_error: str | None = None
        self.waits: list[tuple[str, Event]] = []
        self.copied_out: list[int] = []
        self.copied_in: list[int] = []
        self.trimmed = 0
        self.violations: list[str] = []

    def usable(self) -> bool:
        return not self.capturing

    def capacity(self) -> int:
        return 64 * 512 * 1024 * 1024

    def stream(self) -> str:
        return self.current

    def empty(self, size: int) -> Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8)

    def pin(self, size: int) -> Tensor:
        if self.pin_error:
            raise RuntimeError(self.pin_error)
        self.pins.append(size)
        return torch.full((size,), 0xFF, dtype=torch.uint8)

    def copy_out(self, pieces: Any, after: Any) -> Event:
        pieces = [*pieces]
        self.copied_out.append(sum(source.numel() for source, _ in pieces))
        for event in after:
            self.out.steps.append(event.force)
        for source, target in pieces:
            self.out.steps.append(self._copy(self._weak(source), lambda t=target: t))
        return self.out.record()

    def copy_in(self, pieces: Any, after: Any) -> Event:
        pieces = [*pieces]
        self.copied_in.append(sum(source.numel() for source, _ in pieces))
        for event in after:
            self.back.steps.append(event.force)
        for source, target in pieces:
            self.back.steps.append(self._copy(lambda s=source: s, self._weak(target)))
        return self.back.record()

    def is_done(self, event: Event) -> bool:
        self._check_no_capture()
        return event.happened

    def wait(self, stream: str, event: Event) -> None:
        self._check_no_capture()
        self.waits.append((stream, event))
        event.force()

    def trim(self) -> None:
        self.trimmed += 1

    def _check_no_capture(self) -> None:
        if self.capturing:
            self.violations.append("an event from outside was used in a capture")

    def step(self) -> None:
        """Let a few copies happen, somewhere."""
        for _ in range(self.random.randrange(4)):
            queue = self.random.choice([self.out, self.back])
            if queue.steps:
                queue.run_one()

    def finish(self) -> None:
        for queue in (self.out, self.back):
            while queue.steps:
                queue.run_one()

    @property
    def pending(self) -> int:
        return len(self.out.steps) + len(self.back.steps)

    def poison_after(self, event: Event, memories: list[Tensor]) -> Event:
        """Overwrite host memory as soon as it may be written to."""
        queue = Queue()
        queue.steps.append(event.force)
        for memory in memories:
            queue.steps.append(lambda m=memory: m.fill_(0xFF))
        return queue.record()

    def _weak(self, memory: Tensor) -> Any:
        storage = weakref.ref(memory.untyped_storage())
        start, size = memory.storage_offset(), memory.numel()

        def find() -> Tensor | None:
            alive = storage()
            if alive is None:
                return None
            return torch.empty(0, dtype=torch.uint8).set_(alive, start, (size,), (1,))

        return find

    def _copy(self, source: Any, target: Any) -> Any:
        def copy() -> None:
            there, here = source(), target()
            if there is None or here is None:
                self.violations.append("memory was released before its copy ran")
            else:
                here.copy_(there)

        return copy


def poison_buffers(store: HostStore, link: Any) -> None:
    """Overwrite every buffer with the bits of NaN as it comes back."""
    give = store._pool.give

    def give_poisoned(buffer: Any, after: Any) -> None:
        memories = [block.memory for block in buffer.blocks]
        give(buffer, link.poison_after(after, memories))

    store._pool.give = give_poisoned


def make_store(link: Any = None, **options: Any) -> tuple[HostStore, Any]:
    link = FakeLink() if link is None else link
    options.setdefault("smallest", 0)
    return HostStore(_links=lambda tensor: link, **options), link


def activation(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def weight() -> Tensor:
    return nn.Parameter(activation(16, 16))


def was_copied(handle: Any) -> bool:
    return isinstance(handle, OnHost)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in all but where they are in memory."""
    if (a.dtype, a.shape, a.stride(), a.device) != (b.dtype, b.shape, b.stride(), b.device):
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return values.copy_(tensor.detach()).view(-1).view(torch.uint8)
