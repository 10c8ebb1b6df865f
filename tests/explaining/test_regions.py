"""`recollect.explain` with ``engine="replay"``: what it says is held is what the allocator says."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect import policy
from recollect.policy.op_info import op_info
from recollect.replay import recording_cache as library
from tests._support import assert_identical, gradients, leaf, measure
from tests.explaining.test_run import (
    BYTES,
    VARIANTS,
    CopyingStore,
    decoder,
    held,
    held_by,
    only,
    rows_of,
    tokens,
)

aten = torch.ops.aten
replay = partial(recollect.checkpoint, engine="replay")

NAMES = (
    *("checkpointed", "matmuls_and_attention", "save_modules", "everything", "nothing"),
    *("list", "function", "offload"),
)
REPLAY = {name: {**(VARIANTS[name] or {}), "engine": "replay"} for name in NAMES}


def slots_of(owner: Any) -> list[library.CacheEntry]:
    return list(library._entries.get(owner, {}).values())


def explained(function: Callable[..., Any], **options: Any) -> recollect.Explanation:
    """Of one region, whose input is an activation. What is held is compared with the allocator."""
    x = leaf(64, 64)

    def run() -> Any:
        return replay(function, x.cos(), **options)

    explanation = recollect.explain(run)
    assert explanation.held_bytes == held(run)
    return explanation


def saying(explanation: Any, **wanted: Any) -> tuple[str, str]:
    row = only(explanation, **wanted)
    return row.fate, row.reason


# --- held bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])
@pytest.mark.parametrize("options", REPLAY.values(), ids=REPLAY)
def test_held_bytes_are_those_of_the_allocator(options: Any, dropout: float) -> None:
    model = decoder(options, dropout=dropout)
    before = recollect.explain(model, tokens())
    assert before.held_bytes == held_by(model, tokens())
    after = recollect.explain(model, tokens())
    assert after.rows == before.rows


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])
@pytest.mark.parametrize("name", ["checkpointed", "matmuls_and_attention"])
def test_what_is_recomputed_is_what_plain_autograd_holds_besides(name: str, dropout: float) -> None:
    plain = recollect.explain(decoder(dropout=dropout), tokens())
    ours = recollect.explain(decoder(REPLAY[name], dropout=dropout), tokens())
    needed = sum(
        row.bytes
        for row in ours.rows
        if row.op != "(random state)" and row.fate in ("kept", "input", "recomputed")
    )
    assert needed == plain.held_bytes
    assert ours.held_bytes < plain.held_bytes


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


WEIGHT = leaf(64, 64)


def with_custom_function(x: Tensor) -> Tensor:
    return _Doubled.apply(x.sin()).sin()  # type: ignore[no-any-return, no-untyped-call]


def in_place(x: Tensor) -> Tensor:
    y = x.sin()
    y.mul_(2)
    return y.cos().relu_() @ WEIGHT


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x.sin() @ WEIGHT).sin() @ WEIGHT


def partly_in_vain(x: Tensor) -> Tensor:
    (x.sin() @ WEIGHT).cos()
    return x.sin().exp()


def several_results(x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x @ WEIGHT).sin()
    return y, y.cos()


def constants(x: Tensor) -> Tensor:
    return x * torch.tensor([2.0] * 64) + torch.arange(64.0).sin() * x.sin()


def lists(x: Tensor) -> Tensor:
    return torch.stack([*torch.cat(torch.split(x.sin(), 16)).exp().unbind(0)]).sin()


def draws(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5).exp() + F.dropout(x, 0.3).sin()


def by_mask(x: Tensor) -> Tensor:
    return x.sin()[x > 0].sin().exp()


def rerun_inside(x: Tensor) -> Any:
    return recollect.checkpoint(lambda x: (x.sin() @ x.cos()).sin(), x + 1).sin()


FUNCTIONS = (
    *(with_custom_function, in_place, under_autocast, partly_in_vain, several_results),
    *(constants, lists, draws, by_mask, rerun_inside),
)


@pytest.mark.parametrize("rules", [None, policy.save_ops(aten.sin), policy.everything()], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_held_bytes_of_functions(function: Any, rules: Any) -> None:
    assert explained(function, policy=rules).calls[0].engine == "replay"


def test_a_function_that_is_called_twice() -> None:
    x = leaf(64, 64)

    def run() -> Any:
        y = x.cos()
        return replay(lambda x: x.sin().sin(), y), replay(lambda x: x.sin().sin(), y + 1)

    explanation = recollect.explain(run)
    assert explanation.held_bytes == held(run)
    assert explanation.regions == 2


# --- fates and reasons ----------------------------------------------------------------------------


def test_regions_and_their_engine() -> None:
    explanation = recollect.explain(decoder(REPLAY["checkpointed"]), tokens())
    assert [(c.region, c.engine, c.notes) for c in explanation.calls] == [
        (f"blocks.{n}", "replay", ()) for n in range(3)
    ]
    row = only(explanation, path="blocks.1.gate")
    assert (row.fate, row.reason, row.region) == ("recomputed", "no policy", "blocks.1")
    assert saying(explanation, path="embedding") == ("input", "input of blocks.0")


def test_a_policy() -> None:
    explanation = recollect.explain(decoder(REPLAY["matmuls_and_attention"]), tokens())
    row = only(explanation, path="blocks.1.gate")
    assert (row.fate, row.reason, row.region) == ("kept", "matmuls()", "blocks.1")
    assert saying(explanation, path="blocks.1", op="aten.silu") == ("recomputed", "no rule matches")
    needless = ("not held", "matmuls(), but nothing needs it")
    assert saying(explanation, path="blocks.1.down") == needless
    # What comes of the product is all that is needed, and is held in its place.
    replaced = ("not held", "matmuls(), but a result computed from it is held")
    assert saying(explanation, path="blocks.1.out") == replaced
    assert only(explanation, path="blocks.1", reason="matmuls(), for aten.mm").op == "aten.add"


def test_results_that_are_not_to_be_repeated() -> None:
    explanation = explained(lambda x: x.sin().topk(3).values.sin())
    assert saying(explanation, dtype=torch.int64) == ("kept", "must keep: discrete")


def test_an_op_that_may_give_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_info(aten.exp.default), "is_nondeterministic", True)
    explanation = explained(lambda x: x.exp().sin().sin())
    assert saying(explanation, op="aten.exp") == ("kept", "must keep: nondeterministic")


def test_memory_to_which_others_have_a_way() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.detach().numpy()
        return y.exp().sin()

    assert saying(explained(function), op="aten.exp") == ("kept", "must keep: opaque")


def test_state_that_is_changed_later() -> None:
    state = torch.zeros(64, 64)

    def function(x: Tensor) -> Tensor:
        y = state.sin() * x
        state.add_(1)
        return y.sin()

    assert saying(explained(function), op="aten.sin", fate="kept", region="function") == (
        "kept",
        "must keep: changed later",
    )


def test_a_constant() -> None:
    explanation = explained(lambda x: x * torch.tensor([2.0] * 64))
    assert saying(explanation, op="aten.lift_fresh") == ("kept", "must keep: made of constants")


def test_a_named_tensor() -> None:
    def function(x: Tensor) -> Tensor:
        return recollect.tag((x + 1).sin(), "waves").sin().sin()

    explanation = explained(function, policy=policy.save_named("waves"))
    row = only(explanation, fate="kept", reason="save_named('waves')")
    assert (row.op, row.bytes) == ("aten.sin", BYTES)


def test_a_tensor_in_a_closure_is_an_input() -> None:
    x = leaf(64, 64)

    def run() -> Any:
        y = x.exp()
        return replay(lambda x: (x.sin() * y.cos()).exp(), x.cos())

    explanation = recollect.explain(run)
    assert explanation.held_bytes == held(run)
    assert [row.op for row in rows_of(explanation, fate="input")] == ["aten.exp", "aten.cos"]


def test_ops_that_backward_does_not_need_are_not_run_again() -> None:
    explanation = explained(lambda x: x.sin() + 1 + 1)
    assert rows_of(explanation, fate="recomputed") == []


def test_random_states() -> None:
    explanation = explained(draws)
    assert only(explanation, op="(random state)").bytes == 2 * torch.get_rng_state().nbytes


# --- stores ---------------------------------------------------------------------------------------


def test_offloaded_results_and_inputs() -> None:
    options = {"policy": policy.matmuls(), "offload_inputs": True, "store": CopyingStore()}
    explanation = recollect.explain(decoder({**options, "engine": "replay"}), tokens())
    assert saying(explanation, path="blocks.1.gate") == ("offloaded", "matmuls()")
    row = only(explanation, path="embedding", fate="offloaded")
    assert (row.reason, row.region) == ("offload_inputs", "blocks.0")
    assert only(explanation, path="blocks.1", reason="matmuls(), for aten.mm").fate == "offloaded"


def test_what_a_host_store_leaves_on_the_cpu_is_held() -> None:
    explanation = recollect.explain(decoder(REPLAY["offload"]), tokens())
    reason = "offload_ops(aten.mm), but stays where it is"
    assert saying(explanation, path="blocks.1.gate") == ("kept", reason)


# --- notes ----------------------------------------------------------------------------------------


def test_shapes_that_depend_on_data() -> None:
    explanation = explained(lambda x: x.sin()[x > 0].exp())
    note = "recorded at every call: shapes inside depend on data"
    assert explanation.calls[0].notes == (note,)
    assert note in str(explanation)


def test_a_copy_of_what_the_region_returns() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, y[y > 0].exp() * y.exp().sum()

    explanation = explained(function, policy=policy.save_ops(aten.sin))
    rows = rows_of(explanation, op="aten.sin")
    assert [row.reason for row in rows] == ["part of the result", "save_ops(aten.sin)"]
    assert [row.shape for row in rows] == [(64, 64), (64, 64)]


def test_a_copy_of_what_the_region_changes() -> None:
    state = torch.zeros(64, 64)

    def function(x: Tensor) -> Tensor:
        y = state.sin() * x[x > 0].sum()
        state.add_(1)
        return y.sin()

    explanation = explained(function)
    row = only(explanation, op="(copy)")
    assert (row.reason, row.bytes, row.region) == ("must keep: changed later", BYTES, "function")


def test_another_function_at_every_call() -> None:
    x = leaf(64, 64)

    def function(x: Tensor) -> Tensor:
        return (x.sin() * random.random()).sin()

    def run() -> Any:
        return replay(function, x.cos())

    for _ in range(4):
        run()
    explanation = recollect.explain(run)
    (note,) = explanation.calls[0].notes
    assert note.startswith("recorded at every call: it differs in every call: ")
    assert note in str(explanation)
    assert explanation.held_bytes == held(run)


def test_a_call_that_differs() -> None:
    x, factors = leaf(64, 64), [2.0]

    def function(x: Tensor) -> Tensor:
        return (x.sin() * factors[0]).sin().exp().sin()

    def run() -> Any:
        return replay(function, x.cos())

    run()
    factors[0] = 3.0
    explanation = recollect.explain(run)
    (note,) = explanation.calls[0].notes
    assert note.startswith("it is recorded again from some point on: another call of ")
    reason = note.replace("it is recorded again from some point on", "must keep")
    kept = rows_of(explanation, reason=reason)
    assert [row.op for row in kept] == ["aten.sin"]  # what it goes on from
    # It will be so in the next call too: nothing has been learnt from this one.
    assert explanation.held_bytes == measure(run, lambda out: None, warm_up=False).held


@pytest.mark.filterwarnings("ignore:engine='replay' does not support")
def test_a_region_that_is_left_to_the_rerun_engine() -> None:
    explanation = explained(lambda x: torch.sparse.mm(x.sin().to_sparse(), WEIGHT).sin())
    (call,) = explanation.calls
    assert call.engine == "rerun"
    assert call.notes[0].startswith("left to the rerun engine: a tensor of ")
    assert "torch.sparse_coo" in call.notes[0]
    assert call.notes[0] in str(explanation)


@pytest.mark.filterwarnings("ignore:engine='replay' does not support")
def test_an_argument_that_is_not_understood() -> None:
    x = leaf(8, 8)
    explanation = recollect.explain(lambda: replay(lambda x: x.to_dense().sin(), x.to_sparse()))
    (call,) = explanation.calls
    assert (call.engine, len(call.notes)) == ("rerun", 1)


def test_a_region_inside_a_region_of_the_rerun_engine() -> None:
    x = leaf(64, 64)

    def outer(x: Tensor) -> Any:
        return replay(lambda x: x.sin().sin(), x + 1).sin()

    explanation = recollect.explain(lambda: recollect.checkpoint(outer, x))
    assert [call.engine for call in explanation.calls] == ["rerun", "rerun"]
    assert explanation.calls[0].notes == ()
    assert explanation.calls[1].notes[0].startswith("left to the rerun engine: it is inside")


def test_a_region_inside_a_region_of_its_kind_is_part_of_that() -> None:
    explanation = explained(lambda x: replay(lambda x: x.sin().sin(), x + 1).sin())
    assert explanation.regions == 1


def test_regions_as_text() -> None:
    lines = str(recollect.explain(decoder(REPLAY["checkpointed"]), tokens())).splitlines()
    assert ["blocks.*", "x3", "replay"] in [line.split() for line in lines]
    lines = str(recollect.explain(decoder({}), tokens())).splitlines()
    assert not any(line.startswith("region ") for line in lines)


# --- nothing changes ------------------------------------------------------------------------------


def test_what_the_engine_remembers_stays() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = leaf(4, 8)

    def run() -> Any:
        return replay(layer, x.sin())

    recollect.explain(run)
    assert all(entry.recording is None for entry in slots_of(layer))
    run()
    (entry,) = slots_of(layer)
    recording = entry.recording
    assert recording is not None
    recollect.explain(run)
    assert slots_of(layer) == [entry]
    assert entry.recording is recording


@pytest.mark.parametrize("name", ["checkpointed", "matmuls_and_attention"])
def test_training_goes_on_as_if_nothing_had_been_asked(name: str) -> None:
    def train(ask: bool) -> Any:
        model = decoder(REPLAY[name], dropout=0.1)
        for _ in range(3):
            if ask:
                recollect.explain(model, tokens())
            model(tokens()).backward()
        return gradients(model), torch.get_rng_state()

    assert_identical(train(True), train(False))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_the_call_that_is_explained(name: str) -> None:
    found: SimpleQueue[Any] = SimpleQueue()  # a list would be put back as it was
    model = decoder(REPLAY[name], dropout=0.1)
    weights = list(model.parameters())

    def step() -> None:
        torch.manual_seed(3)
        found.put(torch.autograd.grad(model(tokens()), weights))

    plain = decoder(dropout=0.1)
    torch.manual_seed(3)
    expected = torch.autograd.grad(plain(tokens()), list(plain.parameters()))
    recollect.explain(step)
    assert found.qsize() == 2  # recorded, and then as every later call
    step()
    recollect.explain(step)
    assert found.qsize() == 4
    for _ in range(4):
        assert_identical(found.get(), expected)


@pytest.mark.parametrize("name", ["checkpointed", "matmuls_and_attention", "offload"])
def test_no_graph_and_no_tensor_is_left(name: str) -> None:
    model = decoder(REPLAY[name])
    ours = measure(lambda: recollect.explain(model, tokens()), lambda _: None)
    assert ours.held == 0
