"""What people report as silently wrong gradients or state, need by need (R1 to R10).

Each scenario is one that plain autograd gets right, or refuses. `pt#N` is issue or pull request N
of pytorch/pytorch.
"""

# ruff: noqa: PLW0108 - a lambda around a module is how many people write a region
# ruff: noqa: PLW0603 - where a region has its state from is under test, globals included

from __future__ import annotations

import contextvars
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import recollect
from tests._support import (
    ALL,
    CHECKPOINTS,
    RERUNS,
    Run,
    Scenario,
    assert_identical,
    assert_transparent,
    compat_rerun,
    gradients,
    leaf,
    plain,
    reentrant,
    rerun,
)

aten = torch.ops.aten


#: Forward of a reentrant region runs without grad, and a region nested in it notices.
nested_reentrant = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True:UserWarning"
)


def selective(ops: list[Any]) -> Run:
    """A region that keeps the outputs of ``ops``."""
    return partial(rerun, policy=ops)


def library_streams() -> Any:
    """Where the streams of ``random`` and numpy stand."""
    name, keys, *rest = np.random.get_state()
    return repr(random.getstate()), name, keys.tobytes(), rest


def assert_same(scenario: Scenario, run: Run) -> None:
    """As `assert_transparent`, for the streams of ``random`` and numpy too."""

    def seeded(run: Run) -> Any:
        random.seed(0)
        np.random.seed(0)
        return scenario(run), library_streams()

    assert_transparent(seeded, run)


def assert_same_or_refused(scenario: Scenario, run: Run) -> None:
    """Right or loud: the outcome of plain autograd, or an error, never another outcome."""
    try:
        assert_same(scenario, run)
    except recollect.CheckpointError:
        assert not recollect.is_recomputing()


# --- R1: state that a region changes --------------------------------------------------------------


class Scaled(nn.Module):
    """A layer whose output depends on a state, which the call changes afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = (self.linear(x) * self.scale()).sin()
        self.update(x.detach())
        return out

    def scale(self) -> Any:
        raise NotImplementedError

    def update(self, x: Tensor) -> None:
        raise NotImplementedError


class EmaInPlace(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.ones(3))

    def scale(self) -> Tensor:
        return 1 + self.ema

    def update(self, x: Tensor) -> None:
        self.ema.mul_(0.9).add_(x.mean(0), alpha=0.1)


class EmaByData(EmaInPlace):
    """Written to without a trace in its version."""

    def update(self, x: Tensor) -> None:
        self.ema.data.copy_(0.9 * self.ema + 0.1 * x.mean(0))


class EmaAssigned(EmaInPlace):
    def update(self, x: Tensor) -> None:
        self.ema = 0.9 * self.ema + 0.1 * x.mean(0)


class EmaOfBothKinds(EmaInPlace):
    """Assigned, and then written to in place."""

    def update(self, x: Tensor) -> None:
        self.ema = 0.9 * self.ema
        self.ema += 0.1 * x.mean(0)


class Counter(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def scale(self) -> Tensor:
        return 1 + self.calls

    def update(self, x: Tensor) -> None:
        self.calls += 1


class AmaxHistory(Scaled):
    """As fp8 layers keep it: the newest first, the scale from the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(4))

    def scale(self) -> Tensor:
        return 1 / (1 + self.history.amax())

    def update(self, x: Tensor) -> None:
        self.history.copy_(self.history.roll(1))
        self.history[0] = x.abs().amax()


class LazyBuffer(Scaled):
    """None until the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def scale(self) -> Any:
        return 1 if self.seen is None else 1 + self.seen

    def update(self, x: Tensor) -> None:
        self.seen = x.mean() if self.seen is None else self.seen + x.mean()


def batch_norm_1d() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())


def batch_norm_2d() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (3, 1, 1)),
        nn.Conv2d(3, 3, 1),
        nn.BatchNorm2d(3, momentum=None),  # a cumulative average: reads num_batches_tracked
        nn.Tanh(),
        nn.Flatten(),
    )


def instance_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 6),
        nn.Unflatten(1, (3, 2)),
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def spectral_norm() -> nn.Module:
    """Power iteration on buffers, one step a call."""
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Tanh())


def hooked_spectral_norm() -> nn.Module:
    """The older form of it, in a hook that runs before forward."""
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)), nn.Tanh())


class Experts(nn.Module):
    """Routing with loads counted, and a bias that evens them out, as in DeepSeek-V3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 4)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.register_buffer("load", torch.zeros(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = (scores + self.bias).topk(2, dim=-1).indices
        weights = scores.gather(-1, chosen)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        self.load += torch.bincount(chosen.flatten(), minlength=4)
        self.bias -= 0.1 * (self.load - self.load.mean()).sign()
        return out


STATEFUL = pytest.mark.parametrize(
    "make",
    [
        batch_norm_1d,
        batch_norm_2d,
        instance_norm,
        EmaInPlace,
        EmaByData,
        EmaAssigned,
        EmaOfBothKinds,
        Counter,
        AmaxHistory,
        LazyBuffer,
        Experts,
    ],
    ids=lambda make: make.__name__,
)
SOME_STATEFUL = pytest.mark.parametrize(
    "make",
    [batch_norm_1d, EmaInPlace, EmaAssigned, LazyBuffer],
    ids=lambda make: make.__name__,
)

Way = Callable[[Run, nn.Module, Tensor], Tensor]
WAYS: dict[str, Way] = {}


def way(call: Way) -> Way:
    WAYS[call.__name__] = call
    return call


@way
def the_module_itself(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    return run(module, x)


@way
def a_bound_method(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    return run(module.forward, x)


@way
def a_partial(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    return run(partial(module), x)


@way
def a_partial_of_a_method(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    return run(partial(module.__call__), x)


@way
def a_lambda(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    return run(lambda x: module(x), x)


@way
def a_custom_forward(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    """As transformers does."""

    def create_custom_forward(module: nn.Module) -> Callable[..., Tensor]:
        def custom_forward(*inputs: Tensor) -> Tensor:
            return module(*inputs)

        return custom_forward

    return run(create_custom_forward(module), x)


@way
def a_default_argument(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    return run(lambda x, module=module: module(x), x)


@way
def an_argument(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    return run(lambda module, x: module(x), module, x)


@way
def a_list_among_the_arguments(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    return run(lambda modules, x: modules[0](x), [module], x)


class Parent(nn.Module):
    def __init__(self, run: Run, child: nn.Module) -> None:
        super().__init__()
        self.run = run
        self.children_of_mine = nn.ModuleList([child])

    def forward(self, x: Tensor) -> Tensor:
        return self.run(lambda x: self.children_of_mine[0](x), x)


@way
def a_lambda_over_the_parents_self(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    return Parent(run, module)(x)


class Trainer:
    """No module, but has one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def call(self, x: Tensor) -> Tensor:
        return self.module(x)


@way
def a_method_of_an_object_that_has_it(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    return run(Trainer(module).call, x)


class Unregistered(nn.Module):
    """Keeps a module in a list, so that its parameters are not its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.shared = [module]

    def forward(self, x: Tensor) -> Tensor:
        return self.shared[0](x)


@way
def a_module_that_has_it_in_a_list(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    return run(Unregistered(module), x)


@way
def a_function_called_by_the_function(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return module(x)

    def outer(x: Tensor) -> Tensor:
        return inner(x)

    return run(outer, x)


@way
def a_wrapped_module(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    if run is plain:
        return module(x)
    options = {"engine": "reentrant"} if run is reentrant else {}
    recollect.checkpointed(module, **options)
    try:
        return module(x)
    finally:
        recollect.unwrap(module)


def train(make: Callable[[], nn.Module], way: Way, run: Run, *, eval_mode: bool = False) -> Any:
    """Two steps; after each all that a user could look at."""
    module = make()
    module.train(not eval_mode)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    history = []
    for _ in range(2):
        optimizer.zero_grad()
        x = leaf(4, 3)
        out = way(run, module, x)
        after_forward = [b.clone() for b in module.buffers()]
        out.square().sum().backward()
        after_backward = [b.clone() for b in module.buffers()]
        history.append([out, x.grad, gradients(module), after_forward, after_backward])
        optimizer.step()
    return history


@ALL
@STATEFUL
def test_r1_state_is_changed_once(make: Callable[[], nn.Module], run: Run) -> None:
    """R1: BatchNorm statistics, load counters, amax (pt#96136, fairscale#1035, TE#415)."""
    assert_same(partial(train, make, the_module_itself), run)


@ALL
@pytest.mark.parametrize("make", [spectral_norm, hooked_spectral_norm])
def test_r1_state_of_a_parametrization(make: Callable[[], nn.Module], run: Run) -> None:
    """R1, pt#96136: a weight that is computed from buffers, which the call updates."""
    assert_same(partial(train, make, the_module_itself), run)


@ALL
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@SOME_STATEFUL
def test_r1_wherever_the_function_has_the_module_from(
    make: Callable[[], nn.Module], way: Way, run: Run
) -> None:
    """R1, pt#96136: regions are closures and methods as often as modules."""
    assert_same(partial(train, make, way), run)


@RERUNS
@STATEFUL
def test_r1_module_in_a_keyword(make: Callable[[], nn.Module], run: Run) -> None:
    """R1, pt#96136: the module comes by name."""

    def by_name(run: Run, module: nn.Module, x: Tensor) -> Tensor:
        return run(lambda x, *, block: block(x), x, block=module)

    assert_same(partial(train, make, by_name), run)


@ALL
@STATEFUL
def test_r1_eval_mode(make: Callable[[], nn.Module], run: Run) -> None:
    """R1, pt#96136: in eval mode statistics are read only, other state changes as always."""
    assert_same(partial(train, make, the_module_itself, eval_mode=True), run)


@ALL
@STATEFUL
def test_r1_two_forwards_before_one_backward(make: Callable[[], nn.Module], run: Run) -> None:
    """R1, pt#96136: each rerun finds the state that its own forward found."""

    def accumulate(run: Run) -> Any:
        module, first, second = make(), leaf(4, 3), leaf(4, 3)
        out = run(module, first).sum() + 2 * run(module, second).square().sum()
        after_forward = [b.clone() for b in module.buffers()]
        out.backward()
        return out, first.grad, second.grad, gradients(module), after_forward, [*module.buffers()]

    assert_same(accumulate, run)


@ALL
@STATEFUL
def test_r1_the_same_module_twice_in_a_row(make: Callable[[], nn.Module], run: Run) -> None:
    """R1, pt#96136: shared layers, as in a recurrent stack."""

    def unroll(run: Run) -> Any:
        module, x = make(), leaf(4, 3)
        out = run(module, run(module, x))
        out.square().sum().backward()
        return out, x.grad, gradients(module), [*module.buffers()]

    assert_same(unroll, run)


@ALL
@STATEFUL
def test_r1_backward_in_the_order_of_the_forwards(make: Callable[[], nn.Module], run: Run) -> None:
    """R1, pt#96136: the older of two regions goes backward first, then one more forward runs."""

    def interleave(run: Run) -> Any:
        module, first, second = make(), leaf(4, 3), leaf(4, 3)
        older, newer = run(module, first), run(module, second)
        older.sum().backward()
        between = [b.clone() for b in module.buffers()]
        third = run(module, second)
        newer.square().sum().backward()
        third.sum().backward()
        return first.grad, second.grad, gradients(module), between, [*module.buffers()]

    assert_same(interleave, run)


@RERUNS
@STATEFUL
def test_r1_backward_twice(make: Callable[[], nn.Module], run: Run) -> None:
    """R1, pt#96136: with ``retain_graph`` the region runs a third time."""

    def twice(run: Run) -> Any:
        module, x = make(), leaf(4, 3)
        out = run(module, x).square().sum()
        out.backward(retain_graph=True)
        out.backward()
        return x.grad, gradients(module), [*module.buffers()]

    assert_same(twice, run)


NESTED = {
    "rerun": (rerun, rerun),
    "compat": (compat_rerun, compat_rerun),
    "reentrant": (reentrant, reentrant),
    "rerun in reentrant": (reentrant, rerun),
    "reentrant in rerun": (rerun, reentrant),
    "selective in rerun": (rerun, selective([aten.addmm])),
    "rerun in selective": (selective([aten.addmm]), rerun),
}


@nested_reentrant
@pytest.mark.parametrize("runs", NESTED.values(), ids=NESTED)
@STATEFUL
def test_r1_nested_regions(make: Callable[[], nn.Module], runs: tuple[Run, Run]) -> None:
    """R1, pt#96136: state of the inner region, and of the outer one on both sides of it."""

    def nested(run: Run) -> Any:
        outer, inner = (plain, plain) if run is plain else runs
        module, within, x = make(), make(), leaf(4, 3)
        out = outer(lambda x: module(inner(within, module(x))), x)
        out.square().sum().backward()
        state = [*module.buffers(), *within.buffers()]
        return out, x.grad, gradients(module), gradients(within), state

    assert_same(nested, runs[0])


KEEPING = {
    "products": [aten.addmm, aten.convolution],
    "norms": [aten.native_batch_norm, aten.cudnn_batch_norm],
    "pointwise": [aten.mul, aten.add, aten.sin, aten.tanh, aten.mean],
    "copies": [aten.copy_, aten.add_, aten.roll, aten.amax],
}


# Not every module has all of these ops, and a policy that matches nothing says so once.
@pytest.mark.filterwarnings("ignore:the policy's save_ops:UserWarning")
@pytest.mark.parametrize("ops", KEEPING.values(), ids=KEEPING)
@STATEFUL
def test_r1_selective(make: Callable[[], nn.Module], ops: list[Any]) -> None:
    """R1, pt#96136: what writes the state may itself be kept."""
    assert_same(partial(train, make, the_module_itself), selective(ops))


@ALL
@pytest.mark.parametrize("place", ["closure", "list", "attribute"])
def test_r1_functional_batch_norm(place: str, run: Run) -> None:
    """R1, pt#96136: statistics of one's own, which the op changes behind its schema's back."""

    class Holder:
        pass

    def normalise(run: Run) -> Any:
        mean, var, x = torch.zeros(3), torch.ones(3), leaf(4, 3)
        stats, holder = [mean, var], Holder()
        holder.mean, holder.var = mean, var
        function = {
            "closure": lambda x: F.batch_norm(x, mean, var, training=True).sin(),
            "list": lambda x: F.batch_norm(x, *stats, training=True).sin(),
            "attribute": lambda x: F.batch_norm(x, holder.mean, holder.var, training=True).sin(),
        }[place]
        out = run(function, x)
        after_forward = mean.clone(), var.clone()
        out.square().sum().backward()
        return out, x.grad, after_forward, mean, var

    assert_same(normalise, run)


@RERUNS
def test_r1_functional_batch_norm_of_arguments(run: Run) -> None:
    """R1, pt#96136: as above, with the statistics among the arguments. Right, or an error."""

    def normalise(given: str, run: Run) -> Any:
        mean, var, x = torch.zeros(3), torch.ones(3), leaf(4, 3)
        if given == "args":
            function = lambda x, m, v: F.batch_norm(x, m, v, training=True).sin()  # noqa: E731
            out = run(function, x, mean, var)
        elif given == "list":
            function = lambda x, stats: F.batch_norm(x, *stats, training=True).sin()  # noqa: E731
            out = run(function, x, [mean, var])
        else:
            function = partial(F.batch_norm, training=True)
            out = run(function, x, running_mean=mean, running_var=var)
        out.square().sum().backward()
        return out, x.grad, mean, var

    for given in ("args", "list", "kwargs"):
        assert_same_or_refused(partial(normalise, given), run)


@ALL
@SOME_STATEFUL
def test_r1_no_false_alarm_from_versions(make: Callable[[], nn.Module], run: Run) -> None:
    """R1, pt#96136: putting state back must not look like a change to who has saved it since."""

    def save_afterwards(run: Run) -> Any:
        module, x, weight = make(), leaf(4, 3), leaf(1)
        out = run(module, x)
        buffers = [*module.buffers()]
        penalty = sum((weight * b.float()).sum() for b in buffers)
        out.square().sum().backward()
        versions_unchanged = [b._version for b in buffers]
        penalty.backward()
        return x.grad, weight.grad, versions_unchanged, buffers

    assert_same(save_afterwards, run)


@ALL
@pytest.mark.parametrize("make", [EmaInPlace, EmaAssigned, Counter, AmaxHistory])
def test_r1_state_changed_by_others_before_backward(
    make: Callable[[], nn.Module], run: Run
) -> None:
    """R1, pt#96136: who resets statistics between forward and backward finds them as they left."""

    def reset(run: Run) -> Any:
        module, x = make(), leaf(4, 3)
        out = run(module, x)
        with torch.no_grad():
            for buffer in module.buffers():
                buffer.fill_(2)
        out.square().sum().backward()
        return out, x.grad, gradients(module), [*module.buffers()]

    assert_same_or_refused(reset, run)


class MomentumEncoder(nn.Module):
    """The parameters of one encoder follow those of the other, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
            keys = self.key(x)
        return (self.query(x) @ keys.T).softmax(-1)


class Renormalised(nn.Module):
    """An embedding that scales its own weight down, in place, before it reads from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(4, 3, max_norm=0.5), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.embedding(torch.arange(4))) * x


@ALL
@pytest.mark.parametrize("make", [MomentumEncoder, Renormalised])
def test_r1_parameters_that_the_region_changes(make: Callable[[], nn.Module], run: Run) -> None:
    """R1, pt#96136: state in parameters instead of buffers. Right, or an error."""

    def follow(run: Run) -> Any:
        module = make()
        return train(lambda: module, the_module_itself, run), [*module.parameters()]

    assert_same_or_refused(follow, run)


@RERUNS
def test_r1_state_with_a_history(run: Run) -> None:
    """R1, pt#155171: a recurrent state in a buffer, through which gradients flow back in time."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(3, 3)
            self.register_buffer("hidden", torch.zeros(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.cell(x, self.hidden)
            return self.hidden.sin()

    def unroll(run: Run) -> Any:
        module, inputs = Recurrent(), [leaf(4, 3) for _ in range(3)]
        sum(run(module, x).square().sum() for x in inputs).backward()
        return [x.grad for x in inputs], gradients(module), module.hidden

    assert_same(unroll, run)


@ALL
def test_r1_large_statistics(run: Run) -> None:
    """R1, pt#96136: buffers too large to be copied at every call, evaluated before trained."""

    def train(run: Run) -> Any:
        norm, history = nn.BatchNorm1d(20_000, affine=False), []
        for training in (False, True, True, False):
            x = leaf(2, 20_000)
            run(norm.train(training), x).square().sum().backward()
            history.append([x.grad, [b.clone() for b in norm.buffers()]])
        return history

    assert_same(train, run)


@ALL
def test_r1_state_after_a_failed_rerun(run: Run) -> None:
    """R1, pt#96136: state is as after forward when the recomputation ends by an exception."""
    module = EmaInPlace()

    def fail_again(x: Tensor) -> Tensor:
        out = module(x)
        if recollect.is_recomputing():
            raise KeyError
        return out.exp()

    out = run(fail_again, leaf(4, 3))
    after_forward = module.ema.clone()
    with pytest.raises(KeyError):
        out.sum().backward()
    assert_identical(module.ema, after_forward)


@ALL
def test_r1_state_in_two_places(run: Run) -> None:
    """R1, pt#96136: one buffer that two modules share is put back once, and rightly."""

    def share(run: Run) -> Any:
        first, second, x = EmaInPlace(), EmaInPlace(), leaf(4, 3)
        second.ema = first.ema
        out = run(lambda x: second(first(x)), x)
        out.square().sum().backward()
        return out, x.grad, gradients(first), gradients(second), first.ema, second.ema

    assert_same(share, run)


@ALL
@pytest.mark.parametrize("size", [8, 40_000], ids=["small", "large"])
def test_r1_tensor_of_a_closure_that_the_region_changes(size: int, run: Run) -> None:
    """R1, pt#155171: a cache in a plain tensor. Right, or an error."""

    def count(run: Run) -> Any:
        cache, x = torch.zeros(size), leaf(1)

        def region(x: Tensor) -> Tensor:
            out = (x * (1 + cache)).sin()
            cache.add_(1)
            return out

        out = run(region, x)
        out.sum().backward()
        return out, x.grad, cache

    assert_same_or_refused(count, run)


# --- R2: random numbers of every kind -------------------------------------------------------------

DRAWS: dict[str, Callable[[], float]] = {
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.shuffle": lambda: float(random.sample(range(1, 100), 3)[0]),
    "numpy.rand": lambda: float(np.random.rand()),
    "numpy.randn": lambda: float(np.random.randn()),
    "numpy.choice": lambda: float(np.random.choice([1, 2, 3, 4, 5, 6, 7, 8])),
}


@ALL
@pytest.mark.parametrize("draws_before", [0, 1])
@pytest.mark.parametrize("name", DRAWS)
def test_r2_streams_of_libraries(name: str, draws_before: int, run: Run) -> None:
    """R2: ``random`` and numpy, the waiting half of a pair included (pt#127676, pt#121212)."""
    draw = DRAWS[name]

    def noisy(x: Tensor) -> Tensor:
        return (x * draw()).sin() * draw() * draw()

    def train(run: Run) -> Any:
        x = leaf(3)
        drawn = [draw() for _ in range(draws_before)]
        out = run(noisy, x)
        drawn.append(draw())
        out.sum().backward()
        drawn.append(draw())
        return out, x.grad, drawn

    assert_same(train, run)


def numpy_state(generator: Any) -> Any:
    bits = getattr(generator, "bit_generator", None)
    return repr(generator.get_state(legacy=False) if bits is None else bits.state)


Source = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
#: How to make a generator, draw from it, and read where it stands.
GENERATORS: dict[str, Source] = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda g: torch.rand((), generator=g),
        lambda g: g.get_state(),
    ),
    "torch_normal": (
        lambda: torch.Generator().manual_seed(3),
        lambda g: torch.randn((), generator=g),
        lambda g: g.get_state(),
    ),
    "random": (lambda: random.Random(3), lambda g: g.random(), lambda g: repr(g.getstate())),
    "random_gauss": (
        lambda: random.Random(3),
        lambda g: g.gauss(0, 1),
        lambda g: repr(g.getstate()),
    ),
    "numpy": (lambda: np.random.default_rng(3), lambda g: float(g.random()), numpy_state),
    "numpy_int32": (
        lambda: np.random.default_rng(3),
        lambda g: float(g.integers(1, 1000, dtype=np.int32)),  # half of a word waits
        numpy_state,
    ),
    "numpy_legacy": (lambda: np.random.RandomState(3), lambda g: float(g.randn()), numpy_state),
}
SOURCES = pytest.mark.parametrize("source", GENERATORS.values(), ids=GENERATORS)
SOME_SOURCES = pytest.mark.parametrize("source", ["torch", "random_gauss", "numpy", "numpy_legacy"])

global_generator: Any = None
PLACES: dict[str, Callable[[Run, Any, Callable[[Any], Any], Tensor], Tensor]] = {}


def place(call: Any) -> Any:
    PLACES[call.__name__] = call
    return call


@place
def in_a_closure(run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor) -> Tensor:
    return run(lambda x: (x * draw(generator)).sin() * draw(generator), x)


@place
def in_a_global(run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor) -> Tensor:
    global global_generator
    global_generator = generator
    return run(lambda x: (x * draw(global_generator)).sin() * draw(global_generator), x)


@place
def in_a_global_that_a_function_reads(
    run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor
) -> Tensor:
    global global_generator
    global_generator = generator
    return run(lambda x: (x * draw_globally(draw)).sin() * draw_globally(draw), x)


def draw_globally(draw: Callable[[Any], Any]) -> Any:
    return draw(global_generator)


class Noisy(nn.Module):
    def __init__(self, generator: Any, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.generator = generator
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.draw(self.generator)).sin() * self.draw(self.generator)


@place
def in_a_module(run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor) -> Tensor:
    return run(Noisy(generator, draw), x)


@place
def in_a_module_of_a_module(
    run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor
) -> Tensor:
    return run(nn.Sequential(nn.Tanh(), nn.Sequential(Noisy(generator, draw))), x)


class NoisyByList(Noisy):
    def __init__(self, generator: Any, draw: Callable[[Any], Any]) -> None:
        super().__init__(None, lambda _: draw(self.generators[0]))
        self.generators = [generator]


@place
def in_a_list_of_a_module(
    run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor
) -> Tensor:
    return run(NoisyByList(generator, draw), x)


class Augmentation:
    """Not a module, and has the generator that the module uses."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator


class NoisyByObject(Noisy):
    def __init__(self, generator: Any, draw: Callable[[Any], Any]) -> None:
        super().__init__(Augmentation(generator), lambda helper: draw(helper.generator))


@place
def in_an_object_of_a_module(
    run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor
) -> Tensor:
    return run(NoisyByObject(generator, draw), x)


@place
def in_a_list_of_a_closure(
    run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor
) -> Tensor:
    generators = [generator]
    return run(lambda x: (x * draw(generators[0])).sin() * draw(generators[0]), x)


@place
def among_the_arguments(run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor) -> Tensor:
    return run(lambda x, g: (x * draw(g)).sin() * draw(g), x, generator)


@place
def in_a_list_among_the_arguments(
    run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor
) -> Tensor:
    return run(lambda x, gs: (x * draw(gs[0])).sin() * draw(gs[0]), x, [generator])


@place
def in_a_partial(run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor) -> Tensor:
    return run(partial(lambda g, x: (x * draw(g)).sin() * draw(g), generator), x)


@place
def in_a_keyword(run: Run, generator: Any, draw: Callable[[Any], Any], x: Tensor) -> Tensor:
    return run(lambda x, *, g: (x * draw(g)).sin() * draw(g), x, g=generator)


def train_with_generator(source: Source, place: Any, run: Run) -> Any:
    make, draw, state = source
    generator, x = make(), leaf(3)
    drawn = [float(draw(generator))]
    out = place(run, generator, draw, x)
    drawn.append(float(draw(generator)))
    out.sum().backward()
    return out, x.grad, drawn, state(generator), float(draw(generator))


@SOURCES
@ALL
def test_r2_generators_of_ones_own(source: Source, run: Run) -> None:
    """R2: generator objects of torch, ``random`` and numpy (pt#127676, pt#121212)."""
    assert_same(partial(train_with_generator, source, in_a_closure), run)


@SOME_SOURCES
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@ALL
def test_r2_wherever_the_function_has_them_from(source: str, place: Any, run: Run) -> None:
    """R2: globals, attributes, arguments, lists (OLMo-core#828)."""
    if run is reentrant and place is in_a_keyword:
        pytest.skip("the reentrant engine takes no keywords")
    assert_same(partial(train_with_generator, GENERATORS[source], place), run)


@SOURCES
def test_r2_generators_in_nested_regions(source: Source) -> None:
    """R2, pt#121212: each rerun draws what its own forward drew."""
    make, draw, state = source

    def train(run: Run) -> Any:
        generator, x = make(), leaf(3)

        def inner(x: Tensor) -> Tensor:
            return (x * draw(generator)).sin()

        def outer(x: Tensor) -> Tensor:
            return run(inner, x * draw(generator)).exp() * draw(generator)

        out = run(outer, x)
        draw(generator)
        out.sum().backward()
        return out, x.grad, state(generator)

    assert_same(train, rerun)


def noise_of_all_kinds(x: Tensor) -> Tensor:
    x = F.dropout(x, 0.5) * random.random() * np.random.randn()
    return x.sin() * random.gauss(0, 1) * torch.rand_like(x)


def test_r2_selective() -> None:
    """R2: what is kept is not drawn again, and what follows draws the same (OLMo-core#828)."""

    def train(run: Run) -> Any:
        x = leaf(6)
        out = run(noise_of_all_kinds, x)
        random.random()
        out.sum().backward()
        return out, x.grad

    for ops in ([aten.sin], [aten.bernoulli_, aten.rand_like], [aten.mul]):
        assert_same(train, selective(ops))


@ALL
def test_r2_streams_are_left_alone_when_a_rerun_fails(run: Run) -> None:
    """R2, pt#127676: nothing is left advanced, nor put back, by an exception."""

    def fail_again(x: Tensor) -> Tensor:
        out = noise_of_all_kinds(x)
        if recollect.is_recomputing():
            raise KeyError
        return out.exp()

    out = run(fail_again, leaf(6))
    before = library_streams(), torch.get_rng_state()
    with pytest.raises(KeyError):
        out.sum().backward()
    assert_identical((library_streams(), torch.get_rng_state()), before)


@ALL
@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_r2_another_thread_may_draw_meanwhile(draw: Callable[[], float], run: Run) -> None:
    """R2, pt#127676: a region that draws nothing does not set a stream back for the others."""

    def train(run: Run) -> Any:
        drawn: list[float] = []

        def prefetch() -> None:
            thread = threading.Thread(target=lambda: drawn.append(draw()))
            thread.start()
            thread.join()

        def region(x: Tensor) -> Tensor:
            if recollect.is_recomputing():
                prefetch()
            return x.sin().exp()

        x = leaf(3)
        run(region, x).sum().backward()
        if run is plain:
            prefetch()
        return drawn, draw()

    assert_same(train, run)


@ALL
def test_r2_without_preserving(run: Run) -> None:
    """R2, pt#127676: ``preserve_rng_state=False`` runs, and costs nobody a state."""
    x = leaf(6)
    out = run(noise_of_all_kinds, x, preserve_rng_state=False)
    before = library_streams()
    out.sum().backward()
    assert x.grad is not None
    assert library_streams() != before


# --- R3: values that differ in a rerun ------------------------------------------------------------


class Steady(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Drifting(Steady):
    """Multiplies by something else in its second run: same shapes, other values."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 2.0 if recollect.is_recomputing() else 1.0
        return (super().forward(x) * factor).sin()


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@RERUNS
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("given", [lambda model: model, lambda model: lambda x: model(x)])
def test_r3_other_values_are_found(given: Any, early_stop: bool, run: Run) -> None:
    """R3: maths that depends on a count; the first op and its module are named (pt#162980)."""
    model = Stack(Steady(), Drifting(), Steady())
    out = run(given(model), leaf(2, 3), determinism_check="values", early_stop=early_stop)
    with pytest.raises(recollect.CheckpointError) as info:
        out.sum().backward()
    message = str(info.value)
    assert "mul" in message
    assert "layers.1" in message


def test_r3_values_are_not_compared_unless_asked_for() -> None:
    """R3, pt#188906: the check has a price, so the default compares metadata only."""
    x = leaf(2, 3)
    rerun(Drifting(), x).sum().backward()
    assert x.grad is not None


@RERUNS
def test_r3_a_check_of_ones_own(run: Run) -> None:
    """R3, pt#162980: any function of the saved tensors."""
    out = run(Drifting(), leaf(2, 3), determinism_check=lambda t: t.double().sum().item())
    with pytest.raises(recollect.CheckpointError):
        out.sum().backward()


@pytest.mark.parametrize(
    "ops", [[aten.sin], [aten.tanh], [aten.addmm]], ids=["sin", "tanh", "addmm"]
)
def test_r3_other_values_are_found_under_a_policy(ops: list[Any]) -> None:
    """R3: kept outputs do not hide that what went into them differs (pt#188906)."""
    out = rerun(Drifting(), leaf(2, 3), determinism_check="values", policy=ops)
    with pytest.raises(recollect.CheckpointError):
        out.sum().backward()


def test_r3_swapped_products_under_a_policy() -> None:
    """R3: two calls of one op in the other order get each other's results (pt#188906)."""

    def swapping(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        if recollect.is_recomputing():
            b, a = x @ second, x @ first
        else:
            a, b = x @ first, x @ second
        return a.sin() * b.exp()

    def train(run: Run) -> Any:
        x, first, second = leaf(3, 3), leaf(3, 3), leaf(3, 3)
        run(swapping, x, first, second).sum().backward()
        return x.grad, first.grad, second.grad

    assert_same_or_refused(train, partial(rerun, policy=[aten.mm], determinism_check="values"))


def in_place_chain(x: Tensor) -> Tensor:
    y = (x * 2).relu_().exp() + 1
    y.mul_(0.5).add_(1)
    y[..., 0] = 0
    return y.cos().sin_()


def nothing_of_a_number(x: Tensor) -> Tensor:
    return (x / 0 - x / 0).sin() * torch.empty(0).sum() * x.exp()


RIGHT_REGIONS: dict[str, Callable[[Run, Tensor], Any]] = {
    "dropout": lambda run, x: run(lambda x: F.dropout(x.sin(), 0.5).exp().cos(), x),
    "in-place": lambda run, x: run(in_place_chain, x),
    "nan": lambda run, x: run(nothing_of_a_number, x),
    "unused tail": lambda run, x: run(lambda x: (x.sin().exp(), x.cos().exp())[0], x),
    "nested": lambda run, x: run(lambda x: run(in_place_chain, x.sin()).exp(), x),
    "batch norm": lambda run, x: run(batch_norm_1d(), x),
    "ema": lambda run, x: run(EmaInPlace(), x),
    "python random": lambda run, x: run(noise_of_all_kinds, x),
    "views": lambda run, x: run(lambda x: x.t().reshape(-1)[1:].sin().exp().expand(2, -1), x),
    "integers": lambda run, x: run(lambda x: x.sort(0).values.max(1).values.exp(), x),
    "bfloat16": lambda run, x: run(lambda x: x.bfloat16().sin().exp(), x).float(),
    "complex": lambda run, x: run(lambda x: torch.view_as_complex(x[:, :2] * 1).sin().abs(), x),
    "detached": lambda run, x: run(lambda x: x.sin() * x.exp().detach(), x),
    "no grad": lambda run, x: run(lambda x: x.sin() * torch.no_grad()(torch.exp)(x), x),
    "uninitialised": lambda run, x: run(lambda x: F.rrelu(x, training=True), x),
}


@pytest.mark.parametrize("policy", [None, [aten.sin, aten.exp, aten.addmm]], ids=["all", "some"])
@pytest.mark.parametrize("early_stop", [True, False], ids=["early_stop", "full"])
@pytest.mark.parametrize("name", RIGHT_REGIONS)
def test_r3_no_false_alarm(name: str, early_stop: bool, policy: Any) -> None:
    """R3, pt#162980: a right region passes the check by values, and gives the same."""

    def train(run: Run) -> Any:
        x = leaf(4, 3)
        out = RIGHT_REGIONS[name](run, x)
        out.sum().backward()
        return out, x.grad

    options = {"determinism_check": "values", "early_stop": early_stop, "policy": policy}
    assert_same(train, partial(rerun, **options))


# --- R4: tensors changed between forward and backward ---------------------------------------------

MODIFIED = "modified by an inplace operation"
GUARDED: dict[str, Run] = {"plain": plain, **CHECKPOINTS}

global_tensor: Any = None


class Product(nn.Module):
    """Multiplies by a parameter, then by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", torch.ones(3))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.parameter).sin() * self.buffer).exp()


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sin().exp()


def parameter(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    module = Product()
    return run(module, x), module.parameter


def parameter_in_a_closure(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    module = Product()
    return run(lambda x: module(x), x), module.parameter


def bare_parameter(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    weight = nn.Parameter(torch.ones(3))
    return run(lambda x: product(x, weight), x), weight


def buffer(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    module = Product()
    return run(module, x), module.buffer


def positional(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    other = torch.ones(3)
    return run(product, x, other), other


def in_closure(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    other = torch.ones(3)
    return run(lambda x: product(x, other), x), other


def in_global(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    global global_tensor
    global_tensor = torch.ones(3)
    return run(lambda x: product(x, global_tensor), x), global_tensor


def through_a_view(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    base = torch.ones(2, 3)
    view = base[1]
    return run(lambda x: product(x, view), x), base


def keyword(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    other = torch.ones(3)
    return run(product, x, y=other), other


def list_item(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    other = torch.ones(3)
    return run(lambda x, others: product(x, others[0]), x, [other]), other


def dict_item(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    other = torch.ones(3)
    return run(lambda x, others: product(x, others["y"]), x, {"y": other}), other


FOR_ALL = [
    parameter,
    parameter_in_a_closure,
    bare_parameter,
    buffer,
    positional,
    in_closure,
    in_global,
    through_a_view,
    list_item,
    dict_item,
]


@pytest.mark.parametrize("culprit", [*FOR_ALL, keyword], ids=lambda culprit: culprit.__name__)
@pytest.mark.parametrize("run", GUARDED.values(), ids=GUARDED)
def test_r4_changed_in_place_before_backward(culprit: Any, run: Run) -> None:
    """R4: plain autograd raises, and so do regions, whatever was changed (pt#49673)."""
    if run is reentrant and culprit is keyword:
        pytest.skip("the reentrant engine takes no keywords")
    out, tensor = culprit(run, leaf(3))
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        out.sum().backward()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("run", GUARDED.values(), ids=GUARDED)
def test_r4_optimizer_step_before_backward(run: Run, make: Any) -> None:
    """R4, pt#49673: the classic mistake, two losses and a step in between."""
    model, x = Stack(Steady(), Steady()), leaf(2, 3)
    optimizer = make(model.parameters(), lr=0.1)
    first, second = run(model, x), run(model, x)
    first.sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=MODIFIED):
        second.sum().backward()


@pytest.mark.parametrize("culprit", FOR_ALL, ids=lambda culprit: culprit.__name__)
@ALL
def test_r4_the_guard_can_be_turned_off(culprit: Any, run: Run) -> None:
    """R4: for code that knows what it does (pt#49673)."""
    if run is reentrant and culprit is positional:
        pytest.skip("autograd itself guards what the reentrant engine saves")
    x = leaf(3)
    with recollect.set_checkpoint_version_guard(False):
        out, tensor = culprit(run, x)
    with torch.no_grad():
        tensor.add_(1)
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("run", GUARDED.values(), ids=GUARDED)
def test_r4_the_guard_is_off_inside_only(run: Run) -> None:
    """R4, pt#49673: the switch ends with its block."""
    with recollect.set_checkpoint_version_guard(False):
        pass
    out, tensor = parameter(run, leaf(3))
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        out.sum().backward()


def change_what_is_not_used(model: Product) -> None:
    with torch.no_grad():
        for tensor in model.unused.parameters():
            tensor.add_(1)


def exchange_data(model: Product) -> None:
    model.parameter.data = model.parameter.data.clone()


def copy_into_data(model: Product) -> None:
    model.parameter.data.copy_(model.parameter.data.clone())


def empty_and_refill(model: Product) -> None:
    """As FSDP does around every use."""
    storage, values = model.parameter.untyped_storage(), model.parameter.data.clone()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    model.parameter.data.copy_(values)


def shard_and_gather(model: Product) -> None:
    """As ZeRO-3 does: the parameter is a stub between its uses."""
    values = model.parameter.data
    model.parameter.data = torch.empty(0)
    model.parameter.data = values


def move_there_and_back(model: Product) -> None:
    model.double().float()


def change_the_gradient(model: Product) -> None:
    model.parameter.grad = torch.ones(3)
    model.parameter.grad.mul_(0)


HARMLESS = [
    change_what_is_not_used,
    exchange_data,
    copy_into_data,
    empty_and_refill,
    shard_and_gather,
    move_there_and_back,
    change_the_gradient,
]


@ALL
@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "closure"])
@pytest.mark.parametrize("act", HARMLESS, ids=lambda act: act.__name__)
def test_r4_no_false_alarm(act: Callable[[Product], None], wrapped: bool, run: Run) -> None:
    """R4, pt#49673: what plain autograd allows, sharding engines among it, is allowed."""

    def train(run: Run) -> Any:
        model, x = Product(), leaf(3)
        out = run((lambda x: model(x)) if wrapped else model, x)
        act(model)
        out.sum().backward()
        return out, x.grad, model.parameter.grad

    assert_same(train, run)


@ALL
def test_r4_change_after_backward(run: Run) -> None:
    """R4, pt#49673: steps of an ordinary training loop."""

    def train(run: Run) -> Any:
        model = Stack(Steady(), Steady())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run(model, leaf(2, 3)).square().sum().backward()
            optimizer.step()
        return [*model.parameters()]

    assert_same(train, run)


@ALL
def test_r4_optimizer_step_inside_backward(run: Run) -> None:
    """R4, pt#49673: each parameter is updated as soon as its gradient is there."""

    class Layers(Stack):
        def forward(self, x: Tensor, run: Run) -> Tensor:
            for number in range(len(self.layers)):
                x = run(lambda x, number=number: self.layers[number](x).sin(), x)
            return x

    def train(run: Run) -> Any:
        model = Layers(Steady(), Steady(), Steady())

        def update(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(2):
            model(leaf(2, 3), run).square().sum().backward()
        return [*model.parameters()]

    assert_same(train, run)


@ALL
def test_r4_parameters_swapped_in_for_forward(run: Run) -> None:
    """R4, pt#49673: ``functional_call`` has put the module's own back when backward runs."""

    class Outer(nn.Module):
        def __init__(self, run: Run) -> None:
            super().__init__()
            self.run, self.inner = run, nn.Sequential(Steady(), nn.BatchNorm1d(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.run(self.inner, x)

    def train(run: Run) -> Any:
        outer, x = Outer(run), leaf(4, 3)
        swapped = {name: leaf(*p.shape) for name, p in outer.named_parameters()}
        out = torch.func.functional_call(outer, swapped, (x,))
        out.square().sum().backward()
        given = [tensor.grad for tensor in swapped.values()]
        return out, x.grad, given, gradients(outer), [*outer.buffers()]

    assert_same(train, run)


@ALL
@pytest.mark.parametrize("change", ["in place", "by assignment"])
def test_r4_buffer_that_plain_autograd_does_not_save(change: str, run: Run) -> None:
    """R4, pt#49673: only the recomputation needs it again. Right, or an error."""

    def train(run: Run) -> Any:
        module, x = EmaInPlace(), leaf(4, 3)
        module.update = lambda x: None
        out = run(module, x)
        if change == "in place":
            module.ema.add_(1)
        else:
            module.ema = module.ema + 1
        out.sum().backward()
        return out, x.grad, gradients(module)

    assert_same_or_refused(train, run)


# --- R5: choices that must not be made twice ------------------------------------------------------


class Router(nn.Module):
    """Two experts of three for each token; the scores come out otherwise in the second run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        sign = -1.0 if recollect.is_recomputing() else 1.0
        chosen = (logits.detach() * sign).topk(2, dim=-1).indices
        weights = logits.gather(-1, chosen).softmax(-1)
        out = torch.zeros_like(x)
        for position, expert in enumerate(self.experts):
            share = (weights * (chosen == position)).sum(-1, keepdim=True)
            out = out + share * expert(x).tanh()
        return out


@pytest.mark.parametrize(
    "run",
    [
        selective([aten.topk]),
        partial(
            compat_rerun,
            context_fn=partial(
                recollect.compat.create_selective_checkpoint_contexts, [aten.topk.default]
            ),
        ),
    ],
    ids=["policy", "compat"],
)
def test_r5_kept_choice_of_experts(run: Run) -> None:
    """R5: routing flips in the recomputation (torchtitan#1117, #3336, Automodel#2635)."""

    def train(run: Run) -> Any:
        router, x = Router(), leaf(5, 3)
        out = run(router, x)
        out.square().sum().backward()
        return out, x.grad, gradients(router)

    assert_same(train, run)


# --- R6: arguments that the region changes --------------------------------------------------------


class ListCache:
    """As the caches of transformers were: a list of keys and one of values, by layer."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if len(self.keys) <= layer:
            self.keys.append(keys)
            self.values.append(values)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], keys], 0)
            self.values[layer] = torch.cat([self.values[layer], values], 0)
        return self.keys[layer], self.values[layer]

    def content(self) -> Any:
        return list(self.keys), list(self.values)


class CacheLayer:
    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.keys, self.values = keys, values
        else:
            self.keys = torch.cat([self.keys, keys], 0)
            self.values = torch.cat([self.values, values], 0)
        return self.keys, self.values


class LayeredCache:
    """As they are now: a list of layers, which grows."""

    def __init__(self) -> None:
        self.layers: list[CacheLayer] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer:
            self.layers.append(CacheLayer())
        return self.layers[layer].update(keys, values)

    def content(self) -> Any:
        return [(layer.keys, layer.values) for layer in self.layers]


class DictCache(dict):
    """Neither list nor object: a dict by layer."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if layer in self:
            keys = torch.cat([self[layer][0], keys], 0)
            values = torch.cat([self[layer][1], values], 0)
        self[layer] = keys, values
        return keys, values

    def content(self) -> Any:
        return dict(self)


class CachedAttention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.project = nn.Linear(3, 9)

    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        queries, keys, values = self.project(x).chunk(3, dim=-1)
        keys, values = past_key_values.update(keys, values, self.layer)
        return x + (queries @ keys.T).softmax(-1) @ values


CACHES = pytest.mark.parametrize("make_cache", [ListCache, LayeredCache, DictCache])


@pytest.mark.parametrize("by_name", [True, False], ids=["keyword", "positional"])
@CACHES
@RERUNS
def test_r6_cache_of_keys_and_values(make_cache: Any, by_name: bool, run: Run) -> None:
    """R6: each layer adds to a cache that it is given (pt#155171, transformers#28056, #46572)."""

    def train(run: Run) -> Any:
        layers, cache = [CachedAttention(n) for n in range(2)], make_cache()
        x = inputs = leaf(4, 3)
        for chunk in inputs.split(2):
            x = chunk
            for layer in layers:
                arguments = {"past_key_values": cache} if by_name else {}
                x = run(layer, x, *([] if by_name else [cache]), **arguments)
        content = cache.content()
        x.square().sum().backward()
        assert_identical(cache.content(), content)
        return inputs.grad, [gradients(layer) for layer in layers], cache.content()

    assert_same(train, run)


def append(x: Tensor, history: list[Tensor]) -> Tensor:
    history.append(x.sin())
    return torch.stack(history).sum(0).exp()


def put_in_dict(x: Tensor, history: dict[str, list[Tensor]]) -> Tensor:
    history.setdefault("seen", []).append(x.sin())
    return torch.stack(history["seen"]).sum(0).exp()


def count_in_list(x: Tensor, history: list[int]) -> Tensor:
    history.append(len(history))
    return (x * len(history)).sin()


def pop_from_list(x: Tensor, history: list[float]) -> Tensor:
    return (x * history.pop()).sin()


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (append, list),
        (put_in_dict, dict),
        (count_in_list, list),
        (pop_from_list, lambda: [5.0, 4.0, 3.0, 2.0]),
    ],
    ids=["append", "dict", "count", "pop"],
)
@RERUNS
def test_r6_container_that_the_region_changes(function: Any, make: Any, run: Run) -> None:
    """R6: a list that grows, grows once (pt#155171)."""

    def train(run: Run) -> Any:
        history, x, y = make(), leaf(3), leaf(3)
        out = run(function, x, history).sum() + run(function, y, history).square().sum()
        after_forward = repr(history)
        out.backward()
        assert repr(history) == after_forward
        return out, x.grad, y.grad, history

    assert_same(train, run)


class Holder:
    """An object with a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tensor", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return overwrite(x, self.tensor)


def overwrite(x: Tensor, tensor: Tensor) -> Tensor:
    tensor.mul_(x)
    return tensor.clone().sin() * x


def overwrite_in_closure(run: Run, x: Tensor) -> Tensor:
    tensor = torch.ones(3)
    return run(lambda x: overwrite(x, tensor), x)


OVERWRITING: dict[str, Callable[[Run, Tensor], Tensor]] = {
    "argument": lambda run, x: run(overwrite, x, torch.ones(3)),
    "list": lambda run, x: run(lambda x, c: overwrite(x, c[0]), x, [torch.ones(3)]),
    "dict": lambda run, x: run(lambda x, c: overwrite(x, c["t"]), x, {"t": torch.ones(3)}),
    "object": lambda run, x: run(lambda x, c: overwrite(x, c.tensor), x, Holder(torch.ones(3))),
    "closure": overwrite_in_closure,
    "buffer": lambda run, x: run(Memory(), x),
}


@pytest.mark.parametrize("name", OVERWRITING)
@ALL
def test_r6_tensor_that_gains_a_history(name: str, run: Run) -> None:
    """R6: a cache written to in place, by what needs a gradient (pt#155171). Right, or an error."""

    def train(run: Run) -> Any:
        x = leaf(3)
        out = OVERWRITING[name](run, x)
        out.sum().backward()
        return out, x.grad

    assert_same_or_refused(train, run)


@pytest.mark.parametrize("function", [count_in_list, pop_from_list])
def test_r6_container_that_a_reentrant_region_changes(function: Any) -> None:
    """R6, pt#155171: the same with the other engine, for what does not need autograd."""

    def train(run: Run) -> Any:
        history, x, y = [5.0, 4.0, 3.0, 2.0], leaf(3), leaf(3)
        out = run(function, x, history).sum() + run(function, y, history).square().sum()
        out.backward()
        return out, x.grad, y.grad, history

    assert_same(train, reentrant)


ITERATORS: dict[str, Callable[[list[float]], Any]] = {
    "iterator": iter,
    "generator": lambda items: (item for item in items),
    "map": lambda items: map(float, items),
    "zip": lambda items: zip(items, items, strict=True),
    "enumerate": enumerate,
    "reversed": reversed,
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
@ALL
def test_r6_iterators_are_refused(make: Any, run: Run) -> None:
    """R6: they can be read once; the error comes at the call and names the argument (pt#155171)."""
    called = []

    def region(x: Tensor, batches: Any) -> Tensor:
        called.append(True)
        return x * len(list(batches))

    with pytest.raises(TypeError, match=r"args\[1\]|batches"):
        run(region, leaf(3), make([1.0, 2.0]))
    if run is not reentrant:
        with pytest.raises(TypeError, match="batches"):
            run(region, leaf(3), batches=make([1.0, 2.0]))
    assert called == []


@RERUNS
@pytest.mark.parametrize("batches", [range(3), [1, 2], {"a": 1}.keys(), (3,), {1: 2}, "text"])
def test_r6_what_can_be_read_again_is_not_refused(batches: Any, run: Run) -> None:
    """R6, pt#155171: containers are no iterators."""
    x = leaf(3)
    run(lambda x, batches: (x * len(list(batches))).sin(), x, batches).sum().backward()
    assert x.grad is not None


# --- R7: am I recomputing? ------------------------------------------------------------------------


@ALL
def test_r7_side_effects_can_be_kept_to_the_first_run(run: Run) -> None:
    """R7: an effect that must happen once (pt#196956, OLMo-core#720)."""
    effects = []

    def region(x: Tensor) -> Tensor:
        if not recollect.is_recomputing():
            effects.append("sent")
        return x.sin().exp()

    run(region, leaf(3)).sum().backward()
    assert effects == ["sent"]
    assert not recollect.is_recomputing()


@nested_reentrant
@ALL
def test_r7_nested(run: Run) -> None:
    """R7, pt#196956: true all through a rerun, of an inner region too, and in no forward."""
    seen: list[tuple[str, bool]] = []

    def note(place: str, x: Tensor) -> Tensor:
        seen.append((place, recollect.is_recomputing()))
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        return note("after", run(partial(note, "inside"), note("before", x)))

    out = run(outer, leaf(3))
    assert seen == [("before", False), ("inside", False), ("after", False)]
    out.sum().backward()
    assert len(seen) > 3
    assert all(again for _, again in seen[3:])
    assert not recollect.is_recomputing()


@ALL
def test_r7_per_thread(run: Run) -> None:
    """R7, pt#196956: a rerun in one thread says nothing about the others."""
    entered, looked = threading.Event(), threading.Event()
    seen: dict[str, bool] = {}

    def region(x: Tensor) -> Tensor:
        if recollect.is_recomputing():
            entered.set()
            looked.wait(10)
            seen["there"] = recollect.is_recomputing()
        return x.sin()

    out = run(region, leaf(3)).sum()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(out.backward)
        entered.wait(10)
        seen["here"] = recollect.is_recomputing()
        looked.set()
        future.result()
    assert seen == {"here": False, "there": True}


# --- R8: autocast and shared weights --------------------------------------------------------------


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


PRODUCTS = [aten.mm, aten.addmm]
#: Not the reentrant engine: there the shares of a weight's gradient are cast before they are added.
SHARING: dict[str, Run] = {
    "plain": rerun,
    "compat": compat_rerun,
    "products": selective(PRODUCTS),
    "casts": selective([aten._to_copy]),
    "pointwise": selective([aten.tanh]),
    "everything": partial(rerun, policy=lambda *_, **__: recollect.CheckpointPolicy.MUST_SAVE),
    "compat products": partial(
        compat_rerun,
        context_fn=partial(
            recollect.compat.create_selective_checkpoint_contexts,
            [aten.mm.default, aten.addmm.default],
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:the policy's save_ops")  # without autocast nothing is cast
@pytest.mark.parametrize("run", SHARING.values(), ids=SHARING)
@pytest.mark.parametrize("autocast", [nullcontext, bfloat16], ids=["float32", "bfloat16"])
def test_r8_one_weight_in_two_regions(autocast: Any, run: Run) -> None:
    """R8: autocast casts a weight once and remembers it (pt#193338, pt#141896)."""

    def train(run: Run) -> Any:
        layer, x = nn.Linear(3, 3), leaf(2, 3)
        with autocast():
            out = run(lambda x: layer(x).tanh(), run(lambda x: layer(x).tanh(), x))
        out.float().square().sum().backward()
        return out, x.grad, gradients(layer)

    assert_same(train, run)


@pytest.mark.parametrize("run", SHARING.values(), ids=SHARING)
def test_r8_one_weight_inside_and_outside(run: Run) -> None:
    """R8, pt#193338: the cast was made before the region, and after it is used again."""

    def train(run: Run) -> Any:
        layer, x = nn.Linear(3, 3), leaf(2, 3)
        with bfloat16():
            out = layer(run(lambda x: layer(layer(x).tanh()).tanh(), layer(x)))
            out.float().square().sum().backward()
        return out, x.grad, gradients(layer)

    assert_same(train, run)


@pytest.mark.parametrize("run", SHARING.values(), ids=SHARING)
def test_r8_autocast_inside_autocast(run: Run) -> None:
    """R8, pt#141896: a region that switches autocast off and on for a part of itself."""

    def mixed(layer: nn.Module, x: Tensor) -> Tensor:
        x = layer(x).tanh()
        with torch.autocast("cpu", enabled=False):
            x = layer(x.float()).tanh()
        with bfloat16():
            return layer(x).tanh()

    def train(run: Run) -> Any:
        layer, x = nn.Linear(3, 3), leaf(2, 3)
        with bfloat16():
            out = run(partial(mixed, layer), run(partial(mixed, layer), x))
        out.float().square().sum().backward()
        return out, x.grad, gradients(layer)

    assert_same(train, run)


# --- R9: what surrounds a region ------------------------------------------------------------------

factor: contextvars.ContextVar[float] = contextvars.ContextVar("factor", default=1.0)


@contextmanager
def context_variable() -> Iterator[None]:
    token = factor.set(3.0)
    try:
        yield
    finally:
        factor.reset(token)


class SinesAreCosines(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))


def switched(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> Any:
    """A context manager that sets a switch and puts it back."""

    @contextmanager
    def switch() -> Iterator[None]:
        before = read()
        write(value)
        try:
            yield
        finally:
            write(before)

    return switch


def sdpa_flags() -> tuple[bool, ...]:
    """Of the backends that a CPU has too."""
    return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()


def deterministic_flags() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


Surrounding = tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]
#: What to enter, and what then reads otherwise.
SURROUNDINGS: dict[str, Surrounding] = {
    "context variable": (context_variable, factor.get),
    "default dtype": (
        switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        torch.get_default_dtype,
    ),
    "function mode": (SinesAreCosines, lambda: torch.sin(torch.zeros(())).item()),
    "sdpa backend": (lambda: sdpa_kernel(SDPBackend.MATH), sdpa_flags),
    "deterministic": (
        switched(
            deterministic_flags,
            lambda flags: torch.use_deterministic_algorithms(flags[0], warn_only=flags[1]),
            (True, True),
        ),
        deterministic_flags,
    ),
    "matmul precision": (
        switched(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
        torch.get_float32_matmul_precision,
    ),
    "autocast": (bfloat16, lambda: (torch.ones(1, 1) @ torch.ones(1, 1)).dtype),
    "device context": (lambda: torch.device("meta"), lambda: torch.empty(1).device.type),
    "default device": (
        switched(lambda: None, torch.set_default_device, "meta"),
        lambda: torch.empty(1).device.type,
    ),
}
SURROUNDED = pytest.mark.parametrize(
    ("enter", "read"), SURROUNDINGS.values(), ids=list(SURROUNDINGS)
)


def go_backward(out: Tensor) -> None:
    """From ones that are made nowhere near the default device."""
    out.backward(torch.ones(3, dtype=out.dtype, device="cpu"))


@SURROUNDED
@ALL
def test_r9_what_forward_was_in_is_there_again(enter: Any, read: Any, run: Run) -> None:
    """R9: entered around forward, left before backward (pt#147995, pt#84864, pt#148831)."""
    seen, x = [], leaf(3)

    def region(x: Tensor) -> Tensor:
        seen.append(read())
        return x.exp() * x

    outside = read()
    with enter():
        inside = read()
        out = run(region, x)
    assert inside != outside
    go_backward(out)
    assert seen == [inside, inside]
    assert read() == outside


@SURROUNDED
@ALL
def test_r9_what_backward_is_in_does_not_count(enter: Any, read: Any, run: Run) -> None:
    """R9, pt#148831: entered around backward only, and still there after it."""
    seen, x = [], leaf(3)

    def region(x: Tensor) -> Tensor:
        seen.append(read())
        return x.exp() * x

    outside = read()
    out = run(region, x)
    with enter():
        inside = read()
        go_backward(out)
        assert read() == inside
    assert seen == [outside, outside]
    assert read() == outside


@SURROUNDED
@ALL
def test_r9_after_a_failed_rerun(enter: Any, read: Any, run: Run) -> None:
    """R9, pt#147995: all is as it was when the recomputation ends by an exception."""

    def fail_again(x: Tensor) -> Tensor:
        if recollect.is_recomputing():
            raise KeyError
        return x.exp() * x

    outside, x = read(), leaf(3)
    with enter():
        out = run(fail_again, x)
    with pytest.raises(KeyError):
        go_backward(out)
    assert read() == outside


@SURROUNDED
def test_r9_nested_in_one_another(enter: Any, read: Any) -> None:
    """R9, pt#147995: an inner region that is entered in other surroundings than the outer one."""
    seen: list[tuple[str, Any]] = []

    def note(place: str, x: Tensor) -> Tensor:
        seen.append((place, read()))
        return x.exp() * x

    def outer(x: Tensor) -> Tensor:
        x = note("outer", x)
        with enter():
            x = rerun(partial(note, "inner"), x)
        return note("outer", x)

    outside, x = read(), leaf(3)
    with enter():
        inside = read()
    go_backward(rerun(outer, x))
    assert {value for place, value in seen if place == "outer"} == {outside}
    assert {value for place, value in seen if place == "inner"} == {inside}


def scaled(x: Tensor) -> Tensor:
    return (x * factor.get()).sin() * factor.get()


def made_by_default_dtype(x: Tensor) -> Tensor:
    return (x.to(torch.get_default_dtype()) * torch.linspace(0.1, 0.7, 3)).exp()


def a_sine(x: Tensor) -> Tensor:
    return torch.sin(x).exp()


def a_product(x: Tensor) -> Tensor:
    return (x[:, None] @ x[None]).exp().sum(0)


def attention(x: Tensor) -> Tensor:
    x = x.reshape(1, 1, 3, 1).expand(1, 2, 3, 4).contiguous()
    return F.scaled_dot_product_attention(x, x.sin(), x.cos()).sum((0, 1, 3))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("context variable", scaled),
        ("default dtype", made_by_default_dtype),
        ("function mode", a_sine),
        ("autocast", a_product),
        ("sdpa backend", attention),
        ("deterministic", a_product),
        ("matmul precision", a_product),
    ],
)
@ALL
def test_r9_gradients(name: str, function: Any, run: Run) -> None:
    """R9: the gradient is that of the forward that ran (pt#147995, pt#84864)."""
    enter, _ = SURROUNDINGS[name]

    def train(run: Run) -> Any:
        x, y = leaf(3), leaf(3)
        with enter():
            out = run(function, x).float()
        other = run(function, y).float()
        out.sum().backward()
        with enter():
            weights = torch.ones(3, dtype=torch.float32)
            other.backward(weights)
        return out, other, x.grad, y.grad

    assert_same(train, run)


@ALL
def test_r9_context_variable_in_another_thread(run: Run) -> None:
    """R9, pt#147995: backward runs in a thread that has a context of its own."""

    def train(run: Run) -> Any:
        x = leaf(3)
        with context_variable():
            out = run(scaled, x).sum()
        thread = threading.Thread(target=out.backward)
        thread.start()
        thread.join()
        return out, x.grad

    assert_same(train, run)


@ALL
def test_r9_context_variable_that_the_region_sets(run: Run) -> None:
    """R9, pt#147995: set for the caller by forward, and not by the recomputation."""

    def count_up(x: Tensor) -> Tensor:
        factor.set(factor.get() + 1)
        return (x * factor.get()).sin()

    def train(run: Run) -> Any:
        x = leaf(3)
        before = factor.get()
        out = run(count_up, x)
        after_forward = factor.get()
        factor.set(10.0)
        out.sum().backward()
        return before, after_forward, factor.get(), out, x.grad

    def play(run: Run) -> Any:
        return contextvars.copy_context().run(train, run)

    assert_same(play, run)


@ALL
def test_r9_variables_of_the_enclosing_function(run: Run) -> None:
    """R9, pt#147995: a loop has moved on when backward runs, and its variable with it."""

    def loop(run: Run) -> Any:
        layers, x = [Steady() for _ in range(3)], leaf(2, 3)
        hidden = x
        for number, layer in enumerate(layers):
            hidden = run(lambda h: layer(h) * (1 + number), hidden)  # noqa: B023 - the very case
        hidden.square().sum().backward()
        return hidden, x.grad, [gradients(layer) for layer in layers]

    assert_same(loop, run)


# --- R10: early stop ------------------------------------------------------------------------------


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.rrelu(x, training=True),
        lambda x: F.rrelu(x.sin(), 0.1, 0.9, training=True),
        lambda x: F.rrelu(x * 1.0, training=True, inplace=True),
        nn.RReLU(),
        nn.Sequential(nn.RReLU(), nn.RReLU(inplace=True)),
    ],
    ids=["last", "after another", "in place", "module", "twice"],
)
@RERUNS
def test_r10_an_op_that_saves_before_it_computes(function: Any, early_stop: bool, run: Run) -> None:
    """R10: ``rrelu`` saves its noise before it draws it (pt#193671)."""

    def train(run: Run) -> Any:
        x = leaf(20)
        out = run(function, x)
        out.sum().backward()
        return out, x.grad

    assert_same(train, partial(run, early_stop=early_stop))
