"""What a store must offer, and what somebody is told whose object does not."""

from __future__ import annotations

import pytest
import torch

from recollect.store import DeviceStore, HostStore, check_store


class OwnStore:
    def put(self, tensor):
        return tensor.clone()

    def get(self, handle):
        return handle

    def drop(self, handle):
        pass


@pytest.mark.parametrize("store", [DeviceStore(), HostStore(), OwnStore()])
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


def test_a_tensor_in_a_device_store_is_its_own_handle():
    store, x = DeviceStore(), torch.ones(3)
    handle = store.put(x)
    assert handle is x
    assert store.get(handle) is x
    store.drop(handle)
    assert store.get(handle) is x
