"""What people ask of selective checkpointing, need by need (R5, R21 to R28, R34, R43, R44).

`pt#N` is issue or pull request N of pytorch/pytorch.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as collectives

import recollect
from recollect import CheckpointPolicy, is_recomputing, policy
from tests._support import assert_identical, measure
from tests.rerun.selective._helpers import (
    Block,
    Model,
    Ops,
    again,
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


def region_gradients(function, inputs, given, **options):
    out = recollect.checkpoint(function, *inputs, policy=given, **options)
    return torch.autograd.grad(total(out), inputs)


# --- R5: discrete choices (torchtitan#1117, #3336) ------------------------------------------------


def shaken(gate):
    """The output of a gate, which comes out otherwise in the recomputation."""
    flipped = torch.tensor(float(is_recomputing()))
    return gate.flip(-1) * flipped + gate * (1 - flipped)


class Moe(nn.Module):
    """Two of four experts for each token."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.routes = []

    def forward(self, x):
        scores = shaken(self.gate(x).softmax(-1).detach()) + 0 * self.gate(x)
        weights, chosen = scores.topk(2, -1)
        self.routes.append(chosen.tolist())
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, slot = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, tokens, expert(x[tokens]) * weights[tokens, slot, None])
        return out


@pytest.mark.parametrize("given", [policy.matmuls(), policy.nothing(), [aten.addmm]], ids=repr)
def test_routing_is_that_of_forward(given):
    model = seeded(Moe)
    (x,) = leaves((6, 8))
    expected = step(model, [x])[:-1]
    model.routes.clear()
    out = recollect.checkpoint(model, x, policy=given)
    grads = torch.autograd.grad(total(out), [x, *model.parameters()])
    assert model.routes[0] == model.routes[1]
    assert_identical([out.detach(), *grads], expected)


def test_who_insists_gets_another_routing():
    """The scenario is what it says: what is not kept comes out otherwise."""
    model = seeded(Moe)
    insisting = policy.recompute_ops(aten.topk) | policy.save_ops(aten.nonzero)
    out = recollect.checkpoint(model, *leaves((6, 8)), policy=insisting, determinism_check="none")
    with contextlib.suppress(recollect.CheckpointError, IndexError):
        out.sum().backward()
    assert len(model.routes) == 2
    assert model.routes[0] != model.routes[1]


def by_topk(p):
    return p.topk(2, -1)[1].float()


def by_sort(p):
    return p.sort(-1)[1].float()


def by_argmax(p):
    return p.argmax(-1, keepdim=True).float()


def by_multinomial(p):
    return p.multinomial(2).float()


def by_nonzero(p):
    return (p[:, 0] > p[:, 3]).nonzero().float().sum() * torch.ones(1)


def by_bincount(p):
    return p.flatten().mul(7).long().bincount(minlength=9)[:4].float()


def by_unique(p):
    return p[0].mul(100).round().unique(return_inverse=True)[1].float()


def by_searchsorted(p):
    return torch.searchsorted(torch.linspace(0, 1, 9), p).float()


def by_max(p):
    return p.max(-1)[1][:, None].float()


CHOICES = [by_topk, by_sort, by_argmax, by_multinomial, by_nonzero, by_bincount, by_unique]
CHOICES += [by_searchsorted]


@pytest.mark.parametrize("choose", [*CHOICES, by_max])
@pytest.mark.parametrize("given", [policy.nothing(), [aten.mm]], ids=repr)
def test_a_choice_is_that_of_forward(choose, given):
    seen = []

    def function(x, w):
        chosen = choose(shaken((x @ w).softmax(-1).detach()))
        seen.append(chosen.clone())
        return (x * chosen.sum(-1, keepdim=True)).sin() * chosen.sum()

    out = recollect.checkpoint(function, *square(), policy=given)
    out.sum().backward()
    assert len(seen) == 2
    assert_identical(seen[1], seen[0])


@pytest.mark.parametrize("choose", CHOICES)
def test_who_insists_may_repeat_a_choice(choose):
    def function(x, w):
        return (x * choose((x @ w).softmax(-1).detach()).sum()).sin()

    ops = [aten.topk, aten.sort, aten.argmax, aten.multinomial, aten.nonzero]
    ops += [aten.bincount, aten._unique2, aten.searchsorted]
    loss = recollect.checkpoint(
        function, *square(), policy=lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE
    ).sum()
    with Ops() as counted:
        loss.backward()
    again = sum(n for op, n in counted.count.items() if op.overloadpacket in ops)
    assert again == 1


# --- R21: typing errors (pt#176065) ---------------------------------------------------------------


def program(x, w):
    return ((x @ w).sin() @ w).cos()


def test_a_packet_in_a_list_matches():
    assert again(program, square(), [aten.mm], early_stop=False)[aten.mm.default] == 0


def test_a_policy_function_that_compares_with_a_packet_is_told():
    """`op == aten.mm` is never true: all would be recomputed without a word."""

    def mistaken(ctx, op, *args, **kwargs):
        if op == aten.mm:
            return CheckpointPolicy.MUST_SAVE
        return None

    with pytest.raises((TypeError, ValueError), match=r"returned None for aten\.mm\.default"):
        recollect.checkpoint(program, *square(), policy=mistaken)


@pytest.mark.parametrize("answer", [None, "save", 1, 0, object(), CheckpointPolicy])
def test_what_is_no_decision_is_refused(answer):
    with pytest.raises(ValueError, match="the policy function returned"):
        recollect.checkpoint(program, *square(), policy=lambda *_, **__: answer)


def test_offloading_is_not_recomputing():
    given = policy.offload_ops(aten.mm)
    assert again(program, square(), given, early_stop=False)[aten.mm.default] == 0


def test_an_op_that_never_runs_is_told():
    with pytest.warns(UserWarning, match=r"save_ops\(aten.bmm\) matched nothing.*aten.mm"):
        recollect.checkpoint(program, *square(), policy=policy.save_ops(aten.bmm))


# --- R22: modules and names (pt#153334, torchtitan#3336, #4497) -----------------------------------


def test_modules_are_the_unit_without_editing_the_model():
    model = seeded(Model)
    (x,) = leaves((2, 3, 8))
    expected = step(model, [x])
    model.region = selective(policy.save_modules("*.attn.wo"), early_stop=False)
    assert_identical(step(model, [x]), expected)
    loss = total(model(x))
    with Ops() as ops:
        loss.backward()
    assert ops[aten.addmm] == 3 * 5


def test_named_tensors_are_the_unit():
    def function(x, w):
        return recollect.tag(x @ w, "queries").sin() @ w

    counts = again(function, square(), policy.save_named("queries"), early_stop=False)
    assert counts[aten.mm.default] == 1


@pytest.mark.parametrize("given", [policy.save_modules("atn"), policy.save_named("q")], ids=repr)
def test_an_unknown_pattern_raises_and_lists_what_there_is(given):
    block = seeded(Block)

    def function(x):
        return recollect.tag(block(x), "output").sin()

    with pytest.raises(ValueError, match=r"output|attn\.wo"):
        recollect.checkpoint(function, *leaves((2, 3, 8)), policy=given)


# --- R24: stores (pt#170284, pt#191236, pt#158657) ------------------------------------------------


class Store:
    def __init__(self):
        self.log = Counter()
        self.kept = {}

    def put(self, tensor):
        self.log["put"] += 1
        self.kept[self.log["put"]] = tensor.clone()
        return self.log["put"]

    def get(self, handle):
        self.log["get"] += 1
        return self.kept[handle].clone()

    def drop(self, handle):
        self.log["drop"] += 1
        del self.kept[handle]


@pytest.mark.parametrize("given", [policy.matmuls(), [aten.sin], policy.everything()], ids=repr)
def test_a_store_sees_every_kept_tensor(given):
    store = Store()
    assert_right(program, square(), given, store=store)
    gc.collect()
    assert store.log["put"] == store.log["drop"] > 0
    assert 0 < store.log["get"] <= store.log["put"]
    assert not store.kept


# --- R25: several backwards (pt#142862) -----------------------------------------------------------


@pytest.mark.parametrize("given", [policy.matmuls(), policy.everything(), [aten.sin]], ids=repr)
def test_second_backward_and_create_graph(given):
    x, w = square()

    def run(region):
        out = total(region(program, x, w))
        first = torch.autograd.grad(out, [x, w], create_graph=True)
        second = torch.autograd.grad(out, [x, w], retain_graph=True)
        third = torch.autograd.grad(first[0].square().sum(), [x, w], retain_graph=True)
        fourth = torch.autograd.grad(first[1].square().sum() + out, [x, w])
        return first, second, third, fourth

    assert_identical(run(selective(given)), run(lambda f, *a: f(*a)))


# --- R26: in place (pt#113737) --------------------------------------------------------------------


@pytest.mark.parametrize("given", [policy.matmuls(), policy.everything()], ids=repr)
def test_in_place_on_what_is_kept_is_right(given):
    model = seeded(
        lambda: nn.Sequential(
            nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Dropout(0.5, True)
        )
    )
    assert_right(model, leaves((3, 4)), given)


def test_in_place_after_the_region_names_op_and_line():
    kept = []

    def function(x, w):
        kept.append(x @ w)
        return kept[-1].sin()

    out = recollect.checkpoint(function, *square(), policy=policy.matmuls())
    kept[0].detach().zero_()
    with pytest.raises(recollect.CheckpointError, match=r"aten\.mm\.default.*test_selective_needs"):
        out.sum().backward()


# --- R27: every second product (Automodel#2389) ---------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_every_second_product_in_each_call(count):
    given = policy.every_nth(aten.mm, 2)

    def function(x, w):
        for _ in range(count):
            x = (x @ w).tanh()
        return x

    for _ in range(3):
        counts = again(function, square(), given, early_stop=False)
        assert counts[aten.mm.default] == count - count // 2


# --- R28: nothing twice (Megatron-LM#1225) --------------------------------------------------------


def test_a_kept_result_and_its_kept_reader_are_held_once():
    """By the replay engine, which knows who reads what. The rerun engine holds both, as torch."""
    size = 64
    x, w = leaves((size, size), (size, size))
    one = size * size * 4

    def function(x, w):
        return (x @ w).relu() @ w

    def held(region):
        def forward():
            return function(x, w).sum() if region is None else region(function, x, w).sum()

        return measure(forward, lambda loss: torch.autograd.grad(loss, [x, w])).held

    given = policy.save_ops(aten.mm, aten.relu)
    assert held(None) == held(selective(given, engine="replay")) == one + 4
    assert held(selective(given, preserve_rng_state=False)) == 2 * one + 4


# --- R34: collectives (torchtitan#2763, #1672) ----------------------------------------------------


#: torch 2.11 has them under other names.
all_gather = getattr(collectives, "all_gather_single", collectives.all_gather_tensor)
all_gather_autograd = getattr(
    collectives, "all_gather_single_autograd", collectives.all_gather_tensor_autograd
)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def collective_ops(counter):
    return sum(n for op, n in counter.items() if "c10d" in op.name())


@pytest.mark.parametrize("given", [policy.nothing(), policy.matmuls(), [aten.sin]], ids=repr)
def test_collectives_are_not_run_again(group, given):
    def function(x, w):
        h = collectives.all_reduce(x.sin() @ w, "sum", group)
        g = all_gather(h.cos() @ w, 0, group)
        return (g.exp() @ w).sin()

    inputs = square()
    counts, grads = [], []
    for region in (lambda f, *a: f(*a), selective(given)):
        loss = total(region(function, *inputs))
        with Ops() as backward:
            grads.append(torch.autograd.grad(loss, inputs))
        counts.append(collective_ops(backward.count))
    without = total(recollect.checkpoint(function, *inputs))
    with Ops() as backward:
        torch.autograd.grad(without, inputs)
    assert counts[0] == counts[1] < collective_ops(backward.count)
    for actual, right in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(actual, right)


def test_collectives_with_gradients_are_right(group):
    def function(x, w):
        h = all_gather_autograd(x @ w, 0, group)
        return (h.sin() @ w).cos()

    def flat(x, w):
        return ((x @ w).sin() @ w).cos()

    inputs = square()
    expected = torch.autograd.grad(total(flat(*inputs)), inputs)
    out = recollect.checkpoint(function, *inputs, policy=policy.nothing())
    loss = total(out)
    with Ops() as plain:
        torch.autograd.grad(total(function(*inputs)), inputs)
    with Ops() as ours:
        grads = torch.autograd.grad(loss, inputs)
    for actual, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(actual, right)
    gathers = [n for op, n in ours.count.items() if "all_gather" in op.name()]
    assert sum(gathers) == 0
    assert collective_ops(plain.count) > 0


# --- R43, R44: offload (pt#158657, Megatron-LM#7398, torchtune#1867) ------------------------------


def offloaded(function, inputs, given, link_steps=1, **options):
    """Gradients by way of a host store whose copies come late; the link, to look at."""
    store, link = make_store()
    out = recollect.checkpoint(function, *inputs, policy=given, store=store, **options)
    for _ in range(link_steps):
        link.step()
    grads = torch.autograd.grad(total(out), inputs)
    del out
    gc.collect()
    link.finish()
    assert not link.violations
    assert store.held_bytes == 0
    return grads, link


def test_a_square_transpose_is_right():
    """Of the same shape, and of other strides: a copy by shape mixes it up."""

    def function(x, w):
        return (x.t() @ w).t().sin() @ (w.t() @ x.t()).t()

    inputs = square()
    expected = torch.autograd.grad(total(function(*inputs)), inputs)
    for given in (policy.matmuls(), policy.everything(), policy.save_ops(aten.sin)):
        grads, _ = offloaded(function, inputs, given)
        assert_identical(grads, expected)


def test_views_of_one_tensor_are_stored_once():
    def function(x, w):
        qkv = x @ w
        q, k, v = qkv.chunk(4, -1)[:3]
        return (q.sin() * k.cos() * v.exp()).tanh()

    inputs = leaves((64, 64), (64, 64))
    expected = torch.autograd.grad(total(function(*inputs)), inputs)
    grads, link = offloaded(function, inputs, policy.matmuls())
    assert_identical(grads, expected)
    assert link.copied_out == [64 * 64 * 4]


def test_parameters_are_never_copied():
    linear = seeded(lambda: nn.Linear(64, 64))

    def function(x):
        return F.linear(x, linear.weight.t().t(), linear.bias).sin() @ linear.weight

    inputs = leaves((8, 64))
    store, link = make_store()
    run = selective(policy.matmuls(), store=store, offload_inputs=True)
    out = run(lambda h, w: function(h) @ w.t(), inputs[0] * 1, linear.weight)
    torch.autograd.grad(total(out), inputs)
    link.finish()
    assert link.copied_out
    assert max(link.copied_out) <= 8 * 64 * 4  # the weight is eight times as large


@pytest.mark.parametrize("seed", range(5))
def test_late_copies_are_bit_exact(seed):
    model = seeded(lambda: Model(4))
    (x,) = leaves((2, 3, 8))
    expected = step(model, [x])
    store, link = make_store()
    link.random.seed(seed)
    given = policy.offload_modules("mlp") | policy.offload_ops(aten.bmm)

    def region(layer, x):
        link.step()
        return recollect.checkpoint(layer, x, policy=given, store=store, offload_inputs=True)

    model.region = region
    for _ in range(2):
        assert_identical(step(model, [x]), expected)
    gc.collect()
    link.finish()
    assert not link.violations
    assert store.held_bytes == 0
    assert link.copied_out
    assert sum(link.copied_in) > 0


def test_in_place_on_what_is_on_its_way_is_right():
    def function(x, w):
        h = x @ w
        h.mul_(2)
        return h.relu_().sin()

    inputs = leaves((64, 64), (64, 64))
    expected = torch.autograd.grad(total(function(*inputs)), inputs)
    grads, _ = offloaded(function, inputs, policy.matmuls(), link_steps=0)
    assert_identical(grads, expected)


def test_what_is_needed_next_is_fetched_ahead():
    """Region by region backwards: as one is recomputed, the one before is on its way."""
    model = seeded(lambda: Model(3))
    (x,) = leaves((2, 3, 8))
    asked = []
    store, link = make_store()
    prefetch = store.prefetch
    store.prefetch = lambda handles: (asked.append(len(list(handles))), prefetch(handles))
    model.region = selective(policy.offload_ops(aten.addmm), store=store)
    total(model(x)).backward()
    link.finish()
    assert len(asked) >= 3
    assert all(asked)


def test_each_way_of_giving_a_store_is_the_same():
    store, _ = make_store()
    inputs = square()
    expected = region_gradients(program, inputs, policy.matmuls())
    for given in (policy.matmuls(), policy.offload_ops(aten.mm), [aten.mm]):
        assert_identical(region_gradients(program, inputs, given, store=store), expected)
    wrapped = recollect.checkpointed(program, policy=policy.matmuls(), store=store)
    assert_identical(torch.autograd.grad(total(wrapped(*inputs)), inputs), expected)
    partial = functools.partial(recollect.checkpoint, policy=policy.matmuls(), store=store)
    assert_identical(torch.autograd.grad(total(partial(program, *inputs)), inputs), expected)
