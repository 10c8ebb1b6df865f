"""Random moves on a host store, with late copies and poisoned memory: every bit is right."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from recollect.store import pool as pool_module
from tests.store._fake import (
    FakeLink,
    make_store,
    poison_buffers,
    same_bits,
)


class Player:
    """Plays random moves on a store, beside a model that keeps every value."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.link = FakeLink(seed)
        options = {"in_flight": self.random.choice([0, 2000, 20_000, 1 << 30])}
        self.store, _ = make_store(self.link, **options)
        poison_buffers(self.store, self.link)
        self.tensors: list[Tensor] = []
        self.kept: list[tuple[object, Tensor]] = []
        self.out: list[tuple[Tensor, Tensor]] = []

    def play(self, moves: int) -> None:
        weighted = [self.make, self.put, self.put, self.put, self.get, self.get, self.prefetch]
        weighted += [self.drop, self.forget, self.write, self.write_got, self.other_stream]
        for _ in range(moves):
            self.random.choice(weighted)()
            self.link.step()
            for tensor, expected in self.out[-3:]:
                assert same_bits(tensor, expected)
        while self.kept:
            self.get()
            self.drop()
        self.link.finish()
        assert self.link.violations == []
        assert self.store.held_bytes == 0
        assert self.store._transfers == {} or self.store._transfers[self.link].prefetched_bytes == 0

    def make(self) -> None:
        shape = [self.random.randrange(1, 9) for _ in range(self.random.randrange(1, 5))]
        dtype = self.random.choice([torch.float32, torch.float64, torch.bfloat16, torch.int8])
        tensor = (torch.randn(shape) * 50).to(dtype)
        self.tensors.append(tensor)

    def view(self, tensor: Tensor) -> Tensor:
        for _ in range(self.random.randrange(3)):
            kind = self.random.randrange(4)
            dim = self.random.randrange(tensor.dim()) if tensor.dim() else 0
            if kind == 0 and tensor.dim():
                tensor = tensor.transpose(0, dim)
            elif kind == 1 and tensor.dim():
                start = self.random.randrange(tensor.size(dim))
                tensor = tensor.narrow(dim, start, tensor.size(dim) - start)
            elif kind == 2:
                tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
            elif tensor.dim():
                tensor = tensor[:: self.random.randrange(1, 3)]
        return tensor

    def put(self) -> None:
        if not self.tensors:
            return
        tensor = self.view(self.random.choice(self.tensors))
        copy = tensor.detach().clone().contiguous()
        expected = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if 0 in tensor.stride() and tensor.numel():
            expected = _like(tensor)
        else:
            expected.copy_(copy)
        self.kept.append((self.store.put(tensor), expected))

    def get(self) -> None:
        if self.kept:
            handle, expected = self.random.choice(self.kept)
            got = self.store.get(handle)
            assert same_bits(got, expected)
            self.out.append((got, expected))
            if len(self.out) > 5:
                self.out.pop(0)

    def prefetch(self) -> None:
        chosen = self.random.sample(self.kept, min(len(self.kept), self.random.randrange(5)))
        self.store.prefetch([handle for handle, _ in chosen])

    def drop(self) -> None:
        if self.kept:
            handle, _ = self.kept.pop(self.random.randrange(len(self.kept)))
            self.store.drop(handle)

    def forget(self) -> None:
        if self.tensors:
            self.tensors.pop(self.random.randrange(len(self.tensors)))

    def write(self) -> None:
        """Change a tensor that may be in the store, as the engine does: announced."""
        if self.tensors:
            tensor = self.random.choice(self.tensors)
            for handle, _ in self.kept:
                self.store.before_write(handle)
            tensor.add_(1)

    def write_got(self) -> None:
        """Change a tensor that was given out: its owner may."""
        if self.out:
            got, _ = self.out.pop()
            self.out.clear()
            if 0 not in got.stride():
                got.mul_(3)

    def other_stream(self) -> None:
        self.link.current = self.random.choice(["main", "main", "side"])


def _like(tensor: Tensor) -> Tensor:
    """A copy of a tensor with expanded dimensions, strides and all."""
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).clone()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(
        memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


@pytest.mark.parametrize("block", range(10))
def test_random_moves_are_bit_exact(block, monkeypatch):
    if block % 2:
        monkeypatch.setattr(pool_module, "LARGEST", pool_module.SMALLEST)
    for seed in range(block * 40, block * 40 + 40):
        torch.manual_seed(seed)
        Player(seed).play(80)
