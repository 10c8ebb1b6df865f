"""What comes back from a store has the layout that it had, whatever the store does to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recollect.store import HostStore
from recollect.store.offload_batch import OffloadBatch


class Clones:
    """Copies as most would write it."""

    def put(self, tensor: Tensor) -> Any:
        return tensor.clone()

    def get(self, handle: Any) -> Tensor:
        return handle

    def drop(self, handle: Any) -> None:
        pass


class Packs(Clones):
    """Holds values one after the other, in memory that begins anywhere."""

    def put(self, tensor: Tensor) -> Any:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
        return room.copy_(tensor.reshape(-1)), tensor.shape

    def get(self, handle: Any) -> Tensor:
        return handle[0].view(handle[1])


STORES: dict[str, Callable[[], Any]] = {
    "clones": Clones,
    "packs": Packs,
    "host": HostStore,
}

BASE = torch.arange(210.0)

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: BASE.clone().view(6, 35),
    "transposed": lambda: BASE.view(6, 35).t(),
    "permuted": lambda: BASE.view(5, 6, 7).permute(2, 0, 1),
    "channels last": lambda: BASE.view(1, 5, 6, 7).to(memory_format=torch.channels_last),
    "sliced": lambda: BASE.view(6, 35)[1:5, 3:20:4],
    "a row further on": lambda: BASE[7:19],
    "a column": lambda: BASE.view(6, 35)[:, 3],
    "expanded": lambda: BASE[:4].expand(3, 4),
    "expanded, transposed": lambda: BASE[3:7].view(4, 1).expand(4, 5).t(),
    "expanded everywhere": lambda: BASE[5].expand(2, 3),
    "overlapping": lambda: BASE.as_strided((4, 5), (1, 1), 3),
    "windows": lambda: BASE.unfold(0, 8, 3),
    "a part of an unsafe split": lambda: BASE.view(6, 35).unsafe_split(7, 1)[2],
    "a part of an unsafe chunk": lambda: BASE.view(6, 35).unsafe_chunk(3, 1)[1],
    "unbound": lambda: BASE.view(6, 35).unbind(1)[4],
    "no dimensions": lambda: BASE[9],
    "empty": lambda: BASE.view(6, 35)[:, 3:3],
    "empty, transposed": lambda: BASE.view(5, 6, 7)[2:2].permute(2, 1, 0),
    "one element with odd strides": lambda: BASE.as_strided((1, 1), (17, 5), 2),
    "complex": lambda: torch.complex(BASE, -BASE).view(6, 35).t(),
    "bytes": lambda: (BASE > 50).view(6, 35)[:, 1::2],
}


def layout_of(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 64


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_a_tensor_comes_back_as_it_was(
    make: Callable[[], Tensor], store: Callable[[], Any]
) -> None:
    tensor = make()
    offloaded = OffloadBatch(store()).put(tensor)
    back = offloaded.get()
    assert layout_of(back) == layout_of(tensor)
    assert torch.equal(back, tensor)
    assert torch.equal(offloaded.get(), tensor)


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_a_tensor_that_is_written_to_comes_back_as_it_was(
    make: Callable[[], Tensor], store: Callable[[], Any]
) -> None:
    tensor = make()
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    before, values = storage.clone(), tensor.clone()
    offloaded = OffloadBatch(store()).put(tensor)
    offloaded.before_write()
    storage.zero_()
    try:
        back = offloaded.get()
        assert back.shape == tensor.shape
        assert back.stride() == tensor.stride()
        assert torch.equal(back, values)
    finally:
        storage.copy_(before)


def test_what_is_as_it_was_is_not_copied() -> None:
    tensor = torch.ones(4, 4)
    store = Clones()
    offloaded = OffloadBatch(store).put(tensor)
    assert offloaded.get() is offloaded.handle


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_copy_without_strides_comes_back() -> None:
    tensor = torch.eye(3).to_sparse_csr()
    assert torch.equal(OffloadBatch(Clones()).put(tensor).get().to_dense(), torch.eye(3))


def test_a_store_with_a_length_is_used_also_while_it_is_empty() -> None:
    class Held(HostStore):
        def __init__(self) -> None:
            super().__init__()
            self.tensors: list[Tensor] = []

        def __len__(self) -> int:
            return len(self.tensors)

        def put(self, tensor: Tensor) -> Any:
            self.tensors.append(tensor)
            return super().put(tensor)

    store = Held()
    kept = OffloadBatch(store).put(BASE)
    assert torch.equal(kept.get(), BASE)
    assert len(store) == 1
