"""Tensors in host memory, on a real device: late copies, memory, and a CPU that does not wait."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect.store import HostStore
from recollect.store import pool as pool_module
from recollect.store.links import CudaLink, cuda_links
from recollect.store.transfers import Transfers
from tests.store._fake import poison_buffers, same_bits, was_copied

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1024 * 1024
#: About a tenth of a second, and about a second.
A_WHILE, LONG = 200_000_000, 2_000_000_000


def on_cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)


class SlowLink(CudaLink):
    """Copies start late, at random, and memory is overwritten as soon as it may be."""

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__(device)
        self.random = random.Random(seed)
        self.poison = torch.cuda.Stream(device)
        self.nan = torch.full((64 * MIB,), 0xFF, dtype=torch.uint8, device=device)

    def _copy(self, pieces: Any) -> None:
        sleep(self.random.choice([0, 100_000, 2_000_000]))
        super()._copy(pieces)

    def poison_after(self, event: Any, memories: list[Tensor]) -> Any:
        if event is not None:
            self.poison.wait_event(event)
        with torch.cuda.stream(self.poison):
            for memory in memories:
                memory.copy_(self.nan[: memory.numel()], non_blocking=memory.is_pinned())
            return self.poison.record_event()


def poison_sources(monkeypatch: pytest.MonkeyPatch, in_use: set[int]) -> None:
    """Overwrite sources that only the store held, on their stream, as they are let go of."""
    release = Transfers.release

    def release_poisoned(self: Transfers, stored: Any, *, is_done: bool = False) -> None:
        source = stored.source
        release(self, stored, is_done=is_done)
        if source is None:
            return
        # Another part of the same storage may still be on its way.
        pending = {other.source.untyped_storage().data_ptr() for other in self.outgoing}
        if source.untyped_storage().data_ptr() not in in_use | pending:
            with torch.cuda.stream(stored.stream):
                _all_bytes(source).fill_(0xFF)

    monkeypatch.setattr(Transfers, "release", release_poisoned)


def _all_bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def slow_store(seed: int = 0, **options: Any) -> HostStore:
    link = SlowLink(torch.device("cuda", torch.cuda.current_device()), seed)
    store = HostStore(smallest=0, _links=lambda tensor: link, **options)
    poison_buffers(store, link)
    return store


VIEWS = {
    "contiguous": lambda x: x,
    "square transpose": lambda x: x.t(),
    "slice": lambda x: x[4:9, 3:17],
    "column": lambda x: x[:, 5],
    "expanded": lambda x: x[:1].expand(8, 64),
    "steps": lambda x: x[::3, ::2],
    "scalar": lambda x: x[3, 3],
    "bfloat16": lambda x: x.bfloat16(),
    "bool": lambda x: x > 0,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.filterwarnings("ignore:recollect keeps")
def test_a_tensor_comes_back_bit_for_bit(view, pinned):
    store = HostStore(smallest=0, pinned_limit=None if pinned else 0)
    tensor = view(on_cuda(64, 64))
    handle = store.put(tensor)
    assert was_copied(handle)
    assert (store.pinned_bytes > 0) is pinned
    got = store.get(handle)
    assert same_bits(got, tensor)
    assert got.data_ptr() != tensor.data_ptr()
    store.drop(handle)
    assert store.held_bytes == 0


def test_the_default_store_copies_large_tensors_and_holds_others():
    store = HostStore()
    assert was_copied(store.put(on_cuda(64, 64)))
    assert not was_copied(store.put(on_cuda(4)))
    assert not was_copied(store.put(torch.ones(100, 100)))
    assert not was_copied(store.put(nn.Parameter(on_cuda(64, 64))))


def test_one_link_for_a_device():
    links = cuda_links()
    assert links(on_cuda(1)) is links(on_cuda(1))
    assert links(torch.ones(1)) is None


def test_buffers_are_pinned_and_given_back():
    store = HostStore()
    handle = store.put(on_cuda(MIB))
    stored = handle.copy
    assert all(block.memory.is_pinned() for block in stored.buffer.blocks)
    assert store.pinned_bytes == store.held_bytes == 4 * MIB
    store.drop(handle)
    assert (store.pinned_bytes, store.held_bytes) == (4 * MIB, 0)
    store.trim()
    assert store.pinned_bytes == 0


def test_a_copy_waits_for_the_values():
    store = HostStore()
    tensor = torch.zeros(MIB, device="cuda")
    sleep(A_WHILE)
    tensor.fill_(3)
    handle = store.put(tensor)
    del tensor
    assert torch.equal(store.get(handle), torch.full((MIB,), 3.0, device="cuda"))


def test_a_copy_back_waits_for_those_who_use_the_memory():
    torch.cuda.empty_cache()  # so that the only free memory is what is freed below
    store = HostStore()
    tensor = on_cuda(8 * MIB)
    handle = store.put(tensor)
    expected = tensor.clone()
    torch.cuda.synchronize()
    before, result = torch.full_like(tensor, 5), torch.empty_like(tensor)
    sleep(A_WHILE)
    result.copy_(before)  # reads memory that is given out again below
    address = before.data_ptr()
    del before
    got = store.get(handle)
    assert got.data_ptr() == address, "the allocator did not reuse the memory: a useless test"
    assert bool((result == 5).all())
    assert torch.equal(got, expected)


def test_the_cpu_does_not_wait():
    store = HostStore(in_flight=8 * MIB)

    def step() -> None:
        handles = [store.put(on_cuda(2 * MIB)) for _ in range(6)]
        store.prefetch(handles)
        for handle in handles:
            store.get(handle).sum()
            store.before_write(handle)
            store.drop(handle)

    for _ in range(2):  # pinned and device memory come from the driver, which waits
        sleep(A_WHILE)
        step()
    torch.cuda.synchronize()
    sleep(LONG)
    start = time.perf_counter()
    step()
    took = time.perf_counter() - start
    busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert busy
    assert took < 0.3


def test_copies_overlap_with_computation():
    store = HostStore()
    x = on_cuda(64 * MIB)
    store.drop(store.put(x))
    torch.cuda.synchronize()
    handle = store.put(x)
    sleep(LONG)  # the computation
    handle.copy.done.synchronize()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_memory_of_the_device_goes_down_without_a_wait():
    store = HostStore(in_flight=64 * MIB)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    sleep(A_WHILE)
    handles = []
    for _ in range(10):
        tensor = torch.ones(8 * MIB, device="cuda")  # 32 MiB
        handles.append(store.put(tensor))
        del tensor
        assert torch.cuda.memory_allocated() - base <= 96 * MIB
    assert store.held_bytes == 320 * MIB
    store.prefetch(handles)
    assert torch.cuda.memory_allocated() - base <= 160 * MIB
    for handle in handles:
        assert bool((store.get(handle) == 1).all())
        store.drop(handle)
    assert torch.cuda.memory_allocated() - base <= MIB
    assert store.held_bytes == 0


def test_a_change_in_place_after_before_write():
    store = slow_store()
    tensor = on_cuda(MIB)
    expected = tensor.clone()
    handle = store.put(tensor)
    store.before_write(handle)
    tensor.zero_()
    assert torch.equal(store.get(handle), expected)


def test_another_stream():
    store = slow_store()
    tensor, side = on_cuda(MIB), torch.cuda.Stream()
    expected = tensor.clone()
    handle = store.put(tensor)
    del tensor
    store.prefetch([handle])
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = store.get(handle)
        same = (got == expected).all()
        del got
        store.drop(handle)
    torch.cuda.current_stream().wait_stream(side)
    assert bool(same)


def test_capture_of_a_graph():
    store = HostStore()
    outside = store.put(on_cuda(MIB))
    x = torch.ones(MIB, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        handle = store.put(x * 2)
        y = store.get(handle) + 1
        store.drop(handle)
        store.drop(outside)
    x.fill_(5)
    graph.replay()
    assert bool((y == 11).all())
    store.put(on_cuda(MIB))


class OffloadedTensor:
    """A handle that is dropped with the graph."""

    def __init__(self, store: HostStore, tensor: Tensor) -> None:
        self.store, self.handle = store, store.put(tensor)

    def get(self) -> Tensor:
        return self.store.get(self.handle)

    def __del__(self) -> None:
        self.store.drop(self.handle)


@pytest.mark.parametrize("in_flight", [0, MIB, 512 * MIB])
def test_training_is_bit_exact(in_flight):
    store = slow_store(in_flight=in_flight)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(8))
    ).cuda()
    x = on_cuda(512, 256).requires_grad_()

    def gradients() -> list[Tensor]:
        loss = model(x).square().sum()
        grads = torch.autograd.grad(loss, [x, *model.parameters()])
        return [grad.clone() for grad in grads]

    expected = gradients()
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: OffloadedTensor(store, tensor), lambda parcel: parcel.get()
        ):
            got = gradients()
        assert all(map(torch.equal, got, expected))
    assert store.held_bytes == 0
    assert store.pinned_bytes > 0


class Player:
    """Random moves, no wait for the device between them. Mismatches are counted on the device."""

    def __init__(self, seed: int, store: HostStore, in_use: set[int]) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.in_use = in_use
        self.kept: list[tuple[Any, Tensor]] = []
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def make(self) -> Tensor:
        """A tensor whose values are late."""
        rows, columns = self.random.randrange(1, 700), self.random.randrange(1, 700)
        dtype = self.random.choice([torch.float32, torch.bfloat16, torch.int8])
        values = (torch.randn(rows, columns, device="cuda") * 50).to(dtype)
        tensor = torch.empty_like(values)
        if self.random.random() < 0.2:
            sleep(1_000_000)
        return tensor.copy_(values)

    def view(self, tensor: Tensor) -> Tensor:
        kind = self.random.randrange(5)
        if kind == 0:
            return tensor.t()
        if kind == 1:
            return tensor[self.random.randrange(tensor.size(0)) :, ::2]
        if kind == 2:
            return tensor[:1].expand(3, -1)
        if kind == 3:
            return tensor[: 1 + tensor.size(0) // 5]
        return tensor

    def put(self) -> None:
        base = self.make()
        self.in_use.add(base.untyped_storage().data_ptr())
        for _ in range(self.random.randrange(1, 4)):
            view = self.view(base)
            self.kept.append((self.store.put(view), view.clone()))
        if self.random.random() < 0.3:
            for handle, _ in self.kept[-3:]:
                self.store.before_write(handle)
            base.fill_(7)
        self.in_use.discard(base.untyped_storage().data_ptr())

    def get(self) -> None:
        if not self.kept:
            return
        handle, expected = self.random.choice(self.kept)
        got = self.store.get(handle)
        self.wrong += (got != expected).sum()
        if self.random.random() < 0.2 and 0 not in got.stride():
            got.fill_(9)

    def prefetch(self) -> None:
        chosen = self.random.sample(self.kept, min(len(self.kept), self.random.randrange(5)))
        self.store.prefetch([handle for handle, _ in chosen])

    def drop(self) -> None:
        if self.kept:
            handle, _ = self.kept.pop(self.random.randrange(len(self.kept)))
            self.store.drop(handle)

    def play(self, moves: int) -> None:
        for _ in range(moves):
            move = [self.put, self.put, self.get, self.get, self.get, self.prefetch, self.drop]
            self.random.choice([*move, self.drop])()
        while self.kept:
            self.get()
            self.drop()
        assert int(self.wrong) == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_moves_with_late_copies(seed, monkeypatch):
    torch.manual_seed(seed)
    if seed % 2:
        monkeypatch.setattr(pool_module, "LARGEST", 64 * 1024)
    store = slow_store(seed, in_flight=[0, MIB, 16 * MIB, 512 * MIB][seed % 4])
    in_use: set[int] = set()
    poison_sources(monkeypatch, in_use)
    base = torch.cuda.memory_allocated()
    player = Player(seed, store, in_use)
    player.play(200)
    del player.wrong
    assert store.held_bytes == 0
    assert torch.cuda.memory_allocated() - base <= 1024


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices():
    store = HostStore()
    tensors = [torch.randn(MIB, device=f"cuda:{n % 2}") for n in range(6)]
    handles = [store.put(each) for each in tensors]
    store.prefetch(handles)
    for handle, tensor in zip(handles, tensors, strict=True):
        assert same_bits(store.get(handle), tensor)
        store.drop(handle)
