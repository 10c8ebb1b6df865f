"""What becomes of a tensor in a host store, with a link whose copies come late."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from recollect.errors import KeptTensorError
from recollect.store import HostStore, host_store
from recollect.store import pool as pool_module
from tests.store._fake import (
    FakeLink,
    activation,
    make_store,
    poison_buffers,
    same_bits,
    was_copied,
    weight,
)


def views() -> dict[str, Tensor]:
    base = activation(32, 32)
    return {
        "contiguous": base,
        "square transpose": base.t(),
        "slice": base[4:9, 3:17],
        "column": base[:, 5],
        "steps": base[::3, ::2],
        "expanded": base[:1].expand(8, 32),
        "scalar": base[3, 3],
        "permuted": activation(4, 8, 16).permute(2, 0, 1),
        "channels last": activation(2, 8, 8, 8).to(memory_format=torch.channels_last),
        "overlapping": base.as_strided((5, 6), (3, 1), 40),
        "bool": base > 0,
        "bfloat16": base.bfloat16(),
        "complex": activation(8, 8, dtype=torch.complex64),
        "int8 view": base.view(torch.int8)[3, 5:99],
        "nan": torch.full((64,), float("nan")),
        "float8": base.to(torch.float8_e4m3fn),
        "with history": (base.clone().requires_grad_() * 2)[1:],
    }


@pytest.mark.parametrize("name", views())
def test_a_tensor_comes_back_bit_for_bit(name):
    store, link = make_store()
    tensor = views()[name]
    expected = tensor.detach().clone() if tensor.is_contiguous() else tensor.detach()
    handle = store.put(tensor)
    assert was_copied(handle)
    got = store.get(handle)
    assert same_bits(got, expected)
    assert got.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert got.grad_fn is None
    assert not got.requires_grad
    store.drop(handle)
    assert link.violations == []


def test_large_tensors_are_made_of_several_blocks(monkeypatch):
    monkeypatch.setattr(pool_module, "LARGEST", pool_module.SMALLEST)
    store, link = make_store()
    tensor = activation(9, 1234)
    handle, other = store.put(tensor.t()), store.put(activation(5000))
    assert len(link.pins) > 5
    assert same_bits(store.get(handle), tensor.t())
    store.drop(handle)
    store.drop(other)


def test_a_tensor_can_be_asked_for_several_times():
    store, link = make_store()
    tensor = activation(100)
    handle = store.put(tensor)
    for _ in range(3):
        assert same_bits(store.get(handle), tensor)
    assert len(link.copied_in) == 3


# --- what is copied, and how much -----------------------------------------------------------------


def test_views_of_one_storage_are_stored_once():
    store, link = make_store()
    base = activation(64, 96)
    q, k, v = base.split(32, dim=1)
    handles = [store.put(each) for each in (q, k, v, base, base.t(), q)]
    assert link.copied_out == [base.nbytes]
    for handle, each in zip(handles, (q, k, v, base, base.t(), q), strict=True):
        assert same_bits(store.get(handle), each)
    for handle in handles[:-1]:
        store.drop(handle)
    assert store.held_bytes > 0
    assert same_bits(store.get(handles[-1]), q)
    store.drop(handles[-1])
    assert store.held_bytes == 0


def test_views_come_back_on_one_storage_while_it_is_there():
    store, link = make_store()
    q, k, v = activation(64, 96).split(32, dim=1)
    handles = [store.put(each) for each in (q, k, v)]
    got = [store.get(handle) for handle in handles]
    assert len({each.untyped_storage().data_ptr() for each in got}) == 1
    assert len(link.copied_in) == 1
    assert got[0]._base is got[1]._base is None
    # They share the count of changes, too: one that was changed is not given out again.
    got[1].add_(1)
    assert got[0]._version == got[1]._version
    assert same_bits(store.get(handles[2]), v)
    assert len(link.copied_in) == 2


@pytest.mark.parametrize("how", ["data", "freed", "dtype"])
def test_a_tensor_that_was_given_other_memory_is_not_shared(how):
    store, _ = make_store()
    base = activation(64)
    other = base.view(torch.int32) if how == "dtype" else base
    first, second = store.put(base), store.put(other)
    got = store.get(first)
    if how == "data":
        got.data = torch.zeros(64)
    if how == "freed":
        got.untyped_storage().resize_(0)
    assert same_bits(store.get(second), other)


def test_a_tensor_of_another_stream_is_not_shared():
    store, link = make_store()
    handle = store.put(activation(64))
    got = store.get(handle)
    link.current = "side"
    assert store.get(handle).data_ptr() != got.data_ptr()
    link.current = "main"


def test_the_store_keeps_nothing_that_it_gave_out():
    store, _ = make_store()
    handle = store.put(activation(100))
    got = weakref.ref(store.get(handle).untyped_storage())
    assert got() is None


def test_a_small_part_is_copied_alone():
    store, link = make_store()
    base = activation(1000, 64)
    part = base[100:200, 7:30]
    handle = store.put(part)
    assert link.copied_out[0] < base.nbytes // 5
    assert same_bits(store.get(handle), part)
    # Another part of the same storage is another copy, and the same part is not.
    other = store.put(base[500:600])
    assert len(link.copied_out) == 2
    store.put(part[1:])
    assert len(link.copied_out) == 2
    assert same_bits(store.get(other), base[500:600])


def test_a_small_part_of_what_is_stored_is_fetched_alone():
    store, link = make_store()
    base = activation(1000, 64)
    whole, part = store.put(base), store.put(base[100:200, 7:30])
    assert len(link.copied_out) == 1
    assert same_bits(store.get(part), base[100:200, 7:30])
    assert link.copied_in[0] < base.nbytes // 5
    assert same_bits(store.get(whole), base)


def test_a_storage_that_was_changed_is_stored_again():
    store, link = make_store()
    base = activation(100)
    old, first = base.clone(), store.put(base)
    store.before_write(first)
    base.add_(1)
    second = store.put(base)
    assert len(link.copied_out) == 2
    assert same_bits(store.get(first), old)
    assert same_bits(store.get(second), base)


def test_memory_that_comes_to_life_again_is_another_storage():
    store, link = make_store()
    handles, values = [], []
    for _ in range(50):  # the allocator gives the same address again
        tensor = activation(100)
        handles.append(store.put(tensor))
        values.append(tensor.clone())
        link.finish()
        del tensor
    assert all(same_bits(store.get(h), v) for h, v in zip(handles, values, strict=True))


def test_inference_tensors():
    store, link = make_store()
    with torch.inference_mode():
        tensor = activation(100)
        first, second = store.put(tensor), store.put(tensor)
        assert len(link.copied_out) == 2  # their changes are not counted
        assert same_bits(store.get(first), tensor)
    got = store.get(second)
    assert same_bits(got, tensor)
    got.add_(1)  # an ordinary tensor
    store.drop(first)
    store.drop(second)
    again = store.put(activation(100))  # in the same buffer
    store.get(again)


# --- what stays -----------------------------------------------------------------------------------


STAYS = {
    "parameter": weight,
    "frozen parameter": lambda: nn.Parameter(activation(16), requires_grad=False),
    "leaf": lambda: activation(16).requires_grad_(),
    "view of a parameter": lambda: weight().t(),
    "view of a view": lambda: weight().t()[3:],
    "empty": lambda: torch.empty(0, 5),
    "meta": lambda: torch.empty(5, 5, device="meta"),
    "sparse": lambda: torch.eye(5).to_sparse(),
    "csr": lambda: torch.eye(5).to_sparse_csr(),
    "conjugate": lambda: activation(8, 8, dtype=torch.complex64).conj(),
    "negative": lambda: activation(8, dtype=torch.complex64).conj().imag,
    "subclass": lambda: activation(8).as_subclass(type("Mine", (Tensor,), {})),
    "quantized": lambda: torch.quantize_per_tensor(activation(8), 0.1, 0, torch.qint8),
    "freed": lambda: _freed(activation(8)),
}

IGNORED = pytest.mark.filterwarnings(
    "ignore:Sparse", "ignore:torch.quantize", "ignore:.*[Qq]uantiz", "ignore:Sparse CSR"
)


def _freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@IGNORED
@pytest.mark.parametrize("make", STAYS.values(), ids=STAYS)
def test_what_is_not_copied(make):
    store, link = make_store()
    tensor = make()
    handle = store.put(tensor)
    assert link.copied_out == []
    got = store.get(handle)
    # What has a history is held without it.
    assert got is tensor or (tensor.grad_fn is not None and got.grad_fn is None)
    if tensor.layout is torch.strided and not tensor.is_meta:
        assert got.data_ptr() == tensor.data_ptr()
    store.drop(handle)
    assert store.held_bytes == 0


def test_a_tensor_that_no_link_claims_is_held():
    store = HostStore(_links=lambda tensor: None)
    tensor = activation(10_000)
    handle = store.put(tensor)
    assert store.get(handle) is tensor


def test_small_storages_are_held_but_not_small_views():
    store, link = make_store(smallest=1000)
    store.put(activation(100))
    assert link.copied_out == []
    assert was_copied(store.put(activation(10_000)[:2]))


def test_a_detached_alias_of_a_parameter_is_known_once_the_parameter_was_met():
    store, _ = make_store()
    parameter = weight()
    store.put(parameter)
    assert not was_copied(store.put(parameter.detach()))
    assert not was_copied(store.put(parameter.data[1:]))
    assert was_copied(store.put(activation(5)))


def test_parameters_are_forgotten_with_their_memory():
    store, _ = make_store()
    handle = store.put(weight())
    assert len(store._weights) == 1
    store.drop(handle)
    assert len(store._weights) == 0


def test_fake_tensors_are_held():
    from torch._subclasses import FakeTensorMode

    store, link = make_store()
    with FakeTensorMode():
        tensor = torch.empty(10)
        assert store.get(store.put(tensor)) is tensor
    assert link.copied_out == []


def test_tensors_of_transforms_are_held():
    store, link = make_store()

    def function(x: Tensor) -> Tensor:
        handle = store.put(x)
        assert not was_copied(handle)
        return store.get(handle).sin()

    torch.func.vmap(function)(activation(3, 4))
    torch.func.grad(lambda x: function(x).sum())(activation(4))
    assert link.copied_out == []


def test_a_plain_tensor_inside_of_a_transform_is_copied():
    store, _ = make_store()
    outside = activation(8)

    def function(x: Tensor) -> Tensor:
        handle = store.put(outside)
        assert was_copied(handle)
        got = store.get(handle)
        assert type(got) is Tensor
        return x * got

    assert torch.equal(torch.func.vmap(function)(torch.ones(3, 8))[2], outside)


def test_nothing_is_copied_while_a_graph_is_captured():
    store, link = make_store()
    before = store.put(activation(10))
    link.capturing = True
    tensor = activation(10)
    handle = store.put(tensor)
    assert store.get(handle) is tensor
    waits = len(link.waits)
    store.drop(before)
    assert len(link.waits) == waits
    link.capturing = False
    assert link.violations == []
    store.put(activation(10))
    link.finish()
    assert link.violations == []


# --- subclasses -----------------------------------------------------------------------------------


def test_a_subclass_made_of_tensors_is_taken_apart():
    store, link = make_store()
    tensor = TwoTensor(activation(16), activation(16))
    handle = store.put(tensor)
    assert len(link.copied_out) == 2
    store.prefetch([handle])
    got = store.get(handle)
    assert type(got) is TwoTensor
    assert same_bits(got.a, tensor.a)
    assert same_bits(got.b, tensor.b)
    store.before_write(handle)
    store.drop(handle)
    assert store.held_bytes == 0


def test_a_subclass_with_history_comes_back_without():
    store, _ = make_store()
    leaf = TwoTensor(activation(16), activation(16)).requires_grad_()
    assert store.get(store.put(leaf)) is leaf
    got = store.get(store.put(leaf * 2))
    assert type(got) is TwoTensor
    assert not got.requires_grad


def test_a_subclass_of_which_nothing_is_copied_is_held():
    store = HostStore(_links=lambda tensor: None)
    tensor = TwoTensor(activation(16), activation(16))
    assert store.get(store.put(tensor)) is tensor


@pytest.fixture
def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_distributed_tensor(mesh):
    from torch.distributed.tensor import DTensor, Shard

    store, link = make_store()
    local = activation(8, 4)
    tensor = DTensor.from_local(local.t(), mesh, [Shard(0)])
    for each in (tensor, tensor.detach().requires_grad_() * 1):
        handle = store.put(each)
        store.prefetch([handle])
        got = store.get(handle)
        assert type(got) is DTensor
        assert (got.shape, got.stride()) == (each.shape, each.stride())
        assert got.placements == each.placements
        assert not got.requires_grad
        assert same_bits(got.to_local(), each.to_local())
        store.drop(handle)
    assert len(link.copied_out) == 2
    parameter = nn.Parameter(tensor)
    assert store.get(store.put(parameter)) is parameter
    assert len(link.copied_out) == 2


def test_a_jagged_tensor_is_held():
    store, link = make_store()
    tensor = torch.nested.nested_tensor([activation(3, 4), activation(5, 4)], layout=torch.jagged)
    assert store.get(store.put(tensor)) is tensor
    assert link.copied_out == []


# --- changes in place -----------------------------------------------------------------------------


def test_a_change_during_the_copy_is_reported():
    store, _ = make_store()
    tensor = activation(100)
    handle = store.put(tensor)
    tensor.add_(1)
    with pytest.raises(KeptTensorError, match="modified in place") as error:
        store.get(handle)
    assert "before_write" in str(error.value)
    store.drop(handle)


def test_a_change_through_a_view_is_reported_after_the_release():
    store, link = make_store(in_flight=0)
    tensor = activation(100)
    handle = store.put(tensor)
    tensor[3:5].zero_()
    store.put(activation(1000))  # lets go of the source
    with pytest.raises(KeptTensorError):
        store.get(handle)
    store.prefetch([handle])  # is no error
    assert link.copied_in == []


def test_a_change_after_the_release_is_none():
    store, link = make_store()
    tensor = activation(100)
    old, handle = tensor.clone(), store.put(tensor)
    link.finish()
    store.put(activation(1))
    tensor.add_(1)
    assert same_bits(store.get(handle), old)


@pytest.mark.parametrize("polls", [True, False])
def test_a_source_is_let_go_when_its_copy_is_done_or_only_when_told(polls):
    store, link = make_store(_polls=polls)
    source = activation(100)
    handle, storage = store.put(source), weakref.ref(source.untyped_storage())
    del source
    link.finish()
    store.put(activation(1))
    assert (storage() is None) == polls
    store.release(handle)
    assert storage() is None


def test_without_looking_too_many_under_way_are_still_let_go():
    store, _ = make_store(_polls=False, in_flight=500)
    sources = [activation(100) for _ in range(3)]
    storages = [weakref.ref(each.untyped_storage()) for each in sources]
    while sources:
        store.put(sources.pop(0))
    assert [each() is None for each in storages] == [True, True, False]


def test_a_change_that_was_announced_is_safe():
    store, link = make_store()
    tensor = activation(100)
    old, handle = tensor.clone(), store.put(tensor)
    store.before_write(handle)
    tensor.add_(1)
    assert same_bits(store.get(handle), old)
    store.before_write(handle)  # again: nothing to do
    assert [stream for stream, _ in link.waits] == ["main", "main"]


def test_a_change_by_another_stream_waits_there():
    store, link = make_store()
    handle = store.put(activation(100))
    link.current = "side"
    store.before_write(handle)
    assert {stream for stream, _ in link.waits} == {"main", "side"}


def test_an_announcement_too_late_does_not_hide_the_change():
    store, _ = make_store()
    tensor = activation(100)
    handle = store.put(tensor)
    tensor.add_(1)
    store.before_write(handle)
    with pytest.raises(KeptTensorError):
        store.get(handle)


def test_a_spoilt_copy_serves_no_other_view():
    store, link = make_store()
    tensor = activation(100)
    store.put(tensor)
    tensor.add_(1)
    handle = store.put(tensor)
    assert len(link.copied_out) == 2
    assert same_bits(store.get(handle), tensor)


def test_a_change_of_a_held_tensor():
    store, _ = make_store()
    parameter = weight()
    announced, silent = store.put(parameter.t()), store.put(parameter)
    old = parameter.detach().t().clone(memory_format=torch.preserve_format)
    store.before_write(announced)
    with torch.no_grad():
        parameter.add_(1)
    assert same_bits(store.get(announced), old)
    with pytest.raises(KeptTensorError):
        store.get(silent)
    store.drop(announced)
    store.drop(silent)


@IGNORED
@pytest.mark.parametrize("name", ["sparse", "conjugate", "empty", "subclass"])
def test_a_change_of_a_held_tensor_that_is_no_memory(name):
    store, _ = make_store()
    tensor = STAYS[name]()
    handle, old = store.put(tensor), tensor.clone()
    store.before_write(handle)
    tensor.mul_(2)
    got = store.get(handle)
    assert type(got) is type(tensor)
    assert torch.equal(
        got.to_dense() if got.is_sparse else got, old.to_dense() if old.is_sparse else old
    )


def test_a_change_inside_of_a_dispatch_mode_is_noticed():
    class PutEverything(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
            before = excluded(torch._C.DispatchKey.ADInplaceOrView)
            handles.append(store.put(out))
            assert excluded(torch._C.DispatchKey.ADInplaceOrView) == before
            return out

    store, _ = make_store()
    handles = []
    with PutEverything():
        tensor = torch.ones(10) * 2
    tensor.add_(1)
    with pytest.raises(KeptTensorError):
        store.get(handles[-1])


# --- the surroundings of the caller ---------------------------------------------------------------


class Spy(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append(op)
        return op(*args, **(kwargs or {}))


class FunctionSpy(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def every_method(store: HostStore, tensors: list[Tensor]) -> None:
    handles = [store.put(each) for each in tensors]
    store.prefetch(handles)
    for handle in handles:
        store.get(handle)
        store.get(handle)
        store.before_write(handle)
        store.drop(handle)


def test_no_mode_sees_the_work_of_the_store():
    store, _ = make_store()
    tensors = [activation(10), activation(4, 4).t(), activation(8)[2:4]]
    with Spy() as spy, FunctionSpy() as function_spy:
        every_method(store, tensors)
    assert spy.seen == []
    assert function_spy.seen == []


def test_no_function_mode_sees_what_is_held_or_taken_apart():
    store, _ = make_store()
    tensors = [weight(), weight().t(), torch.empty(0), TwoTensor(activation(4), activation(4))]
    with FunctionSpy() as function_spy:
        handles = [store.put(each) for each in tensors]
        for handle in handles:
            store.get(handle)
            store.drop(handle)
    # Which `unobserved` calls to become so.
    assert set(function_spy.seen) <= {torch._C._set_grad_enabled}


def test_a_default_device_is_not_the_buffers():
    store, _ = make_store()
    with torch.device("meta"):
        handle = store.put(torch.ones(10, device="cpu"))
        assert store.get(handle).device.type == "cpu"


def test_surroundings_are_as_before():
    store, _ = make_store()
    with torch.inference_mode():
        every_method(store, [activation(10)])
        assert torch.is_inference_mode_enabled()
    x = activation(10).requires_grad_()
    y = x * 2
    every_method(store, [y])
    assert torch.is_grad_enabled()
    assert y._version == 0
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((10,), 2.0))


def test_autograd_through_the_store():
    store, link = make_store()
    x, w = activation(16, 16).requires_grad_(), weight()

    def loss(x: Tensor) -> Tensor:
        return (x @ w).sin().square().relu().sum()

    expected = torch.autograd.grad(loss(x), (x, w))
    with torch.autograd.graph.saved_tensors_hooks(store.put, store.get):
        out = loss(x)
    assert link.copied_out
    got = torch.autograd.grad(out, (x, w))
    assert all(map(torch.equal, got, expected))


# --- handles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: activation(10), weight], ids=["copied", "held"])
def test_a_dropped_handle_is_refused(make):
    store, _ = make_store()
    handle = store.put(make())
    store.drop(handle)
    with pytest.raises(RuntimeError, match="was dropped"):
        store.get(handle)
    with pytest.raises(RuntimeError, match="was dropped"):
        store.drop(handle)


def test_a_finalizer_may_drop_in_the_middle_of_another_call():
    store, link = make_store()
    victim = store.put(activation(100))
    pin = link.pin

    def drop_inside(size: int) -> Tensor:
        store.drop(victim)  # as the collector would, with the lock held by this thread
        assert store._dropped
        link.pin = pin
        return pin(size)

    link.pin = drop_inside
    tensor = activation(5000)
    handle = store.put(tensor)
    assert not store._dropped
    assert len(store._copies) == 1
    assert same_bits(store.get(handle), tensor)


def test_a_call_that_fails_leaves_the_store_usable():
    store, link = make_store()

    def broken(size: int) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    tensor = activation(10)
    handle = store.put(tensor)
    empty, link.empty = link.empty, broken
    with pytest.raises(torch.OutOfMemoryError):
        store.get(handle)
    link.empty = empty
    assert same_bits(store.get(handle), tensor)


def test_a_failed_copy_takes_no_host_memory():
    store, link = make_store()

    def broken(pieces, after):
        raise RuntimeError("broken")

    copy_out, link.copy_out = link.copy_out, broken
    with pytest.raises(RuntimeError, match="broken"):
        store.put(activation(10))
    link.copy_out = copy_out
    assert store.held_bytes == 0


# --- the object -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pinned_limit", "in_flight", "smallest"])
@pytest.mark.parametrize("value", [-1, 1.5, "1GB"])
def test_options_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number of bytes"):
        HostStore(**{name: value})


def test_a_copy_of_a_module_shares_the_store():
    store = HostStore(in_flight=5)
    assert copy.deepcopy(store) is store
    again = pickle.loads(pickle.dumps(store))
    assert (
        repr(again)
        == repr(store)
        == ("HostStore(pinned_limit=None, in_flight=5, ahead=None, smallest=4096)")
    )


def test_one_store_for_the_process():
    found, start = [], threading.Barrier(8)

    def find() -> None:
        start.wait()
        found.append(host_store())

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(each) for each in found}) == 1


# --- several devices and threads ------------------------------------------------------------------


def test_several_devices_share_the_host_memory():
    links = {torch.float32: FakeLink(), torch.float64: FakeLink()}
    store = HostStore(smallest=0, _links=lambda tensor: links[tensor.dtype])
    a, b = activation(100), activation(50, dtype=torch.float64)
    first = store.put(a)
    store.prefetch([first])
    store.drop(first)
    second = store.put(b)  # in the buffer that the other device still reads
    assert links[torch.float64].pins == []
    assert links[torch.float64].out.steps
    assert same_bits(store.get(second), b)
    assert links[torch.float32].violations == links[torch.float64].violations == []


def test_threads():
    store, link = make_store(in_flight=2000)
    poison_buffers(store, link)
    errors = []

    def work(seed: int) -> None:
        try:
            numbers = random.Random(seed)
            kept = []
            for _ in range(150):
                tensor = torch.full((numbers.randrange(1, 300),), float(numbers.random()))
                kept.append((store.put(tensor), tensor.clone()))
                if numbers.random() < 0.3:
                    store.prefetch([handle for handle, _ in kept[:3]])
                if len(kept) > 5:
                    handle, expected = kept.pop(numbers.randrange(len(kept)))
                    assert same_bits(store.get(handle), expected)
                    store.drop(handle)
            for handle, expected in kept:
                assert same_bits(store.get(handle), expected)
                store.drop(handle)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.held_bytes == 0
    assert link.violations == []
