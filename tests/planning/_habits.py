"""Habits of training code: hooks that train, averages, caches, counters, streams.

Each is given a `Trained` and changes it. What it remembers is added to ``watched``: functions that
tell what is there now.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
import types
import weakref
from array import array
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Net(nn.Module):
    """Of some width and depth. Each block may be hooked into; ``habits`` run in forward."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.habits: list[Callable[[Tensor], Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(self.norm(block(x)))
        for habit in self.habits:
            x = habit(x)
        return x


@dataclass
class Trained:
    """A model in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    #: Functions that tell what is there now.
    watched: dict[str, Callable[[], Any]] = field(default_factory=dict)
    #: What takes away what is not the model's.
    cleanups: list[Callable[[], None]] = field(default_factory=list)

    def watch(self, name: str, look: Callable[[], Any]) -> None:
        self.watched[name] = look

    def in_forward(self, function: Callable[[Tensor], Any]) -> None:
        """Have ``function`` called in forward, for what it does."""

        def run(x: Tensor) -> Tensor:
            function(x)
            return x

        self.model.habits.append(run)


Habit = Callable[[Trained], None]
HABITS: dict[str, Habit] = {}


def habit(function: Habit) -> Habit:
    HABITS[function.__name__] = function
    return function


# --- hooks that train -----------------------------------------------------------------------------


def _optimizers_in_backward(trained: Trained, make: Callable[[Any], Any]) -> None:
    """As in the tutorial of torch."""
    optimizers = {p: make([p]) for p in trained.model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in trained.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    trained.optimizer = None
    trained.watch("states", lambda: [each.state_dict() for each in optimizers.values()])


@habit
def adam_in_backward(trained: Trained) -> None:
    _optimizers_in_backward(trained, lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=True))


@habit
def momentum_in_backward(trained: Trained) -> None:
    _optimizers_in_backward(trained, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))


@habit
def fused_in_backward(trained: Trained) -> None:
    _optimizers_in_backward(trained, lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True))


@habit
def descent_by_hand_in_backward(trained: Trained) -> None:
    def step(parameter: Any) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in trained.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    trained.optimizer = None


@habit
def descent_at_every_third_call(trained: Trained) -> None:
    calls = 0

    def step(parameter: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0 and parameter.grad is not None:
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-0.1)

    for parameter in trained.model.blocks[0].parameters():
        parameter.register_post_accumulate_grad_hook(step)
    trained.watch("calls", lambda: calls)


@habit
def descent_in_the_hook_of_a_node(trained: Trained) -> None:
    weight = trained.model.blocks[0].weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    averages: list[Tensor] = []

    def hook(_: Any, __: Any) -> None:
        averages.append(weight.detach().mean())
        weight.data.mul_(0.99)

    node.register_hook(hook)
    trained.cleanups.append(lambda: node and None)  # as those do who hold it
    trained.watch("averages", lambda: list(averages))


@habit
def weights_clipped_in_a_hook(trained: Trained) -> None:
    def clip(module: Any, _: Any) -> None:
        module.weight.data.clamp_(-0.1, 0.1)

    trained.model.blocks[0].register_forward_pre_hook(clip)


@habit
def weights_given_other_memory(trained: Trained) -> None:
    def replace(module: Any, _: Any, __: Any) -> None:
        module.bias.data = module.bias.data + 0.01

    trained.model.blocks[1].register_full_backward_hook(replace)


@habit
def average_of_torch(trained: Trained) -> None:
    average = AveragedModel(trained.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    _after_step(trained, lambda: average.update_parameters(trained.model))
    trained.watch("average", average.state_dict)


class Averages:
    """A moving average as many write it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self, *_: Any) -> None:
        self.updates += 1
        parameters = dict(self.model.named_parameters())
        for name, average in self.shadow.items():
            average.lerp_(parameters[name].detach(), 0.1)


@habit
def average_by_hand(trained: Trained) -> None:
    averages = Averages(trained.model)
    _after_step(trained, averages.update)
    trained.watch("average", lambda: (averages.shadow, averages.updates))


@habit
def average_at_every_third_step(trained: Trained) -> None:
    averages, steps = Averages(trained.model), itertools.count(1)
    _after_step(trained, lambda: averages.update() if next(steps) % 3 == 0 else None)
    trained.watch("average", lambda: (averages.shadow, averages.updates, repr(steps)))


@habit
def schedule_in_a_step_hook(trained: Trained) -> None:
    if trained.optimizer is None:
        return
    schedule = CosineAnnealingLR(trained.optimizer, 10)
    _after_step(trained, schedule.step)
    trained.watch("schedule", schedule.state_dict)


def _after_step(trained: Trained, function: Callable[[], Any]) -> None:
    """In a hook of the optimizer, or of the last gradient if there is none."""
    if trained.optimizer is not None:
        trained.optimizer.register_step_post_hook(lambda *_: function())
    else:
        first = next(trained.model.parameters())
        first.register_post_accumulate_grad_hook(lambda _: function())


@habit
def a_hook_for_all_modules(trained: Trained) -> None:
    seen: Counter[str] = Counter()
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, __: seen.update([type(module).__name__])
    )
    trained.cleanups.append(handle.remove)
    trained.watch("seen", lambda: dict(seen))


#: Those that take the place of an optimizer.
TRAINING = [*HABITS][:4]


# --- what forward and hooks remember --------------------------------------------------------------


@habit
def closures_of_hooks(trained: Trained) -> None:
    total, seen = torch.zeros((), device=trained.model.norm.weight.device), []
    table = {"norms": deque(maxlen=3), "by": defaultdict(list)}
    calls, kinds, names, ordered = 0, Counter(), set(), OrderedDict()

    def hook(module: Any, args: Any, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        total.add_(out.detach().sum())
        seen.append(out.detach().mean())
        table["norms"].append(out.detach().norm())
        table["by"][calls % 2].append(calls)
        kinds[type(module).__name__] += 1
        names.add(calls)
        ordered[calls] = total.item()
        ordered.move_to_end(min(ordered))

    for block in trained.model.blocks:
        block.register_forward_hook(hook)
    trained.watch(
        "closures", lambda: (calls, total, seen, _plain(table), dict(kinds), sorted(names), ordered)
    )


def _plain(table: Any) -> Any:
    return list(table["norms"]), {key: list(value) for key, value in table["by"].items()}


@habit
def gradients_in_backward_hooks(trained: Trained) -> None:
    norms: list[Tensor] = []
    last: list[Any] = [None]

    def note(_: Any, __: Any, gradients: Any) -> None:
        norms.append(gradients[0].norm())
        last[0] = gradients[0]

    trained.model.blocks[-1].register_full_backward_hook(note)
    trained.model.blocks[0].weight.register_hook(lambda g: norms.append(g.sum()))
    trained.watch("norms", lambda: (norms, last))


@habit
def large_tensor_attribute(trained: Trained) -> None:
    trained.model.history = torch.zeros(50_000)

    def write(x: Tensor) -> None:
        history = trained.model.history
        history[int(history[0]) % 100 + 1] = x.detach().sum()
        history[0] += 1

    trained.in_forward(write)
    trained.watch("history", lambda: trained.model.history)


@habit
def memory_shared_with_numpy(trained: Trained) -> None:
    trained.model.counts = np.zeros(100_000)
    trained.model.as_tensor = torch.from_numpy(np.zeros(100_000))
    view = trained.model.as_tensor.numpy()

    def write(_: Tensor) -> None:
        trained.model.counts[3] += 1
        view[5] += 1

    trained.in_forward(write)
    trained.watch("arrays", lambda: (trained.model.counts.tolist(), trained.model.as_tensor))


@habit
def class_attributes(trained: Trained) -> None:
    class Base:
        calls = 0
        seen: list[int] = []  # noqa: RUF012 - state of a class, as there is
        total = torch.zeros(3)

    class Own(Base):
        def __call__(self, x: Tensor) -> None:
            Base.calls += 1
            type(self).own = Base.calls
            self.seen.append(Base.calls)
            self.total.add_(x.detach().mean())

    trained.in_forward(Own())
    trained.watch("class", lambda: (Base.calls, Base.seen, Base.total, getattr(Own, "own", None)))


class Modal(nn.Module):
    """Counts its calls in its class, and in one that only code names."""

    calls = 0
    bank: dict[int, Tensor] = {}  # noqa: RUF012 - state of a class, as there is

    def forward(self, x: Tensor) -> Tensor:
        Modal.calls += 1
        Named.calls += 1
        Modal.bank[Modal.calls] = x.detach().mean()
        return x * Modal.calls


class Named:
    calls = 0


@habit
def class_attributes_of_a_module(trained: Trained) -> None:
    modal = type("Modal", (Modal,), {})()
    Modal.calls, Modal.bank, Named.calls = 0, {}, 0  # of the process: each begins anew
    trained.model.modal = modal
    trained.model.habits.append(modal)
    trained.watch("class", lambda: (Modal.calls, dict(Modal.bank), Named.calls))


COUNTER = itertools.count()
CALLS = 0
TABLE: dict[Any, Any] = {}
LOCAL = threading.local()
VARIABLE: ContextVar[int] = ContextVar("VARIABLE", default=0)
WEAK: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
SPACE = types.SimpleNamespace(calls=0, inner=UserDict())


@habit
def globals_of_a_script(trained: Trained) -> None:
    global COUNTER, CALLS, TABLE, LOCAL, WEAK, SPACE
    COUNTER, CALLS, TABLE, LOCAL = itertools.count(), 0, {"a": {}}, threading.local()
    WEAK, SPACE = weakref.WeakKeyDictionary(), types.SimpleNamespace(calls=0, inner=UserDict())
    globals().pop("MADE_LATE", None)
    VARIABLE.set(0)

    def write(x: Tensor) -> None:
        global CALLS, MADE_LATE  # noqa: PLW0603 - as scripts do
        CALLS += 1 + 0 * next(COUNTER)
        MADE_LATE = CALLS
        TABLE["a"].setdefault("b", []).append(x.detach().mean())
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
        VARIABLE.set(VARIABLE.get() + 1)
        WEAK[trained.model] = WEAK.get(trained.model, 0) + 1
        SPACE.calls += 1
        SPACE.inner[SPACE.calls] = CALLS

    trained.in_forward(write)
    trained.watch(
        "globals",
        lambda: (
            repr(COUNTER),
            CALLS,
            TABLE,
            globals().get("MADE_LATE"),
            dict(LOCAL.__dict__),
            VARIABLE.get(),
            WEAK.get(trained.model),
            SPACE.calls,
            dict(SPACE.inner),
        ),
    )


@habit
def counters(trained: Trained) -> None:
    trained.model.numbers = itertools.count(3)
    in_closure, bound, rest = (
        itertools.count(0, 2),
        itertools.count().__next__,
        iter([5, 6, 7] * 99),
    )
    shared = itertools.count(1.5, 0.5)
    trained.model.same = [shared]

    def write(x: Tensor, by_default: Any = itertools.count(), *, named: Any = shared) -> None:  # noqa: B008
        next(trained.model.numbers), next(in_closure), next(by_default), next(named)
        bound(), next(rest), next(trained.model.same[0])

    write.__defaults__ = (itertools.count(),)
    trained.in_forward(write)
    trained.in_forward(functools.partial(lambda count, x: next(count), itertools.count(7)))
    trained.watch(
        "counters",
        lambda: (
            repr(trained.model.numbers),
            repr(in_closure),
            repr(bound.__self__),
            rest.__length_hint__(),
            repr(write.__defaults__),
            repr(write.__kwdefaults__),
            trained.model.same[0] is shared is write.__kwdefaults__["named"],
        ),
    )


class Meter:
    """With slots, and what it derives from without."""

    __slots__ = ("count", "total", "worst")

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def __call__(self, x: Tensor) -> None:
        self.count += 1
        self.total += x.detach().mean().item()
        self.worst = min(getattr(self, "worst", 9.0), self.total)


@dataclass
class Record:
    """Objects in objects."""

    meter: Meter = field(default_factory=Meter)
    array: Any = field(default_factory=lambda: array("d", [0.0] * 4))
    data: bytearray = field(default_factory=lambda: bytearray(3))
    parts: list[Any] = field(default_factory=list)

    def __call__(self, x: Tensor) -> None:
        self.meter(x)
        self.array[0] += 1
        self.data[1] += 1
        self.parts.append(self.meter.count)


@habit
def meters(trained: Trained) -> None:
    record = Record()
    trained.in_forward(record)
    trained.model.meter = record.meter
    trained.watch(
        "meter",
        lambda: (
            record.meter.count,
            record.meter.total,
            getattr(record.meter, "worst", None),
            list(record.array),
            bytes(record.data),
            record.parts,
        ),
    )


@habit
def attributes_of_functions(trained: Trained) -> None:
    def hook(x: Tensor, cache: dict[int, Any] = {}, *, more: list[Any] = []) -> None:  # noqa: B006
        hook.calls += 1
        cache[hook.calls] = x.detach().mean()
        more.append(hook.calls)

    hook.calls = 0
    hook.__defaults__, hook.__kwdefaults__ = ({},), {"more": []}
    trained.in_forward(hook)
    trained.watch("function", lambda: (hook.calls, hook.__defaults__, hook.__kwdefaults__))


@habit
def cache_of_a_random_table(trained: Trained) -> None:
    @functools.cache
    def table(width: int) -> Tensor:
        return torch.randn(width)

    trained.model.habits.append(lambda x: x + table(x.shape[-1]))
    trained.watch("cache", lambda: table.cache_info().misses)


@habit
def state_in_a_cache(trained: Trained) -> None:
    @functools.lru_cache
    def state() -> Tensor:
        return torch.zeros(3)

    state()
    trained.in_forward(lambda x: state().add_(x.detach().mean()))
    trained.watch("state", lambda: state().clone())


@habit
def streams(trained: Trained) -> None:
    trained.model.own = torch.Generator().manual_seed(5)
    trained.model.python = random.Random(5)
    trained.model.arrays = np.random.default_rng(5)

    def noisy(x: Tensor) -> Tensor:
        model = trained.model
        scale = random.random() + np.random.rand() + model.python.random()
        scale += model.arrays.random()
        return x * scale + torch.rand(x.shape[-1], generator=model.own) + torch.rand(x.shape[-1])

    trained.model.habits.append(noisy)
    trained.watch(
        "streams",
        lambda: (
            trained.model.own.get_state(),
            trained.model.python.getstate(),
            str(trained.model.arrays.bit_generator.state),
        ),
    )


@habit
def statistics(trained: Trained) -> None:
    width = trained.model.norm.normalized_shape[0]
    trained.model.batch_norm = nn.BatchNorm1d(width)
    trained.model.register_buffer("average", torch.zeros(width))
    trained.model.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def note(x: Tensor) -> None:
        trained.model.average = 0.9 * trained.model.average + x.detach().mean(0)
        trained.model.steps += 1

    trained.model.habits.append(trained.model.batch_norm)
    trained.in_forward(note)


@habit
def normed_weights(trained: Trained) -> None:
    nn.utils.parametrizations.spectral_norm(trained.model.blocks[1])


def _halve(parameter: Any) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


@habit
def a_model_that_changes_itself(trained: Trained) -> None:
    model = trained.model

    def change(x: Tensor) -> None:
        model.last = x.detach()
        model.blocks[0].seen = getattr(model.blocks[0], "seen", 0) + 1
        if not hasattr(model, "probe"):
            model.probe = torch.ones(3)
            model.blocks[0].register_forward_hook(lambda *_: None)
            model.blocks[0].bias.register_hook(lambda g: g * 0.5)
            model.blocks[0].weight.register_post_accumulate_grad_hook(_halve)
        model.norm.weight.tag = model.blocks[0].seen

    trained.in_forward(change)
    trained.watch(
        "itself",
        lambda: (
            sorted(name for name in vars(model) if name in ("last", "habits", "probe")),
            len(model.blocks[0]._forward_hooks),
            getattr(model.blocks[0], "seen", None),
            vars(model.norm.weight).copy(),
            [p.requires_grad for p in model.parameters()],
        ),
    )


@habit
def forward_of_the_instance(trained: Trained) -> None:
    inner, calls = trained.model.forward, []

    def forward(x: Tensor) -> Tensor:
        calls.append(len(calls))
        return inner(x) * 1.5

    trained.model.forward = forward
    trained.watch("calls", lambda: list(calls))


@habit
def autocast_around_forward(trained: Trained) -> None:
    """As accelerate does: one context, entered at every call."""
    trained.model.forward = torch.autocast("cpu", torch.bfloat16)(trained.model.forward)
    trained.watch("autocast", lambda: torch.is_autocast_enabled("cpu"))
