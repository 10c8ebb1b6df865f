"""How many bytes some code allocates."""

from __future__ import annotations

from threading import Thread

import torch

from recollect._torch.devices import MemoryChange
from recollect.planning.recording.memory_events import Blocks, allocated_by

CPU = torch.device("cpu")
SIZE = 8_000


def test_the_most_at_once_and_what_is_left() -> None:
    kept = []

    def run() -> None:
        kept.append(torch.empty(SIZE))
        torch.empty(2 * SIZE)
        kept.append(torch.empty(SIZE))

    assert allocated_by(run, CPU) == (12 * SIZE, 8 * SIZE)


def of(*changes: tuple[int, int]) -> tuple[int, int]:
    blocks = Blocks()
    for time, (address, nbytes) in enumerate(changes):
        blocks.apply(MemoryChange(time, address, nbytes))
    return blocks.peak, blocks.total


def test_a_block_that_overlaps_others_has_their_memory() -> None:
    assert of((100, 50), (150, 50), (100, -50), (150, -50)) == (100, 0)
    assert of((100, 50), (100, 50)) == (50, 50)
    assert of((100, 50), (150, 50), (120, 40)) == (100, 40)
    assert of((100, 50), (200, 50), (300, 50), (140, 100)) == (150, 150)
    assert of((100, 50), (90, 10), (150, 10)) == (70, 70)
    assert of((100, 50), (100, 80), (100, -80), (7, -20)) == (80, -20)


def test_what_an_unseen_thread_frees() -> None:
    """The profiler follows threads that it knows of, and others do not say what they free."""
    rounds = 200

    def run() -> None:
        for _ in range(rounds):
            held = [torch.empty(SIZE)]
            thread = Thread(target=held.clear)
            thread.start()
            thread.join()

    peak, left = allocated_by(run, CPU)
    assert 4 * SIZE <= left <= peak < rounds // 8 * 4 * SIZE
