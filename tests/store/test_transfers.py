"""Copies under way: the memory they hold, those ahead of time, and the buffers."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch

from recollect.store import HostStore
from tests.store._fake import (
    FakeLink,
    activation,
    make_store,
    poison_buffers,
    same_bits,
    weight,
)

# --- memory of the device -------------------------------------------------------------------------


def source_of(store: HostStore, *shape: int) -> tuple[object, weakref.ref]:
    tensor = activation(*shape)
    return store.put(tensor), weakref.ref(tensor.untyped_storage())


def test_a_source_lives_until_its_copy_is_done():
    store, link = make_store()
    _, source = source_of(store, 100)
    assert source() is not None
    assert link.pending
    link.finish()
    store.put(activation(1))
    assert source() is None
    assert link.waits == []  # nobody waited


def test_sources_in_flight_are_bounded_by_waits_of_the_stream():
    store, link = make_store(in_flight=1000)
    _, first = source_of(store, 100)
    _, second = source_of(store, 100)
    assert link.waits == []
    _, third = source_of(store, 100)
    assert (first() is None, second() is None, third() is None) == (True, False, False)
    assert [stream for stream, _ in link.waits] == ["main"]
    assert link.violations == []


def test_one_source_may_be_in_flight_however_large():
    store, link = make_store(in_flight=0)
    _, first = source_of(store, 1000)
    assert link.waits == []
    assert first() is not None
    source_of(store, 1000)
    assert first() is None


def test_the_whole_storage_of_a_small_view_counts():
    store, _ = make_store(in_flight=5000)
    big = activation(1000)
    source = weakref.ref(big.untyped_storage())
    store.put(big[:10])
    del big
    source_of(store, 1000)
    assert source() is None


def test_a_source_is_released_to_the_stream_it_came_from_and_the_one_in_use():
    store, link = make_store(in_flight=0)
    link.current = "side"
    source_of(store, 100)
    link.current = "main"
    source_of(store, 100)
    assert [stream for stream, _ in link.waits] == ["side", "main"]


def test_to_get_a_tensor_lets_go_of_its_source():
    store, link = make_store()
    handle, source = source_of(store, 100)
    store.get(handle)
    assert source() is None
    assert link.violations == []


def test_to_get_a_tensor_on_another_stream_does_not():
    store, link = make_store()
    handle, source = source_of(store, 100)
    link.current = "side"
    store.get(handle)
    assert source() is not None


def test_to_drop_a_handle_lets_go_of_its_source():
    store, link = make_store()
    handle, source = source_of(store, 100)
    store.drop(handle)
    assert source() is None
    assert [stream for stream, _ in link.waits] == ["main"]
    assert link.violations == []


def test_to_drop_everything_frees_everything():
    store, link = make_store()
    refs, handles = [], []
    for _ in range(10):
        handle, source = source_of(store, 100)
        handles.append(handle)
        refs.append(source)
    store.prefetch(handles)
    for handle in handles:
        store.drop(handle)
    del handle, handles
    assert all(ref() is None for ref in refs)
    assert store.held_bytes == 0
    assert store._copies == {}
    (transfers,) = store._transfers.values()
    assert (transfers.outgoing, transfers.outgoing_bytes, transfers.prefetched_bytes) == ({}, 0, 0)
    assert transfers.wanted == {}
    link.finish()
    assert link.violations == []
    assert store.pinned_bytes > 0
    store.trim()
    assert store.pinned_bytes == 0
    assert link.trimmed == 1


class Canary:
    pass


@pytest.mark.parametrize("part", [slice(None), slice(0)], ids=["copied", "held"])
def test_nothing_refers_in_circles(part):
    gc.collect()
    gc.disable()
    try:
        store, link = make_store()
        y = activation(100).requires_grad_().sin()[part]
        handle, canary = store.put(y), Canary()
        y.grad_fn.metadata["saved"] = (handle, canary)  # as a graph holds what it saves
        graph = weakref.ref(canary)
        del y, handle, canary
        assert graph() is None
        link.finish()
        gone = weakref.ref(store)
        del store
        assert gone() is None
    finally:
        gc.enable()


# --- prefetch -------------------------------------------------------------------------------------


def test_what_was_fetched_ahead_is_given_out():
    store, link = make_store()
    tensor = activation(100)
    handle = store.put(tensor)
    store.prefetch([handle])
    assert len(link.copied_in) == 1
    assert link.waits == []
    got = store.get(handle)
    assert len(link.copied_in) == 1
    assert same_bits(got, tensor)
    assert len(link.waits) == 1
    store.drop(handle)


def test_to_fetch_ahead_is_bounded_and_goes_on_as_tensors_are_taken():
    store, link = make_store(in_flight=1000)
    tensors = [activation(100) for _ in range(6)]
    handles = [store.put(each) for each in tensors]
    store.prefetch(handles)
    assert len(link.copied_in) == 2
    got = store.get(handles[0])
    assert len(link.copied_in) == 3
    assert same_bits(got, tensors[0])
    got = store.get(handles[5])  # not the next in order: fetched, and not again
    assert len(link.copied_in) == 4
    for n in (1, 2, 3, 4):
        assert same_bits(store.get(handles[n]), tensors[n])
    assert len(link.copied_in) == 6


def test_one_tensor_is_fetched_ahead_however_large():
    store, link = make_store(in_flight=0)
    handles = [store.put(activation(100)) for _ in range(3)]
    store.prefetch(handles)
    assert len(link.copied_in) == 1


def test_to_announce_twice_fetches_once():
    store, link = make_store(in_flight=1000)
    handles = [store.put(activation(100)) for _ in range(4)]
    store.prefetch(handles[:3])
    store.prefetch(handles)
    for handle in handles:
        store.get(handle)
    assert len(link.copied_in) == 4


def test_views_of_one_storage_are_fetched_ahead_once():
    store, link = make_store()
    q, k = activation(64, 64).split(32, dim=1)
    handles = [store.put(q), store.put(k)]
    store.prefetch(handles)
    got = [store.get(handle) for handle in handles]
    assert len(link.copied_in) == 1
    assert same_bits(got[1], k)
    store.prefetch(handles)  # both are there
    assert len(link.copied_in) == 1


def test_what_was_fetched_for_a_small_part_does_not_serve_the_whole():
    store, _ = make_store()
    base = activation(100, 100)
    whole, part = store.put(base), store.put(base[50:55])
    store.prefetch([part])
    assert same_bits(store.get(whole), base)
    assert same_bits(store.get(part), base[50:55])


def test_what_was_fetched_ahead_and_not_used_is_released_in_order():
    store, link = make_store()
    handle = store.put(activation(100))
    link.current = "side"
    store.prefetch([handle])
    link.current = "main"
    store.drop(handle)
    assert link.waits[0][0] == "side"
    link.finish()
    assert link.violations == []


def test_what_was_fetched_for_another_stream_is_fetched_again():
    store, link = make_store()
    tensor = activation(100)
    handle = store.put(tensor)
    link.current = "side"
    store.prefetch([handle])
    link.current = "main"
    assert same_bits(store.get(handle), tensor)
    assert len(link.copied_in) == 2
    assert [stream for stream, _ in link.waits] == ["side", "main"]
    store.drop(handle)
    assert store._transfers[link].prefetched_bytes == 0
    link.finish()
    assert link.violations == []


def test_what_was_asked_for_before_its_turn_is_not_fetched_again():
    store, link = make_store(in_flight=0)
    handles = [store.put(activation(100)) for _ in range(4)]
    store.prefetch(handles)
    for n in (2, 0, 1, 3):
        store.get(handles[n])
    assert len(link.copied_in) == 4


def test_what_is_dropped_is_not_fetched():
    store, link = make_store(in_flight=0)
    handles = [store.put(activation(100)) for _ in range(3)]
    store.prefetch(handles)
    store.drop(handles[1])
    store.get(handles[0])
    store.get(handles[2])
    assert len(link.copied_in) == 2


def test_handles_of_any_kind_can_be_fetched_ahead():
    store, _ = make_store()
    dropped = store.put(activation(10))
    store.drop(dropped)
    store.prefetch([store.put(weight()), dropped])


# --- buffers --------------------------------------------------------------------------------------


def test_a_buffer_is_not_written_to_while_it_is_read():
    store, link = make_store()
    poison_buffers(store, link)
    first = activation(100)
    handle = store.put(first)
    store.prefetch([handle])
    got = store._copies[next(iter(store._copies))][0].prefetched
    store.drop(handle)  # the copy back has not run yet, and the memory is still in our hands
    del first
    store.put(torch.zeros(100))
    link.finish()
    assert got.memory.count_nonzero() > 0
    assert not (got.memory == 0xFF).all()
    assert len(link.pins) == 1


@pytest.mark.parametrize("read", [False, True])
def test_a_buffer_is_written_to_after_its_last_reader(read):
    store, link = make_store()
    after, copy_out = [], link.copy_out
    link.copy_out = lambda pieces, events: after.append([*events]) or copy_out(pieces, events)
    handle = store.put(activation(100))
    stored = handle.copy
    if read:
        store.get(handle)
        store.get(handle)
    store.drop(handle)
    store.put(activation(100))
    assert after == [[], [stored.last_read if read else stored.done]]


def test_buffers_are_used_again():
    store, link = make_store()
    for _ in range(20):
        handle = store.put(activation(3000))
        store.get(handle)
        store.drop(handle)
    assert sum(link.pins) == store.pinned_bytes == 12288


def test_buffers_beyond_the_limit_are_ordinary_memory():
    store, _ = make_store(pinned_limit=8192)
    tensors = [activation(1000) for _ in range(5)]
    with pytest.warns(UserWarning, match="not pinned") as warned:
        handles = [store.put(each) for each in tensors]
    assert len(warned) == 1
    assert store.pinned_bytes == 8192
    assert all(same_bits(store.get(h), t) for h, t in zip(handles, tensors, strict=True))
    for handle in handles:
        store.drop(handle)
    assert store.held_bytes == 0


def test_memory_that_cannot_be_pinned():
    link = FakeLink()
    link.pin_error = "CUDA error: out of memory"
    store, _ = make_store(link)
    tensor = activation(100)
    with pytest.warns(UserWarning, match="CUDA error: out of memory"):
        handle = store.put(tensor)
    assert same_bits(store.get(handle), tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put(activation(100))
