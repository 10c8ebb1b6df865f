"""Errors that help, and friction that is gone, need by need (R13 to R20).

`pt#N` is issue or pull request N of pytorch/pytorch.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from tests._support import (
    ALL,
    RERUNS,
    Counted,
    Run,
    assert_identical,
    assert_transparent,
    gradients,
    leaf,
    plain,
    reentrant,
    rerun,
)

aten = torch.ops.aten


# --- R13: errors that say what, where and why -----------------------------------------------------


class Layer(nn.Module):
    """What it does in its second run is up to a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.again(x) if recollect.is_recomputing() else x.sigmoid().exp()

    def again(self, x: Tensor) -> Tensor:
        return x.sigmoid().exp()


class OtherOp(Layer):
    def again(self, x: Tensor) -> Tensor:
        return x.cumsum(0)[:2].tanh().exp()


class OtherShape(Layer):
    def again(self, x: Tensor) -> Tensor:
        return x[:2].sigmoid().exp()


class OtherDtype(Layer):
    def again(self, x: Tensor) -> Tensor:
        return x.double().sigmoid().exp()


class FewerOps(Layer):
    def again(self, x: Tensor) -> Tensor:
        return x.sigmoid()


class Model(nn.Module):
    """A stack of layers, each of them a region."""

    def __init__(self, run: Run, *layers: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.run = partial(run, **options)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x


def message_of(model: nn.Module) -> str:
    """What backward says, all of it."""
    out = model(leaf(3, 4))
    with pytest.raises(recollect.CheckpointError) as info:
        out.sum().backward()
    assert not recollect.is_recomputing()
    return str(info.value)


DIFFERING = pytest.mark.parametrize("culprit", [OtherOp, OtherShape, OtherDtype, FewerOps])


@RERUNS
@DIFFERING
def test_r13_the_region_is_named_by_its_place_in_the_model(culprit: type[Layer], run: Run) -> None:
    """R13: which of a hundred layers it is (torchtitan#1117, LlamaFactory#6438)."""
    message = message_of(Model(run, Layer(), culprit(), Layer()))
    assert re.search(r"\blayers\.1\b", message)
    assert "layers.0" not in message
    assert "layers.2" not in message


@RERUNS
@pytest.mark.parametrize(
    ("culprit", "forward", "again", "shapes"),
    [
        (OtherOp, "sigmoid", "cumsum", ["[3, 4]"]),
        (OtherShape, "sigmoid", "slice", ["[3, 4]", "[2, 4]"]),
        (OtherDtype, "sigmoid", "_to_copy", ["[3, 4]"]),
    ],
)
def test_r13_the_first_op_that_differs_is_shown_in_both_runs(
    culprit: type[Layer], forward: str, again: str, shapes: list[str], run: Run
) -> None:
    """R13: the ops with their shapes, and where the code is (torchtitan#1117)."""
    message = message_of(Model(run, Layer(), culprit(), Layer(), debug=True))
    assert forward in message
    assert again in message
    for shape in shapes:
        assert shape in message
    assert "test_errors.py" in message


@RERUNS
@DIFFERING
def test_r13_a_likely_cause_and_what_to_do(culprit: type[Layer], run: Run) -> None:
    """R13: not a position in a list alone, but a way on (torchtitan#1117, LlamaFactory#6438)."""
    message = message_of(Model(run, Layer(), culprit())).lower()
    assert re.search(r"\bcause|\bbecause|likely|depends on", message)
    assert re.search(r"debug=true|determinism_check|is_recomputing", message)


@RERUNS
def test_r13_wrapped_layers(run: Run) -> None:
    """R13, torchtitan#1117: the same for layers wrapped one by one."""
    model = nn.Sequential(nn.Sequential(Layer(), OtherShape()), Layer())
    for layer in (*model[0], model[1]):
        recollect.checkpointed(layer)
    assert re.search(r"\b0\.1\b", message_of(model))


# --- R14: debugging in earnest --------------------------------------------------------------------


def block(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).tanh() @ weight.T + x.sin()


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is aten.mm.default


@pytest.mark.parametrize(
    "policy", [None, [aten.mm], keep_products], ids=["all", "list", "function"]
)
def test_r14_debug_with_a_policy_and_nesting(policy: Any) -> None:
    """R14: debug is refused together with selective checkpointing (pt#163923)."""

    def train(run: Run) -> Any:
        options = {} if run is plain else {"debug": True, "policy": policy}
        x, weight = leaf(2, 3), leaf(3, 3)

        def outer(x: Tensor, weight: Tensor) -> Tensor:
            return run(block, F.dropout(x, 0.5).exp(), weight, **options).cos()

        out = run(outer, x, weight, **options)
        out.sum().backward()
        return out, x.grad, weight.grad

    assert_transparent(train, rerun)


@pytest.mark.parametrize("policy", [None, [aten.addmm]], ids=["all", "some"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_r14_debug_leaves_nothing_behind(policy: Any, nested: bool) -> None:
    """R14: 300 steps with as many objects after as before (pt#130096, fairseq2#474)."""
    layer = nn.Linear(3, 3)
    inner = partial(rerun, layer, debug=True, policy=policy) if nested else layer

    def step() -> None:
        x = leaf(2, 3)
        rerun(lambda x: inner(x).tanh(), x, debug=True, policy=policy).sum().backward()
        layer.zero_grad()

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(20):
        step()
    before = objects()
    for _ in range(300):
        step()
    assert objects() - before < 30


@pytest.mark.parametrize("policy", [[aten.addmm], [aten.exp]], ids=["addmm", "exp"])
def test_r14_debug_explains_a_mismatch_under_a_policy(policy: Any) -> None:
    """R14, pt#163923: both lists of operations, selective or not."""
    model = Model(rerun, Layer(), OtherShape(), debug=True, policy=policy)
    message = message_of(model)
    assert "sigmoid" in message
    assert "slice" in message


# --- R15: no flag, no warning, no missing gradients -----------------------------------------------


def test_r15_no_flag_no_warning() -> None:
    """R15: nobody has to know ``use_reentrant`` (pt#160534, transformers#42489)."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer, x = nn.Linear(3, 3), torch.randn(2, 3)
        recollect.checkpoint(layer, x).sum().backward()
        recollect.checkpointed(layer)(x).sum().backward()
        recollect.checkpoint_sequential([torch.sin, layer, torch.exp], 2, x).sum().backward()
    assert layer.weight.grad is not None


class LowRank(nn.Module):
    """A frozen layer with a small trainable one beside it, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen(x) + self.up(self.down(x))).tanh()


@RERUNS
def test_r15_frozen_inputs(run: Run) -> None:
    """R15: LoRA trains without ``enable_input_require_grads`` (trl#2671, transformers#42489)."""

    def train(run: Run) -> Any:
        embedding = nn.Embedding(10, 4).requires_grad_(False)
        layers = nn.ModuleList(LowRank() for _ in range(3))
        x = embedding(torch.arange(6).reshape(2, 3))
        for layer in layers:
            x = run(layer, x)
        x.square().sum().backward()
        trained = [p.grad for p in layers.parameters() if p.requires_grad]
        assert len(trained) == 6
        assert all(grad is not None for grad in trained)
        return x, gradients(layers), embedding.weight.grad

    assert_transparent(train, run)


def test_r15_reentrant_says_so() -> None:
    """R15, pt#160534: the engine that cannot do it warns, as torch's does."""
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        reentrant(nn.Linear(3, 3), torch.randn(2, 3))


# --- R16: nothing internal is seen ----------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, [aten.sin]], ids=["all", "some"])
def test_r16_the_signal_to_stop_is_not_caught(policy: Any) -> None:
    """R16: ``except Exception`` in user code must not see how a recomputation ends early."""
    seen: list[BaseException] = []

    def guarded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        try:
            return function(x)
        except Exception as error:
            seen.append(error)
            raise

    def careful(x: Tensor) -> Tensor:
        for function in (torch.sin, torch.exp, torch.cos):
            x = guarded(function, x)
        return x

    def train(run: Run) -> Any:
        x = leaf(3)
        options = {} if run is plain else {"policy": policy}
        run(lambda x: run(careful, x, **options).tanh(), x, **options).sum().backward()
        return x.grad

    assert_transparent(train, rerun)
    assert seen == []


@RERUNS
def test_r16_cleaning_up_still_works(run: Run) -> None:
    """R16: ``finally`` and context managers of user code run when a recomputation is cut short."""
    balance = Counter()

    class Held:
        def __enter__(self) -> None:
            balance["held"] += 1

        def __exit__(self, *exc: object) -> None:
            balance["held"] -= 1

    def careful(x: Tensor) -> Tensor:
        with Held():
            try:
                return x.sin().exp()
            finally:
                balance["finished"] += 1

    run(careful, leaf(3)).sum().backward()
    assert balance == {"held": 0, "finished": 2}


# --- R17: inputs that cannot be replayed ----------------------------------------------------------


@ALL
@pytest.mark.parametrize("make", [iter, lambda items: (item for item in items), enumerate])
def test_r17_iterators_are_refused_at_the_call(make: Callable[[Any], Any], run: Run) -> None:
    """R17: a count of tensors says nothing; the error names what cannot be read twice."""
    function = Counted(lambda x, items: x * len(list(items)))
    with pytest.raises(TypeError, match=r"iterator|generator|once") as info:
        run(function, leaf(3), make([1, 2]))
    assert re.search(r"args\[1\]|items", str(info.value))
    assert re.search(r"list\(|tuple\(|\blist\b", str(info.value)), "the message shows the way out"
    assert function.started == 0


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.square()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        first, _ = ctx.saved_tensors
        second, _ = ctx.saved_tensors
        return grad * (first + second)


@pytest.mark.parametrize(
    "policy", [None, [aten.sin], [aten.pow, aten.mul]], ids=["all", "sin", "products"]
)
@pytest.mark.parametrize("early_stop", [True, False])
def test_r17_saved_tensors_are_read_twice(policy: Any, early_stop: bool) -> None:
    """R17: a custom function that reads ``ctx.saved_tensors`` in two places."""

    def train(run: Run) -> Any:
        options = {} if run is plain else {"policy": policy, "early_stop": early_stop}
        x = leaf(3)
        out = run(lambda x: ReadsTwice.apply(F.dropout(x.sin(), 0.5)).exp(), x, **options)
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, rerun)


# --- R18: segments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "segments", "checkpointed"),
    [(9, 5, [2, 2, 2, 2]), (9, 2, [5]), (10, 4, [3, 3, 2]), (4, 4, [1, 1, 1]), (7, 1, [])],
)
def test_r18_segments_are_balanced(layers: int, segments: int, checkpointed: list[int]) -> None:
    """R18: 9 layers in 5 segments were 1, 1, 1, 1, 5 (pt#68423, pt#152752)."""
    steps = [Counted(torch.sin) for _ in range(layers)]
    x = leaf(3)
    with recollect.set_checkpoint_early_stop(False):
        recollect.checkpoint_sequential(steps, segments, x).sum().backward()
    again = sum(checkpointed)
    assert [step.started for step in steps] == [2] * again + [1] * (layers - again)

    entered = []
    steps = [partial(_note_region, entered, n) for n in range(layers)]
    recollect.checkpoint_sequential(steps, segments, x)
    lengths = list(Counter(entered).values())
    assert lengths[: len(checkpointed)] == checkpointed
    assert max(lengths) - min(lengths) <= 1


def _note_region(entered: list[Any], number: int, x: Tensor) -> Tensor:
    """Note the hooks that are around: each region has its own."""
    entered.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
    return x.sin()


@pytest.mark.parametrize("segments", [0, -1, 4])
def test_r18_out_of_range(segments: int) -> None:
    """R18: a clear error (pt#152752)."""
    with pytest.raises(ValueError, match="segments"):
        recollect.checkpoint_sequential([torch.sin, torch.cos, torch.exp], segments, leaf(3))


def test_r18_same_gradients() -> None:
    """R18, pt#68423: whatever the cut."""

    def train(segments: int, run: Run) -> Any:
        layers = [nn.Linear(3, 3) for _ in range(5)]
        chain, x = nn.Sequential(*layers, nn.Dropout(0.5), nn.Tanh()), leaf(2, 3)
        out = chain(x) if run is plain else recollect.checkpoint_sequential(chain, segments, x)
        out.sum().backward()
        return out, x.grad, gradients(chain)

    for segments in range(1, 8):
        assert_transparent(partial(train, segments), rerun)


# --- R19: on, and once ----------------------------------------------------------------------------


@ALL
def test_r19_a_region_runs_twice_a_step(run: Run) -> None:
    """R19: neither silently off nor applied twice (diffusers#9850, Liger-Kernel#1064)."""
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    functions = [Counted(lambda x, layer=layer: layer(x).tanh()) for layer in layers]
    for step in range(1, 4):
        x = leaf(2, 3)
        for function in functions:
            x = run(function, x)
        x.sum().backward()
        assert [function.started for function in functions] == [2 * step] * 3


def test_r19_wrapped_modules_run_twice_a_step() -> None:
    """R19, diffusers#9850: in a model that is trained, evaluated and trained again."""
    runs = Counter()

    class Noted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            runs[recollect.is_recomputing()] += 1
            return super().forward(x).tanh()

    model = nn.Sequential(*(recollect.checkpointed(Noted(3, 3)) for _ in range(3)))
    model(leaf(2, 3)).sum().backward()
    assert runs == {False: 3, True: 3}
    with torch.no_grad():
        model.eval()(leaf(2, 3))
    assert runs == {False: 6, True: 3}
    model.train()(leaf(2, 3)).sum().backward()
    assert runs == {False: 9, True: 6}


def test_r19_wrapping_twice_is_refused() -> None:
    """R19, Liger-Kernel#1064: a second wrapping would recompute twice."""
    layer = recollect.checkpointed(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="checkpointed already"):
        recollect.checkpointed(layer)


# --- R20: names -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).tanh() * self.scale


def names(model: nn.Module) -> list[list[str]]:
    return [
        list(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_buffers()],
        [name for name, _ in model.named_modules()],
    ]


@pytest.mark.parametrize(
    "options", [{}, {"policy": [aten.addmm]}, {"engine": "reentrant"}], ids=str
)
def test_r20_names_do_not_change(options: dict[str, Any]) -> None:
    """R20: ``state_dict`` is the same before, during and after (pt#117399)."""
    model = nn.Sequential(Block(), Block())
    before, content = names(model), copy.deepcopy(model.state_dict())
    for layer in model:
        recollect.checkpointed(layer, **options)
    assert names(model) == before
    assert_identical(model.state_dict(), content)
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(names(model)))
    model(leaf(4, 3)).sum().backward()
    assert seen == [before]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(nn.Sequential(*model)[:1]))):
        assert list(twin.state_dict()) == before[0][: len(twin.state_dict())]
    plain_model = nn.Sequential(Block(), Block())
    plain_model.load_state_dict(model.state_dict())
    model.load_state_dict(plain_model.state_dict())
    for layer in model:
        recollect.unwrap(layer)
    assert names(model) == before
