"""Decisions about single ops: what a plan has the engine do."""

import copy
import gc
from weakref import ref

import pytest
import torch
from torch import nn

from recollect.replay import rematerialize as recall
from recollect.replay.engine import LeftToRerun, replay_region
from recollect.replay.named_schedule import NamedSchedule
from recollect.store.offload_batch import OffloadBatch
from tests.store._fake import make_store


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth=4, width=16):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.more = 0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        for _ in range(self.more):
            x = torch.sin(x)
        return x


class Store:
    """Holds what it is given, and notes what it is told."""

    def __init__(self):
        self.log = []
        self.held = {}

    def put(self, tensor):
        number = len(self.held)
        self.held[number] = tensor.clone()
        self.log.append(("put", number))
        return number

    def get(self, handle):
        self.log.append(("get", handle))
        return self.held[handle].clone()

    def drop(self, handle):
        self.log.append(("drop", handle))

    def prefetch(self, handles):
        self.log.append(("prefetch", tuple(handles)))

    def release(self, handle):
        self.log.append(("release", handle))


def first(*keys):
    """The first result of each op."""
    return dict.fromkeys(keys, (0,))


def named(kept, away=None, store=None, arrivals=None, begin=None):
    """A schedule, with a store in the place of its own."""
    found = NamedSchedule(
        tuple(kept.items()),
        tuple((away or {}).items()),
        tuple((arrivals or {}).items()),
        begin=begin,
    )
    if store is not None:
        vars(found)["store"] = store
    return found


BOUNDARIES = first(*(f"layers.{n}|aten::add|0" for n in range(4)))
TANHS = first(*(f"layers.{n}|aten::tanh|0" for n in range(3)))


def step(model, x, decisions, offload_batch=None):
    offload_batch = offload_batch or OffloadBatch(host=decisions.store, last_first=True)
    out = replay_region(model.forward, (x,), {}, decisions, offload_batch, False)
    assert type(out) is not LeftToRerun
    return out


def gradients(model, x, run):
    model.zero_grad()
    x.grad = None
    run(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(8, 16, requires_grad=True)


def assert_equal(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "decisions",
    [
        named({}),
        named(BOUNDARIES),
        named(BOUNDARIES | TANHS),
        named(first("layers.2|aten::tanh|0")),
    ],
    ids=["nothing", "boundaries", "more", "one"],
)
def test_gradients_are_those_of_plain(model, x, decisions):
    plain = gradients(copy.deepcopy(model), x, copy.deepcopy(model).forward)
    twin = copy.deepcopy(model)
    expected = gradients(twin, x, twin)
    expected = [each.clone() for each in expected]
    del plain
    for _ in range(3):
        assert_equal(gradients(model, x, lambda x: step(model, x, decisions)), expected)


def count_reruns(monkeypatch):
    ran = []
    run = recall.Rematerializer._run

    def counted(self, passed, ops):
        ran.extend(str(op.op) for op in ops)
        run(self, passed, ops)

    monkeypatch.setattr(recall.Rematerializer, "_run", counted)
    return ran


def test_only_what_is_not_kept_runs_again(model, x, monkeypatch):
    ran = count_reruns(monkeypatch)
    decisions = named(BOUNDARIES | first(*(f"layers.{n}|aten::tanh|0" for n in range(4))))
    for _ in range(2):
        step(model, x, decisions).sum().backward()
    # Backward needs the inputs of products and the results of tanh, and all of these are kept.
    assert ran == []
    step(model, x, named(BOUNDARIES)).sum().backward()
    assert ran.count("aten.tanh.default") == 4
    assert ran.count("aten.addmm.default") == 4


def test_an_op_of_which_one_result_is_kept_may_run_again_for_another(x):
    class Sorted(nn.Module):
        def forward(self, x):
            values, order = torch.sort(torch.tanh(x))
            return values.cos() * order

    model = Sorted()
    twin = x.detach().clone().requires_grad_()
    model(twin).sum().backward()
    # `sort` is one of those that are never run again, whatever is decided; `tanh` is not.
    for decisions in (named(first("|aten::sort|0")), named(first("|aten::tanh|0"))):
        for _ in range(2):
            x.grad = None
            step(model, x, decisions).sum().backward()
            assert torch.equal(x.grad, twin.grad)


def test_what_goes_away_comes_back_last_first(model, x):
    expected = [each.clone() for each in gradients(model, x, model)]
    for _ in range(3):  # recorded, then checked
        store = Store()
        decisions = named(BOUNDARIES, TANHS, store)
        assert_equal(gradients(model, x, lambda x, d=decisions: step(model, x, d)), expected)
        puts = [entry for entry in store.log if entry[0] == "put"]
        gets = [number for what, number in store.log if what == "get"]
        assert len(puts) == 3
        assert ("prefetch", (2, 1, 0)) in store.log
        assert gets == sorted(gets, reverse=True)
        gc.collect()
        assert sorted(n for what, n in store.log if what == "drop") == [0, 1, 2]


@pytest.mark.parametrize("calls", [1, 2, 3], ids=["recorded", "checked", "checked again"])
def test_arrivals_are_told_after_their_ops(model, x, calls):
    store = Store()
    arrivals = {"layers.1|aten::add|0": 1, "layers.3.down|aten::addmm|0": 1}
    decisions = named(BOUNDARIES, TANHS, store, arrivals)
    out = None
    for _ in range(calls):
        del out  # which holds what was put
        store.log.clear()
        store.held.clear()
        out = step(model, x, decisions)
    # The first tanh is put in layer 0, the second in layer 1, before its sum.
    assert store.log == [("put", 0), ("put", 1), ("release", 0), ("put", 2), ("release", 1)]
    out.sum().backward()


def test_at_the_end_of_forward_the_rest_arrives(model, x):
    store = Store()
    offload_batch = OffloadBatch(host=store, last_first=True)
    out = step(model, x, named(BOUNDARIES, TANHS, store), offload_batch)
    offload_batch.release()
    assert out.requires_grad  # and hence holds what was put
    assert [entry for entry in store.log if entry[0] == "release"] == [
        ("release", 0),
        ("release", 1),
        ("release", 2),
    ]


def test_fetching_begins_when_so_many_tickets_are_left(model, x):
    # Of each layer two tensors are asked for that are not here, eight in all.
    for begin, comes_before in ((None, True), (6, True), (5, False)):
        store = Store()
        decisions = named(BOUNDARIES, TANHS, store, begin=begin)
        for _ in range(2):
            store.log.clear()
            store.held.clear()
            step(model, x, decisions).square().sum().backward()
        gets = [n for n, entry in enumerate(store.log) if entry[0] == "get"]
        fetch = [n for n, entry in enumerate(store.log) if entry[0] == "prefetch"]
        assert len(fetch) == 1
        assert (fetch[0] < gets[0]) is comes_before


def test_ops_are_known_by_their_names_whatever_the_shapes(model):
    decisions = named(BOUNDARIES, TANHS, Store())
    for length in (8, 3, 11):
        x = torch.randn(length, 16, requires_grad=True)
        expected = [each.clone() for each in gradients(model, x, model)]
        assert_equal(gradients(model, x, lambda x: step(model, x, decisions)), expected)
        assert len(decisions.store.held) >= 3


def test_the_rest_of_a_call_that_differs_goes_by_the_same_decisions(model, x, monkeypatch):
    decisions = named(first("|aten::sin|1") | BOUNDARIES)
    step(model, x, decisions).sum().backward()
    step(model, x, decisions).sum().backward()
    model.more = 3  # from here on it is recorded
    expected = [each.clone() for each in gradients(model, x, model)]
    ran = count_reruns(monkeypatch)
    assert_equal(gradients(model, x, lambda x: step(model, x, decisions)), expected)
    # The second sine is kept, so only the first runs again, for the cosine of the second.
    assert ran.count("aten.sin.default") == 1


def test_what_is_sent_after_less_than_was_expected_is_let_go_in_time() -> None:
    store, _ = make_store(_polls=False)
    offload_batch = OffloadBatch(host=store, last_first=True)
    parcels, storages = [], []
    for expected in (2, 1, 1):  # of the first call one result was not sent
        tensor = torch.randn(100)
        storages.append(ref(tensor.untyped_storage()))
        parcels.append(offload_batch.put(tensor))
        del tensor
        offload_batch.release(expected)
        assert storages[-1]() is None
