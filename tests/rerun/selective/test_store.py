"""Stores (R24): every kept tensor goes through the user's store, and inputs too if wanted."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import recollect
from recollect import policy
from recollect.errors import KeptTensorError
from recollect.store import HostStore
from tests._support import assert_identical, collector_off
from tests.rerun.selective._helpers import (
    Ops,
    assert_right,
    leaves,
    seeded,
    selective,
    square,
    step,
    total,
)
from tests.store._fake import make_store

aten = torch.ops.aten


class Store:
    """A user's plain class: copies what it gets, and keeps a diary."""

    def __init__(self, change=torch.clone):
        self.kept = {}
        self.puts = self.gets = self.drops = 0
        self.change = change

    def put(self, tensor):
        assert not tensor.requires_grad
        copy = self.change(tensor)
        self.puts += 1
        self.kept[self.puts] = copy
        return self.puts

    def get(self, handle):
        self.gets += 1
        return self.kept[handle].clone()

    def drop(self, handle):
        self.drops += 1
        del self.kept[handle]


def block(x, w):
    return ((x @ w).tanh() @ w).sigmoid() * x


def wanted(out, inputs, **options):
    """The gradients of ``inputs``, in a way that the reentrant engine can follow."""
    if "create_graph" in options:
        return torch.autograd.grad(total(out), inputs, **options)
    for tensor in inputs:
        tensor.grad = None
    total(out).backward(**options)
    return [tensor.grad for tensor in inputs]


# --- kept tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["rerun", "replay"])
@pytest.mark.parametrize("change", [torch.clone, lambda t: t.contiguous().clone()])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_what_a_store_gives_back_is_laid_out_as_it_was(kind, change, engine):
    """A kernel may round in another way where strides are others."""
    model = seeded(lambda: kind(7, 16, 2, batch_first=True))
    (x,) = leaves((3, 5, 7))

    def function(x):
        return model(x)[0]

    def run(region):
        out = region(function, x)
        return torch.autograd.grad(total(out), [x, *model.parameters()])

    given = selective(policy.everything(), store=Store(change), engine=engine)
    assert_identical(run(given), run(lambda function, x: function(x)))


def test_each_kept_tensor_is_put_got_and_dropped_once():
    store = Store()
    inputs = square()
    with collector_off():
        out = recollect.checkpoint(block, *inputs, policy=policy.matmuls(), store=store)
        assert (store.puts, store.gets, store.drops) == (2, 0, 0)
        grads = wanted(out, inputs)
        del out
        assert (store.puts, store.gets, store.drops) == (2, 2, 2)
    assert not store.kept
    assert_identical(grads, wanted(block(*inputs), inputs))


GIVEN = {
    "matmuls": policy.matmuls(),
    "list": [aten.tanh],
    "function": lambda ctx, op, *_, **__: op is aten.mm.default,
    "offload": policy.offload_ops(aten.mm),
    "everything": policy.everything(),
    "nth": policy.every_nth(aten.mm, 2),
    "name": policy.save_named("h"),
}


def named(x, w):
    return (recollect.tag(x @ w, "h").tanh() @ w).sigmoid() * x


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_every_policy_goes_through_the_store(given):
    store = Store()
    with collector_off():
        assert_right(named, square(), given, store=store)
    assert store.puts > 0
    assert store.drops == store.puts
    assert not store.kept


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_without_backward_all_is_dropped(given):
    store = Store()
    with collector_off():
        out = recollect.checkpoint(named, *square(), policy=given, store=store)
        assert store.puts > 0
        del out
        assert store.drops == store.puts
    assert store.gets == 0


def test_an_exception_in_forward_drops_what_was_put():
    def failing(x, w):
        x @ w
        raise ArithmeticError

    store = Store()
    with pytest.raises(ArithmeticError):
        recollect.checkpoint(failing, *square(), policy=policy.matmuls(), store=store)
    gc.collect()
    assert store.puts == store.drops == 1


def test_retain_graph_and_a_second_backward():
    store, inputs = Store(), square()
    expected = wanted(block(*inputs), inputs)
    out = recollect.checkpoint(block, *inputs, policy=policy.matmuls(), store=store)
    for _ in range(3):
        assert_identical(wanted(out, inputs, retain_graph=True), expected)
    assert store.gets == store.puts == 2
    with collector_off():
        del out
    assert store.drops == 2


def test_create_graph():
    store, inputs = Store(), square()

    def second(region):
        (slope, _) = wanted(region(block, *inputs), inputs, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), inputs)

    region = selective(policy.matmuls(), store=store)
    assert_identical(second(region), second(lambda f, *a: f(*a)))
    gc.collect()
    assert store.drops == store.puts


@pytest.mark.parametrize("options", [{"early_stop": False}, {"debug": True}], ids=str)
def test_with_other_options(options):
    store = Store()
    assert_right(block, square(), policy.matmuls(), store=store, **options)
    gc.collect()
    assert store.drops == store.puts > 0


def test_a_store_that_loses_digits_is_used():
    """The gradients show it."""
    store = Store(lambda t: t.bfloat16().float())
    inputs = square()
    out = recollect.checkpoint(block, *inputs, policy=policy.matmuls(), store=store)
    assert_identical(out, block(*inputs))
    lossy, exact = wanted(out, inputs), wanted(block(*inputs), inputs)
    assert not torch.equal(lossy[0], exact[0])
    torch.testing.assert_close(lossy[0], exact[0], rtol=0.1, atol=0.1)


class Refusing(Store):
    def put(self, tensor):
        raise MemoryError("the store is full")


class Forgetful(Store):
    def get(self, handle):
        raise OSError("the disk is gone")


def test_a_store_that_refuses_a_tensor_is_heard():
    store = Refusing()
    for _ in range(2):
        with pytest.raises(MemoryError, match="the store is full"):
            recollect.checkpoint(block, *square(), policy=policy.matmuls(), store=store)
    assert_right(block, square(), policy.matmuls())
    gc.collect()
    assert store.drops == 0


def test_a_store_that_cannot_give_is_heard():
    store = Forgetful()
    out = recollect.checkpoint(block, *square(), policy=policy.matmuls(), store=store)
    with pytest.raises(OSError, match="the disk is gone"):
        out.sum().backward()
    del out
    gc.collect()
    assert store.drops == store.puts
    assert not recollect.is_recomputing()


@pytest.mark.parametrize("bad", [3, "store", object(), Store])
def test_what_is_no_store_is_refused(bad):
    with pytest.raises(TypeError, match="store"):
        recollect.checkpoint(block, *square(), policy=policy.matmuls(), store=bad)


def test_a_store_without_use_is_refused():
    with pytest.raises(ValueError, match="store has no effect"):
        recollect.checkpoint(block, *square(), store=Store())


def test_results_of_several_tensors():
    def function(x):
        values, indices = x.sort(-1)
        return values.sin() * indices

    store = Store()
    assert_right(function, square(1), policy.nothing(), store=store)
    gc.collect()
    assert store.puts == store.drops == 2 * 2  # twice


def test_the_last_result_is_not_left_in_the_store():
    """The recomputation stops before the last product."""
    store = Store()
    (x, w) = leaves((32, 32), (32, 32))
    out = recollect.checkpoint(
        lambda x, w: (x @ w).relu() @ w, x, w, policy=policy.matmuls(), store=store
    )
    assert len(store.kept) == 1
    assert out.requires_grad


def test_prefetch_and_before_write_are_called_where_they_are():
    class Full(Store):
        def __init__(self):
            super().__init__()
            self.ahead, self.written = [], []

        def prefetch(self, handles):
            self.ahead.append(list(handles))

        def before_write(self, handle):
            self.written.append(handle)

    store = Full()

    def function(x, w):
        h = x @ w
        h.mul_(2)
        return (h.sin() @ w).cos()

    (x, w) = square()
    expected = wanted(function(function(x, w), w), [x, w])
    region = selective(policy.matmuls(), store=store)
    out = region(function, region(function, x, w), w)
    assert store.written == [1, 3]
    assert_identical(wanted(out, [x, w]), expected)
    assert store.ahead[0] == [3, 4]
    assert [1, 2] in store.ahead


def test_checkpointed_and_sequential_take_a_store():
    model = seeded(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]))
    (x,) = square(1)
    expected = step(model, [x])[:-1]
    store = Store()
    options = {"policy": policy.matmuls(), "store": store}
    out = recollect.checkpoint_sequential(model, 2, x, **options)
    grads = wanted(out, [x, *model.parameters()])
    assert_identical([out.detach(), *grads], expected)
    assert store.puts == 2
    recollect.checkpointed(model, **options)
    assert_identical(step(model, [x])[:-1], expected)
    assert store.puts == 2 + 4
    del out
    gc.collect()
    assert store.drops == store.puts


def test_a_store_given_explicitly_copies():
    store, link = make_store()
    assert_right(block, square(), policy.matmuls(), store=store)
    link.finish()
    assert len(link.copied_out) == 4
    assert not link.violations
    gc.collect()
    assert store.held_bytes == 0


def test_a_host_store_on_the_cpu_leaves_tensors_where_they_are():
    store = HostStore()
    assert_right(block, square(), policy.offload_ops(aten.mm), store=store)
    assert store.held_bytes == 0


def test_a_wrapped_module_with_a_host_store_can_be_copied():
    model = recollect.checkpointed(
        nn.Linear(4, 4), policy=policy.matmuls(), store=HostStore(smallest=7)
    )
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_identical(copied(*square(1)), model(*square(1)))


@pytest.mark.parametrize("outer", [None, policy.matmuls(), policy.everything()], ids=repr)
def test_regions_in_regions(outer):
    store, other = Store(), Store()

    def nested(x, w):
        h = (x @ w).tanh()
        return recollect.checkpoint(block, h, w, policy=policy.matmuls(), store=store).exp()

    def flat(x, w):
        return block((x @ w).tanh(), w).exp()

    options = {"store": other} if outer is not None else {}
    inputs = square()
    expected = step(flat, inputs)
    assert_identical(step(nested, inputs, selective(outer, **options)), expected)
    gc.collect()
    assert store.puts == store.drops > 0
    assert other.puts == other.drops


def test_what_a_store_does_is_no_part_of_a_region():
    class Watching(Store):
        depth = deepest = 0

        def put(self, tensor):
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
            handle = super().put(tensor)
            self.depth -= 1
            return handle

    store = Watching()
    region = selective(policy.everything(), store=store)
    (x,) = square(1)
    out = region(lambda x: region(lambda y: y.sin().exp(), x.cos()).sin(), x)
    assert store.deepest == 1
    assert out.requires_grad


# --- inputs ---------------------------------------------------------------------------------------

ENGINES = {
    "rerun": functools.partial(recollect.checkpoint, offload_inputs=True),
    "reentrant": functools.partial(recollect.checkpoint, offload_inputs=True, engine="reentrant"),
    "with a policy": functools.partial(
        recollect.checkpoint, offload_inputs=True, policy=policy.save_ops(aten.tanh)
    ),
}
engines = pytest.mark.parametrize("run", ENGINES.values(), ids=ENGINES)


def chain(region, x, w, count=3):
    for _ in range(count):
        x = region(lambda x, w: (x @ w).tanh() * x, x, w)
    return x


@engines
def test_activations_are_offloaded_and_leaves_are_not(run):
    store, (x, w) = Store(), square()
    expected = wanted(chain(lambda f, *a: f(*a), x, w), [x, w])
    with_policy = "policy" in run.keywords
    with collector_off():
        out = chain(functools.partial(run, store=store), x, w)
        # The input of the first region is a leaf.
        assert store.puts == 2 + (3 if with_policy else 0)
        grads = wanted(out, [x, w])
        del out
        assert store.drops == store.puts == store.gets
    if run is ENGINES["reentrant"]:
        for ours, theirs in zip(grads, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    else:
        assert_identical(grads, expected)


@engines
def test_the_activation_itself_is_let_go(run):
    (x, w) = square()
    store = Store()
    h = x * 2
    alive = weakref.ref(h.untyped_storage())
    with collector_off():
        out = run(lambda h, w: (h @ w).tanh(), h, w, store=store)
        del h
        assert alive() is None
    assert out.requires_grad


@engines
def test_views_come_back_as_they_were(run):
    (x, w) = square()
    store, seen = Store(), []

    def function(h, w):
        seen.append((h.shape, h.stride()))
        return (h @ w).tanh() * h.sum()

    for view in (lambda h: h.t(), lambda h: h[1:, :], lambda h: h[:, ::2].t(), lambda h: h[0:1]):
        h = view(x * 2)
        if h.shape[1] != 4:
            h = h.t()[:, :2].expand(4, 2).reshape(2, 4)
        expected = wanted(function(h, w), [x, w], retain_graph=True)
        out = run(function, h, w, store=store)
        for ours, theirs in zip(wanted(out, [x, w]), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        shapes = {shape for shape, _ in seen}
        assert len(shapes) == 1
        seen.clear()


def test_keywords_are_offloaded():
    (x, w) = square()
    store = Store()

    def function(h, *, other):
        return (h @ other).tanh()

    def run(region, **options):
        return wanted(region(function, x * 2, other=w + 1, **options), [x, w])

    expected = run(lambda f, *a, **k: f(*a, **k))
    actual = run(recollect.checkpoint, offload_inputs=True, store=store)
    assert_identical(actual, expected)
    assert store.puts == 2


@engines
def test_what_needs_no_gradient_stays(run):
    store = Store()
    (x,) = square(1)
    mask = torch.ones(4, 4).triu()

    def function(h, mask):
        return (h * mask).tanh()

    out = run(function, x * 2, mask, store=store)
    kept = 1 if "policy" in run.keywords else 0
    assert store.puts == 1 + kept
    assert_identical(wanted(out, [x]), wanted(function(x * 2, mask), [x]))


@engines
def test_an_input_that_is_used_twice(run):
    (x,) = square(1)

    def function(a, b):
        return (a @ b).tanh() * a

    h = x * 2
    expected = wanted(function(h, h), [x], retain_graph=True)
    out = run(function, h, h, store=Store())
    for ours, theirs in zip(wanted(out, [x]), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@engines
def test_a_second_backward_of_offloaded_inputs(run):
    (x, w) = square()
    h = x * 2
    expected = wanted((h @ w).tanh(), [x, w], retain_graph=True)
    out = run(lambda h, w: (h @ w).tanh(), h, w, store=Store())
    for _ in range(2):
        assert_identical(wanted(out, [x, w], retain_graph=True), expected)


def test_double_backward_of_offloaded_inputs():
    (x, w) = square()

    def second(region):
        (slope,) = wanted(region(block, x * 2, w), [x], create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [x, w])

    region = functools.partial(ENGINES["rerun"], store=Store())
    assert_identical(second(region), second(lambda f, *a: f(*a)))


@pytest.mark.parametrize("inner", ["rerun", "with a policy"])
@pytest.mark.parametrize("outer", [*ENGINES, "plain"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_offloading_in_regions_in_regions(inner, outer):
    store = Store()
    (x, w) = square()

    def nested(x, w):
        return ENGINES[inner](block, x * 2, w, store=store).exp()

    region = functools.partial(ENGINES[outer], store=store) if outer in ENGINES else None
    expected = wanted(block(x * 3 * 2, w).exp(), [x, w])
    h = x * 3
    out = (recollect.checkpoint if region is None else region)(nested, h, w)
    for ours, theirs in zip(wanted(out, [x, w]), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    del out
    gc.collect()
    assert store.puts == store.drops


def test_an_offloaded_input_that_is_changed_is_refused():
    (x, w) = square()
    h = x * 2
    out = ENGINES["rerun"](lambda h, w: (h @ w).tanh(), h, w, store=Store())
    h.add_(1)
    with pytest.raises(recollect.CheckpointError, match="inplace operation"):
        out.sum().backward()


def test_an_input_in_a_host_store_that_is_changed_is_refused_by_both():
    for run in (ENGINES["rerun"], ENGINES["reentrant"]):
        (x, w) = square()
        h = x * 2
        out = run(lambda h, w: (h @ w).tanh(), h, w)
        h.add_(1)
        with pytest.raises((recollect.CheckpointError, KeptTensorError)):
            out.sum().backward()


def test_an_input_that_the_region_changes_is_refused():
    (x, _) = square()
    out = ENGINES["rerun"](lambda h: h.mul_(2).tanh(), x * 2, store=Store())
    with pytest.raises(recollect.CheckpointError, match="inplace operation"):
        out.sum().backward()


def test_offloading_takes_a_bool():
    with pytest.raises(TypeError, match="offload_inputs should be True or False"):
        recollect.checkpoint(block, *square(), offload_inputs=1)


def test_inputs_and_kept_tensors_with_late_copies():
    store, link = make_store()
    (x, w) = square()
    expected = wanted(chain(lambda f, *a: f(*a), x, w, 6), [x, w])
    run = selective(policy.matmuls(), offload_inputs=True, store=store)
    out = chain(run, x, w, 6)
    link.step()
    assert_identical(wanted(out, [x, w]), expected)
    del out
    link.finish()
    gc.collect()
    assert not link.violations
    assert store.held_bytes == 0


def test_sequential_and_checkpointed_take_it():
    model = seeded(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]))
    (x,) = square(1)
    expected = step(model, [x])[:-1]
    store = Store()
    out = recollect.checkpoint_sequential(model, 5, x * 1, offload_inputs=True, store=store)
    grads = wanted(out, [x, *model.parameters()])
    assert_identical([out.detach(), *grads], expected)
    assert store.puts == 4
    for layer in model:
        recollect.checkpointed(layer, offload_inputs=True, store=store)
    assert_identical(step(model, [x])[:-1], expected)
    assert store.puts == 4 + 4


def test_one_store_serves_many_regions_of_many_steps():
    model = seeded(lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(4)))
    store = Store()
    with collector_off():
        for _ in range(10):
            h = leaves((4, 4))[0]
            for layer in model:
                h = recollect.checkpoint(
                    lambda h, layer=layer: layer(h).tanh(),
                    h,
                    policy=policy.matmuls(),
                    store=store,
                    offload_inputs=True,
                )
            h.sum().backward()
            del h
            assert not store.kept
    assert store.puts == store.drops == 10 * (4 + 3)


def test_kept_ops_are_not_run_again_with_a_store():
    inputs = square()
    out = recollect.checkpoint(block, *inputs, policy=policy.matmuls(), store=Store())
    with Ops() as ops:
        out.sum().backward()
    assert ops[aten.mm] == 4
