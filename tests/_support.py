"""What the tests share: comparing runs bit for bit, counting runs, counting bytes.

The oracle is plain autograd. A *scenario* is a function of ``run``, which stands for calling a
region; it is played once with `plain` and once with a checkpointing function, from the same seed,
and everything it returns must come out the same.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_flatten

import recollect
from recollect._torch.devices import stderr_hushed

Run = Callable[..., Any]
Scenario = Callable[[Run], Any]

rerun = recollect.checkpoint
reentrant = partial(recollect.checkpoint, engine="reentrant")
compat_rerun = partial(recollect.compat.checkpoint, use_reentrant=False)
torch_rerun = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
torch_reentrant = partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)


#: Each way of calling a region; and those of the rerun engine, which takes keywords and options.
CHECKPOINTS: dict[str, Run] = {"rerun": rerun, "compat": compat_rerun, "reentrant": reentrant}
ALL = pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
RERUNS = pytest.mark.parametrize("run", [rerun, compat_rerun], ids=["rerun", "compat"])


def sampled(values: Iterable[Any], usual: Callable[[Any], bool] | Container[Any]) -> list[Any]:
    """Parameters of which the ``usual`` ones are always run, and the others by `make test-all`."""
    is_usual = usual if callable(usual) else usual.__contains__
    slow = pytest.mark.slow
    return [each if is_usual(each) else pytest.param(each, marks=slow) for each in values]


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the region without checkpointing it."""
    return function(*args, **kwargs)


def gradients(module: nn.Module) -> list[Tensor | None]:
    """The gradient of each parameter."""
    return [parameter.grad for parameter in module.parameters()]


# --- the same, bit for bit ------------------------------------------------------------------------


def identical(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same bits: -0.0 is not 0.0, and NaN is itself."""
    if (actual.shape, actual.dtype, actual.layout) != (
        expected.shape,
        expected.dtype,
        expected.layout,
    ):
        return False
    return actual.device == expected.device and torch.equal(_bytes(actual), _bytes(expected))


def _bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    # A copy: a tensor of one element is contiguous whatever its stride.
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_identical(actual: Any, expected: Any) -> None:
    """Compare two nested structures: tensors by their bits, the rest with ``==``."""
    leaves, structure = tree_flatten(actual)
    expected_leaves, expected_structure = tree_flatten(expected)
    assert structure == expected_structure
    for position, (leaf, expected_leaf) in enumerate(zip(leaves, expected_leaves, strict=True)):
        if isinstance(expected_leaf, Tensor):
            assert isinstance(leaf, Tensor), f"leaf {position} is {leaf!r}"
            assert identical(leaf, expected_leaf), f"leaf {position}: {leaf} != {expected_leaf}"
        else:
            assert leaf == expected_leaf, f"leaf {position}"


def play(scenario: Scenario, run: Run, seed: int = 0) -> tuple[Any, Tensor]:
    """What a scenario returns, and where the CPU's random stream stands afterwards."""
    torch.manual_seed(seed)
    return scenario(run), torch.get_rng_state()


def assert_transparent(scenario: Scenario, run: Run) -> None:
    """``scenario`` has the same outcome, and leaves the same random stream, as plain autograd."""
    assert_identical(play(scenario, run), play(scenario, plain))


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that require grad."""
    return torch.randn(shape, dtype=dtype, requires_grad=True)


class Doubled(torch.autograd.Function):
    """In place, which is counted when it is over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


# --- counting runs --------------------------------------------------------------------------------


class Counted:
    """A function that counts its runs, those that end by an exception among them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.started = 0
        self.finished = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.started += 1
        result = self._function(*args, **kwargs)
        self.finished += 1
        return result


# --- counting bytes -------------------------------------------------------------------------------

_FORWARD = "recollect.tests: forward"
_STEP = "recollect.tests: step"


@dataclass(frozen=True)
class Memory:
    """Bytes of CPU memory that a step allocated, over what was there before it."""

    held: int  #: still allocated when forward had returned
    peak: int  #: the most that was allocated at any moment
    left: int  #: still allocated when the step was over and its results dropped


def measure(
    forward: Callable[[], Any], backward: Callable[[Any], object], *, warm_up: bool = True
) -> Memory:
    """Count the bytes of ``backward(forward())`` from the allocator's own events.

    The garbage collector is off, so only what reference counting frees is freed. The step is run
    once beforehand: scratch space that is made only once does not count.
    """
    if warm_up:
        backward(forward())
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with collector_off(), stderr_hushed(), profiler, record_function(_STEP):
        with record_function(_FORWARD):
            result = forward()
        backward(result)
        del result
    return _account(profiler)


def _account(profiler: profile) -> Memory:
    events = profiler.profiler.kineto_results.events()
    ends = {event.name(): event.end_ns() for event in events if event.name() in (_FORWARD, _STEP)}
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    allocated = held = peak = left = 0
    for time, change in changes:
        allocated += change
        peak = max(peak, allocated)
        if time <= ends[_FORWARD]:
            held = allocated
        if time <= ends[_STEP]:
            left = allocated
    return Memory(held, peak, left)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Free memory by reference counts alone."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
