"""What a store must offer, and what somebody is told whose object does not."""

from __future__ import annotations

import pytest
import torch

from recollect.store import HostStore, Store, check_store
from recollect.store.offload_batch import OffloadBatch


class OwnStore:
    def put(self, tensor):
        return tensor.clone()

    def get(self, handle):
        return handle

    def drop(self, handle):
        pass


@pytest.mark.parametrize("store", [HostStore(), OwnStore()])
def test_a_store_is_accepted(store):
    check_store(store, "store")


@pytest.mark.parametrize(
    ("value", "missing"),
    [(None, "no put, no get, no drop"), ({}, "no put, no drop"), ("host", "no put")],
)
def test_what_is_missing_is_named(value, missing):
    with pytest.raises(TypeError, match=missing) as error:
        check_store(value, "keep_in")
    assert "keep_in must be a store" in str(error.value)
    assert "def put(self, tensor)" in str(error.value)


def test_a_method_that_cannot_be_called_is_missing():
    store = OwnStore()
    store.drop = None
    with pytest.raises(TypeError, match="has no drop"):
        check_store(store, "store")


def test_a_class_is_refused_with_the_way_to_make_an_object():
    with pytest.raises(TypeError, match=r"the class OwnStore.*OwnStore\(\)"):
        check_store(OwnStore, "store")


class Derived(Store):
    """The least that a store has to write."""

    def put(self, tensor):
        return [tensor]

    def get(self, handle):
        return handle[0]


def test_the_base_class_has_defaults_for_the_rest():
    store, x = Derived(), torch.ones(3)
    check_store(store, "store")
    handle = store.put(x)
    assert store.prefetch([handle]) is store.release(handle) is store.count_version(handle) is None
    kept = store.before_write(handle)
    x.zero_()
    assert torch.equal(store.get(kept), torch.ones(3))
    assert store.drop(kept) is None


class Prepared(OwnStore):
    """Makes a write safe itself, and is not derived from anything."""

    calls = 0

    def before_write(self, handle):
        self.calls += 1


class DerivedPrepared(Derived):
    """The same, derived: its handle stays, and it need not say so."""

    def before_write(self, handle):
        handle[0] = handle[0].clone()


class DerivedHost(HostStore):
    def before_write(self, handle):
        super().before_write(handle)


STORES = [Derived, OwnStore, Prepared, DerivedPrepared, DerivedHost, HostStore]


@pytest.mark.parametrize("make", STORES)
def test_a_batch_of_any_store_survives_a_write(make):
    x, store = torch.ones(3), make()
    batch = OffloadBatch(store)
    offloaded = batch.put(x)
    offloaded.before_write()
    x.zero_()
    batch.release()
    batch.announce()
    assert torch.equal(offloaded.get(), torch.ones(3))
    if isinstance(store, Prepared):
        assert store.calls == 1
