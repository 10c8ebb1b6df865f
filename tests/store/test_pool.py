"""Pinned memory that is used again."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from recollect.store import pool as pool_module
from recollect.store.pool import LARGEST, SMALLEST, PinnedPool, block_sizes, memory_of_machine


def pin(size):
    return torch.zeros(size, dtype=torch.uint8)


def no_pin(size):
    raise RuntimeError("the driver has no memory")


@pytest.mark.parametrize("size", [1, SMALLEST, SMALLEST + 1, 100_000, LARGEST, LARGEST + 1])
def test_blocks_hold_what_they_are_for(size):
    assert sum(block_sizes(size)) >= size


def test_blocks_are_of_few_sizes_and_waste_little():
    numbers = random.Random(0)
    for _ in range(2000):
        size = numbers.randrange(1, 4 * LARGEST)
        sizes = block_sizes(size)
        assert size <= sum(sizes) <= size + max(size // 7, SMALLEST)
        assert all(each & (each - 1) == 0 and SMALLEST <= each <= LARGEST for each in sizes)
        assert len(sizes) <= size // LARGEST + 3


def test_a_block_that_came_back_is_used_again_after_its_event():
    pool = PinnedPool(1 << 30)
    first = pool.take(10_000, pin)
    assert first.after() == []
    pool.give(first, "read")
    second = pool.take(9_000, pin)
    assert second.blocks[0].memory is first.blocks[0].memory
    assert set(second.after()) == {"read"}


def test_blocks_in_use_are_not_given_out_twice():
    pool = PinnedPool(1 << 30)
    buffers = [pool.take(SMALLEST, pin) for _ in range(5)]
    assert len({buffer.blocks[0].memory.data_ptr() for buffer in buffers}) == 5


def test_bytes_are_counted():
    pool = PinnedPool(1 << 30)
    a, b = pool.take(SMALLEST, pin), pool.take(3 * SMALLEST, pin)
    assert pool.held_bytes == pool.pinned_bytes == 4 * SMALLEST
    pool.give(a, None)
    assert (pool.held_bytes, pool.pinned_bytes) == (3 * SMALLEST, 4 * SMALLEST)
    pool.give(b, None)
    assert (pool.held_bytes, pool.pinned_bytes) == (0, 4 * SMALLEST)
    pool.trim()
    assert (pool.held_bytes, pool.pinned_bytes) == (0, 0)


def test_trimming_leaves_what_is_in_use():
    pool = PinnedPool(1 << 30)
    buffer = pool.take(SMALLEST, pin)
    pool.trim()
    assert pool.pinned_bytes == SMALLEST
    pool.give(buffer, None)
    assert pool.take(SMALLEST, no_pin).pinned


def test_the_limit_is_kept_with_one_warning():
    pool = PinnedPool(4 * SMALLEST)
    pool.take(4 * SMALLEST, pin)
    with pytest.warns(UserWarning, match="pinned_limit"):
        more = pool.take(2 * SMALLEST, pin)
    assert not more.pinned
    assert pool.pinned_bytes == 4 * SMALLEST
    assert pool.held_bytes == 6 * SMALLEST
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not pool.take(SMALLEST, pin).pinned


def test_free_blocks_of_other_sizes_make_room():
    pool = PinnedPool(4 * SMALLEST)
    pool.give(pool.take(4 * SMALLEST, pin), None)
    assert pool.take(SMALLEST, pin).pinned
    assert pool.pinned_bytes == SMALLEST


def test_memory_that_cannot_be_pinned_is_replaced_with_one_warning():
    pool = PinnedPool(1 << 30)
    with pytest.warns(UserWarning, match="the driver has no memory"):
        assert not pool.take(100, no_pin).pinned
    assert pool.pinned_bytes == 0
    assert pool.held_bytes == 100


def test_blocks_taken_before_a_failure_come_back_with_their_events():
    pool = PinnedPool(1 << 30)
    pool.give(pool.take(2 * SMALLEST, pin), "read")
    with pytest.warns(UserWarning, match="not pinned"):
        pool.take(3 * SMALLEST, no_pin)  # the first block is there, the second is not
    again = pool.take(2 * SMALLEST, no_pin)
    assert again.pinned
    assert again.after() == ["read"]


def test_ordinary_memory_does_not_come_back():
    pool = PinnedPool(0)
    with pytest.warns(UserWarning, match="not pinned"):
        pool.give(pool.take(SMALLEST, pin), None)
    assert pool.held_bytes == 0
    assert not pool.take(SMALLEST, pin).pinned


def test_parts_of_a_buffer(monkeypatch):
    monkeypatch.setattr(pool_module, "LARGEST", SMALLEST)
    buffer = PinnedPool(1 << 30).take(3 * SMALLEST, pin)
    assert len(buffer.blocks) == 3
    for n, block in enumerate(buffer.blocks):
        block.memory.fill_(n)
    parts = [
        (start, part.numel(), int(part[0])) for start, part in buffer.parts(SMALLEST - 1, 9000)
    ]
    assert parts == [(0, 1, 0), (1, SMALLEST, 1), (1 + SMALLEST, 9000 - 2 * SMALLEST, 2)]


def test_memory_of_the_machine(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(pool_module, "_LIMIT_OF_CONTAINER", limit)
    physical = memory_of_machine()
    assert 1 << 28 < physical < 1 << 50
    limit.write_text("max\n")
    assert memory_of_machine() == physical
    limit.write_text("123456\n")
    assert memory_of_machine() == 123456

    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(pool_module.os, "sysconf", unknown)
    assert memory_of_machine() == 16 << 30
