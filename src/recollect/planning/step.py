"""The training step that is planned: a model, a batch, a loss, perhaps an optimizer (P1).

Running it here leaves no trace: whatever it can get at is put back, see `state.snapshot`.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recollect._torch.devices import free_cuda_workspaces
from recollect._torch.modes import any_autocast_enabled
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key
from recollect.checks.place import warn_user
from recollect.errors import PlanWarning
from recollect.planning.batch import signature_of_batch
from recollect.planning.prices import allocated_by
from recollect.planning.sampling import Timing, now, sampled
from recollect.state.memories import Written
from recollect.state.snapshot import LIMIT, Snapshot, check_arguments

__all__ = [
    "Loss",
    "TrainingStep",
    "check_loss",
    "default_loss",
    "is_out_of_memory",
    "sizes",
]

_Tensor = torch.Tensor
#: On CUDA devices a large tensor may be given a free block that is larger by as much as this, and
#: all of it counts. It depends on what was freed before: room is left for one block in so many.
_BLOCK_MORE = 1 << 20
_ONE_BLOCK_IN = 16
#: Samples and seconds after which a step is not timed again, whether or not its samples agree.
_SAMPLES = 10
_SECONDS = 3.0

Loss = Callable[[Any], _Tensor]

_NOT_WHOLE = (
    "more than {limit:,} objects can be reached from the model, its hooks, the loss, the optimizer "
    "and the batch. What the step changes in those beyond is not put back: take references to data "
    "sets and other large structures out of the model and its hooks while the plan is made"
)


def default_loss(output: Any) -> _Tensor:
    """The output if it is a scalar, its ``loss``, else the sum of its floating tensors."""
    if isinstance(output, _Tensor) and output.numel() == 1:
        return output.reshape(())
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, _Tensor):
        return loss.reshape(()) if loss.numel() == 1 else loss.sum()
    if dataclasses.is_dataclass(output):
        output = vars(output)
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, _Tensor)]
    floating = [leaf for leaf in leaves if leaf.is_floating_point()]
    if not floating:
        raise ValueError(
            f"loss: the model returned {type(output).__name__} without a floating tensor, so "
            "there is no loss to take of it. Pass one: plan(..., loss=lambda output: ...)"
        )
    total = floating[0].sum()
    for leaf in floating[1:]:
        total = total + leaf.sum()
    return total


class TrainingStep:
    """One training step, to be run as often as it takes."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Loss | None = None,
        optimizer: Optimizer | None = None,
        *,
        holds_output: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model should be an nn.Module, but got {type(model).__name__}")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer should be a torch.optim.Optimizer, but got {type(optimizer).__name__}"
            )
        if loss is not None and not callable(loss):
            raise TypeError(f"loss should be a function of the model's output, but got {loss!r}")
        if loss is not None:
            _check_takes_output(loss)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"model: no parameter of this {type(model).__name__} requires a gradient, so there "
                "is no backward to plan for. Set requires_grad_(True) on what is to be trained"
            )
        if optimizer is not None:
            _check_optimizer(optimizer, model)
        self.model = model
        self.args, self.kwargs = args, kwargs
        self.loss = loss
        self.optimizer = optimizer
        #: Whether the output of the model is still there when backward runs.
        self.holds_output = holds_output
        self.device = _device_of(model)
        #: What it was seen to write to; None before the first run.
        self._written: list[Written] | None = None
        self._was_warned = False
        #: Bytes of gradients that are there: set aside while the step is run, they stay.
        self._gradients = sum(sizes(p.grad for p in model.parameters() if p.grad is not None))

    @property
    def on_cuda(self) -> bool:
        """Whether the step computes on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def signature(self) -> tuple[Any, ...]:
        """What tells its batch from others."""
        return signature_of_batch(self.args, self.kwargs)

    def run(self, before_backward: Callable[[], None] | None = None) -> None:
        """Forward, backward, and the optimizer's part."""
        # In a copy of the context: what is set in that is gone afterwards.
        copy_context().run(self._run, before_backward)

    def _run(self, before_backward: Callable[[], None] | None) -> None:
        if any_autocast_enabled():
            # Training loops enter it for every step, and weights are cast again.
            torch.clear_autocast_cache()
        with torch.inference_mode(False), torch.enable_grad():
            output = self._forward()
            loss = (self.loss or default_loss)(output)
            check_loss(loss, self.model)
            if not self.holds_output:
                del output
            if before_backward is not None:
                before_backward()
            loss.backward()
        del loss
        if self.optimizer is not None:
            self.optimizer.step()
        if self.holds_output:
            del output  # as in loops that read it afterwards
        self.clear()

    def _forward(self) -> Any:
        try:
            return self.model(*self.args, **self.kwargs)
        except TypeError as error:
            # Hooks may make others of the arguments: what it does not take is known afterwards.
            if _refusal(self.model.forward, self.args, self.kwargs) is None:
                raise
            raise TypeError(
                f"batch: this {type(self.model).__name__} cannot be called with it ({error}). A "
                "tuple is the arguments of the model, a dict its keyword arguments. What only the "
                "loss takes is not among them: recollect.plan(model, x, budget, loss=lambda "
                "output: criterion(output, target))"
            ) from error

    def clear(self) -> None:
        """Remove the gradients."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        others = [parameter for group in groups for parameter in group["params"]]
        inputs = tree_leaves((self.args, self.kwargs))
        for tensor in [*self.model.parameters(), *others, *inputs]:
            if isinstance(tensor, _Tensor) and tensor.is_leaf:
                tensor.grad = None

    @contextmanager
    def undone(self, *, rehearses: bool = False) -> Iterator[None]:
        """A context after which all is as it was before.

        What it writes to is copied at the first write if it ``rehearses``, else before.
        """
        check_arguments(self.args, self.kwargs)
        roots = {
            "model": self.model,
            "loss": self.loss,
            "optimizer": self.optimizer,
            "batch": (self.args, self.kwargs),
        }
        written = () if rehearses else self._written
        with Snapshot(roots, self.model.parameters(), written) as self._snapshot:
            if not self._snapshot.is_whole and not self._was_warned:
                self._was_warned = True
                warn_user(_NOT_WHOLE.format(limit=LIMIT), PlanWarning)
            self.clear()
            try:
                yield
            finally:
                self.clear()

    def rehearse(self) -> None:
        """Run it for the first time, inside of `undone`, and note what it writes to."""
        with self._snapshot.log():
            self.run()
        self._written = self._snapshot.written

    def caches(self) -> list[Any]:
        """All ``functools.lru_cache`` that were found when it was last run inside of `undone`."""
        snapshot = vars(self).get("_snapshot")
        return [] if snapshot is None else [*snapshot.caches]

    # --- memory and time --------------------------------------------------------------------------

    def base(self) -> int:
        """Bytes that are allocated throughout, before the step begins."""
        if self.on_cuda:
            return torch.cuda.memory_allocated(self.device)
        return sum(sizes(self.static())) + self._gradients

    def _weights(self) -> Iterable[_Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def static(self) -> Iterator[_Tensor]:
        """What is there throughout: parameters, buffers, the state of the optimizer."""
        yield from self._weights()
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                yield from (each for each in tree_leaves(state) if isinstance(each, _Tensor))

    def measured_peak(self) -> int:
        """The most bytes that are allocated in a step."""
        was_on = gc.isenabled()
        if self.on_cuda:
            gc.collect()
        else:
            gc.disable()  # which would free at other times than it usually does
        try:
            return self.base() + allocated_by(self.run, self.device)[0]
        finally:
            if was_on:
                gc.enable()

    def spare_blocks(self) -> int:
        """By how much the peak of another step may be above that of the last."""
        if not self.on_cuda:
            return 0
        stats = torch.cuda.memory_stats(self.device)
        blocks: int = stats["allocation.large_pool.peak"] - stats["allocation.large_pool.current"]
        return math.ceil(blocks / _ONE_BLOCK_IN) * _BLOCK_MORE

    def measured_seconds(self) -> Timing:
        """What a step takes, at best."""
        return sampled(lambda: [self.seconds()], long=True, most=_SAMPLES, seconds=_SECONDS)

    def seconds(self) -> float:
        """What one step takes, now."""
        self._wait()
        start = now()
        self.run()
        self._wait()
        return now() - start

    def _wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def free_memory(self) -> None:
        """Free what earlier work has left on the device: garbage, caches, workspaces of cuBLAS."""
        gc.collect()
        if self.on_cuda:
            free_cuda_workspaces()
            torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether there was no room for what was run."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _refusal(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why ``function`` cannot be called so; None if it can be, or if that is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it does not say what it takes
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _check_takes_output(loss: Loss) -> None:
    """Refuse a loss that wants more than the output of the model."""
    refusal = _refusal(loss.forward if isinstance(loss, nn.Module) else loss, (None,), {})
    if refusal is not None:
        name = type(loss).__name__ if isinstance(loss, nn.Module) else str(loss)
        raise TypeError(
            f"loss is called with the output of the model alone, and {name} cannot be ({refusal}). "
            "Have it know the rest: loss=lambda output: criterion(output, target)"
        )


def _check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that cannot be the one of the step."""
    # Of its class: what a scheduler puts in the place of the method says that it takes `self`.
    refusal = _refusal(type(optimizer).step, (optimizer,), {})
    if refusal is not None:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} needs a closure ({refusal}), by which it calls "
            "the model as often as it likes: that is not one step. Leave it out, "
            "recollect.plan(model, batch, budget): what it holds is then not counted"
        )
    steps = {id(each) for group in optimizer.param_groups for each in group["params"]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trained and not any(id(parameter) in steps for parameter in trained):
        raise ValueError(
            f"optimizer: this {type(optimizer).__name__} has none of the parameters of this "
            f"{type(model).__name__} that are trained. Was it made for another model, or before "
            "the parameters were replaced? Make it from this one: "
            f"{type(optimizer).__name__}(model.parameters(), ...)"
        )


def _device_of(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    accelerated = [device for device in devices if device.type not in ("cpu", "meta")]
    return min(accelerated or devices, key=str)


def check_loss(loss: Any, model: nn.Module) -> None:
    """Refuse what backward cannot start from."""
    if not isinstance(loss, _Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, _Tensor) else repr(loss)
        raise ValueError(
            f"loss should give one number to call backward on, but gave {what}. "
            "Reduce it: loss=lambda output: ....mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"loss: the loss of this {type(model).__name__} depends on nothing that requires a "
            "gradient, so there is no backward to plan for. Does forward run under torch.no_grad, "
            "or detach its result?"
        )


def sizes(tensors: Iterable[_Tensor]) -> list[int]:
    """The bytes of the memories behind ``tensors``, each once."""
    storages = {storage_key(tensor): tensor.untyped_storage() for tensor in tensors}
    return [storage.nbytes() for storage in storages.values()]
