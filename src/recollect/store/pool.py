"""A pool of pinned host memory.

Pinning memory takes milliseconds, so blocks are kept for the next step. Their sizes are powers of
two up to `LARGEST`, and a buffer has several blocks: free blocks fit later tensors, and torch,
which rounds pinned allocations up to powers of two, wastes nothing. A block may return to the pool
while a copy still reads it. It has the event of that copy, and the next writer waits for it.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recollect.errors import RecollectWarning

SMALLEST = 4 * 1024
LARGEST = 64 * 1024 * 1024

#: The maximum number of blocks for the rest below `LARGEST`; the last may be larger than needed.
_BLOCKS_OF_REST = 3

_LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")
_MEMORY_IF_UNKNOWN = 16 * 1024**3


def memory_of_machine() -> int:
    """The bytes of memory of the machine, or of the container."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return _MEMORY_IF_UNKNOWN
    try:
        return min(size, int(_LIMIT_OF_CONTAINER.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return size


def block_sizes(size: int) -> list[int]:
    """The sizes of the blocks for ``size`` bytes; at most a seventh too large, and `SMALLEST`."""
    whole, rest = divmod(size, LARGEST)
    sizes = [LARGEST] * whole
    for _ in range(_BLOCKS_OF_REST - 1):
        if rest <= SMALLEST:
            break
        sizes.append(1 << (rest.bit_length() - 1))
        rest -= sizes[-1]
    if rest > 0:
        sizes.append(max(SMALLEST, 1 << (rest - 1).bit_length()))
    return sizes


@dataclass(slots=True, eq=False)
class Block:
    """Host memory of one of the sizes, with the event after which it may be written to."""

    memory: Tensor
    after: Any = None


@dataclass(slots=True, eq=False)
class HostBuffer:
    """Blocks that together hold the bytes of one storage, or of a part of it."""

    blocks: list[Block]
    pinned: bool

    @property
    def size(self) -> int:
        return sum(block.memory.numel() for block in self.blocks)

    def after(self) -> list[Any]:
        return [block.after for block in self.blocks if block.after is not None]

    def parts(self, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """The memory of the bytes from ``start`` to ``end``: each part with its offset."""
        begin = 0
        for block in self.blocks:
            stop = begin + block.memory.numel()
            first, last = max(start, begin), min(end, stop)
            if first < last:
                yield first - start, block.memory[first - begin : last - begin]
            begin = stop


class PinnedPool:
    """Blocks of pinned memory, free and in use, ``limit`` bytes at most.

    Beyond the limit, or when memory cannot be pinned, buffers are ordinary memory, with a warning
    once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: The bytes of all pinned blocks, and of all buffers in use, pinned or not.
        self.pinned_bytes = 0
        self.held_bytes = 0
        self._free: dict[int, deque[Block]] = defaultdict(deque)
        self._warned = False

    def take(self, size: int, pin: Callable[[int], Tensor]) -> HostBuffer:
        """A buffer for ``size`` bytes; ``pin`` makes pinned memory."""
        try:
            buffer = self._pinned(size, pin)
        except RuntimeError as error:
            self._warn_once(size, error)
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            buffer = HostBuffer([Block(memory)], pinned=False)
        self.held_bytes += buffer.size
        return buffer

    def give(self, buffer: HostBuffer, after: Any) -> None:
        """Return ``buffer`` to the pool. It may be written to after the event ``after``."""
        self.held_bytes -= buffer.size
        if buffer.pinned:
            for block in buffer.blocks:
                block.after = after
            self._put_back(buffer.blocks)

    def trim(self) -> None:
        # Also blocks that copies still read: torch lets these copies finish.
        for size, blocks in self._free.items():
            self.pinned_bytes -= size * len(blocks)
        self._free.clear()

    def _put_back(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._free[block.memory.numel()].append(block)

    def _pinned(self, size: int, pin: Callable[[int], Tensor]) -> HostBuffer:
        blocks: list[Block] = []
        try:
            for each in block_sizes(size):
                free = self._free.get(each)
                if free:  # the oldest one: the copy that reads it is most likely complete
                    blocks.append(free.popleft())
                    continue
                self._make_room(each)
                blocks.append(Block(pin(each)))
                self.pinned_bytes += each
        except RuntimeError:
            self._put_back(blocks)
            raise
        return HostBuffer(blocks, pinned=True)

    def _make_room(self, size: int) -> None:
        """Free unused blocks, large ones first, until ``size`` more bytes may be pinned."""
        room = self.limit - size
        for each in sorted(self._free, reverse=True) if self.pinned_bytes > room else ():
            while self._free[each] and self.pinned_bytes > room:
                self._free[each].pop()
                self.pinned_bytes -= each
        if self.pinned_bytes > room:
            raise RuntimeError(f"the limit of {self.limit:,} bytes of pinned memory is reached")

    def _warn_once(self, size: int, error: RuntimeError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"recollect keeps {size:,} bytes in host memory that is not pinned: {error}. This "
                "is correct but slow, because the CPU waits for such copies. Keep less on the host,"
                " or raise HostStore(pinned_limit=...). This warning is shown once.",
                RecollectWarning,
                stacklevel=2,
            )
