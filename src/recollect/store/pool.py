"""Pinned host memory, used again and again.

To pin memory takes the driver milliseconds, so blocks are kept for the next step. All have one of
few sizes, powers of two up to `LARGEST`, and a buffer is made of several: any block that is free
serves any tensor of about its size, large tensors leave no odd sizes behind, and torch, which
rounds pinned allocations up to powers of two, has nothing to add.

A block comes back while a copy may still be reading it. It carries the event of that copy, and
whoever writes to the block next waits for it.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["LARGEST", "SMALLEST", "Block", "Buffer", "Pool", "block_sizes", "memory_of_machine"]

SMALLEST = 4 * 1024
LARGEST = 64 * 1024 * 1024

#: A rest is made of so many blocks at most, the last of them larger than needed.
_BLOCKS_OF_REST = 3

_LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")
_MEMORY_IF_UNKNOWN = 16 * 1024**3


def memory_of_machine() -> int:
    """The bytes of memory that this process may count on."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return _MEMORY_IF_UNKNOWN
    try:
        return min(size, int(_LIMIT_OF_CONTAINER.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return size


def block_sizes(size: int) -> list[int]:
    """The sizes of the blocks that hold ``size`` bytes, a seventh too large at most."""
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


class Block:
    """Host memory of one of the sizes, with the event after which it may be written to."""

    __slots__ = ("after", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.after: Any = None


class Buffer:
    """Blocks that together hold the bytes of one storage, or of a part of it."""

    __slots__ = ("blocks", "pinned")

    def __init__(self, blocks: list[Block], *, pinned: bool) -> None:
        self.blocks = blocks
        self.pinned = pinned

    @property
    def size(self) -> int:
        """The bytes of host memory that this takes."""
        return sum(block.memory.numel() for block in self.blocks)

    def after(self) -> list[Any]:
        """The events after which the buffer may be written to."""
        return [block.after for block in self.blocks if block.after is not None]

    def parts(self, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """The memory for the bytes from ``start`` to ``end``, each part with where it starts."""
        begin = 0
        for block in self.blocks:
            stop = begin + block.memory.numel()
            first, last = max(start, begin), min(end, stop)
            if first < last:
                yield first - start, block.memory[first - begin : last - begin]
            begin = stop


class Pool:
    """Blocks of pinned memory, free and in use, ``limit`` bytes at most.

    Beyond the limit, or when memory cannot be pinned, buffers are of ordinary memory. The user is
    told once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: The bytes of all pinned blocks, and of all buffers in use, pinned or not.
        self.pinned_bytes = 0
        self.held_bytes = 0
        self._free: dict[int, deque[Block]] = defaultdict(deque)
        self._told = False

    def take(self, size: int, pin: Callable[[int], Tensor]) -> Buffer:
        """A buffer for ``size`` bytes; ``pin`` makes pinned memory."""
        buffer = self._pinned(size, pin) or self._pageable(size)
        self.held_bytes += buffer.size
        return buffer

    def give(self, buffer: Buffer, after: Any) -> None:
        """Take ``buffer`` back. It may be written to again after the event ``after``."""
        self.held_bytes -= buffer.size
        if buffer.pinned:
            self._put_back(buffer.blocks, after)

    def trim(self) -> None:
        """Let go of all blocks that are free."""
        # Those that are being read, too: torch knows of the copies, and lets them finish.
        for size, blocks in self._free.items():
            self.pinned_bytes -= size * len(blocks)
        self._free.clear()

    def _put_back(self, blocks: list[Block], after: Any) -> None:
        for block in blocks:
            block.after = after
            self._free[block.memory.numel()].append(block)

    def _pinned(self, size: int, pin: Callable[[int], Tensor]) -> Buffer | None:
        blocks: list[Block] = []
        try:
            for each in block_sizes(size):
                block = self._free_block(each) or self._new_block(each, pin)
                blocks.append(block)
        except RuntimeError as error:
            for block in blocks:
                self._put_back([block], block.after)
            self._tell(size, error)
            return None
        return Buffer(blocks, pinned=True)

    def _free_block(self, size: int) -> Block | None:
        blocks = self._free.get(size)
        # The one that came back first: the copy that reads it is the most likely to be over.
        return blocks.popleft() if blocks else None

    def _new_block(self, size: int, pin: Callable[[int], Tensor]) -> Block:
        if self.pinned_bytes + size > self.limit:
            self._make_room(size)
        block = Block(pin(size))
        self.pinned_bytes += size
        return block

    def _make_room(self, size: int) -> None:
        """Let go of free blocks, large ones first, until ``size`` bytes more may be pinned."""
        for each in sorted(self._free, reverse=True):
            while self._free[each] and self.pinned_bytes + size > self.limit:
                self._free[each].pop()
                self.pinned_bytes -= each
        if self.pinned_bytes + size > self.limit:
            raise RuntimeError(f"the limit of {self.limit:,} bytes of pinned memory is reached")

    def _pageable(self, size: int) -> Buffer:
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return Buffer([Block(memory)], pinned=False)

    def _tell(self, size: int, error: RuntimeError) -> None:
        if self._told:
            return
        self._told = True
        warnings.warn(
            f"recollect keeps {size:,} bytes in host memory that is not pinned: {error}. This is "
            "correct but slow, since the CPU waits for such copies. Keep less on the host, or "
            "raise HostStore(pinned_limit=...). This is said once.",
            stacklevel=2,
        )
