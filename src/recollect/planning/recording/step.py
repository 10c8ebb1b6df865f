"""Runs the training step that is planned: model, batch, loss, perhaps an optimizer (P1).

Inside of `TrainingStep.undone` it leaves no trace: `state.snapshot` restores all that it changes.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recollect._torch.devices import free_cuda_workspaces
from recollect._torch.fsdp import BACKEND_THREADS, Shards, is_shared, put_gradients, shards_of
from recollect._torch.modes import any_autocast_enabled
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import local_tensors, storage_key
from recollect.checks.place import warn_user
from recollect.errors import PlanWarning
from recollect.planning.distributed import collectives_refused
from recollect.planning.recording.batch import tensors_of_batch
from recollect.planning.recording.memory_events import allocated_by
from recollect.planning.recording.model_state import check_model, gradients_of, parameters_of
from recollect.planning.recording.sampling import Timing, now, sampled
from recollect.report.units import argument_text
from recollect.state.inputs import check_arguments, inference_fault
from recollect.state.snapshot import LIMIT, Snapshot
from recollect.state.tensor_snapshot import Written

_Tensor = torch.Tensor
#: CUDA's allocator may give a large tensor a free block that is larger by as much as this, and all
#: of it counts. It depends on what was freed before: the peak leaves room for one block in so many.
_BLOCK_EXCESS = 1 << 20
_ONE_BLOCK_IN = 16
#: Samples and seconds after which a step is not timed again, even if its samples disagree.
_SAMPLES = 10
_SECONDS = 3.0

#: From the output of the model, or from that and the batch.
Loss = Callable[[Any], _Tensor] | Callable[[Any, Any], _Tensor]

_INCOMPLETE = (
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
            "there is no loss to compute from it. Pass one: plan(..., loss=lambda output: ...)"
        )
    total = floating[0].sum()
    for leaf in floating[1:]:
        total = total + leaf.sum()
    return total


@dataclass(eq=False)
class TrainingStep:
    """One training step, which can run any number of times."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss | None = None
    optimizer: Optimizer | None = None
    _: KW_ONLY
    #: Whether the loop still holds the output of the model when backward runs.
    holds_output: bool = True
    batch: Any = None

    def __post_init__(self) -> None:
        check_model(self.model)
        if self.optimizer is not None:
            check_optimizer(self.optimizer, self.model)
        #: Whether the loss is called with the output and the batch, or with the output alone.
        self.takes_batch = self.loss is not None and takes_batch(self.loss, self.batch)
        self.device = device_of(self.model)
        #: The memory that it writes to; None before the first run.
        self._written: list[Written] | None = None
        self._was_warned = False
        #: Bytes of the user's gradients, which stay allocated while the step runs.
        self.gradient_bytes = bytes_of_gradients(self.model)
        #: The FSDP state of the model, if it is sharded.
        self.shards = shards_of(self.model)
        #: Whether it communicates, so that all processes which have the model run it equally often.
        self.is_shared = is_shared(self.model)
        #: The most bytes that one collective of it takes and returns, once that was traced.
        self.largest_collective = 0
        #: Whether parts of its forward were seen to save tensors by hooks of their own.
        self.has_other_hooks = False

    @classmethod
    def of_loop(cls, model: nn.Module, gradients: int) -> TrainingStep:
        """A step that the loop has run, with so many bytes of gradients. It is not run again."""
        step = cls(model, (), {})
        step.gradient_bytes = gradients
        return step

    @property
    def on_cuda(self) -> bool:
        """Whether the step computes on a CUDA device."""
        return self.device.type == "cuda"

    def run(self) -> None:
        """Run forward, backward, and the optimizer's step."""
        # In a copy of the context: variables that it sets are as before afterwards.
        copy_context().run(self._run)

    def _run(self) -> None:
        if any_autocast_enabled():
            # Training loops enter autocast in every step, which casts the weights again.
            torch.clear_autocast_cache()
        with torch.inference_mode(False), torch.enable_grad():
            output = self._forward()
            loss = self._loss_of(output)
            check_loss(loss, self.model)
            if not self.holds_output:
                del output
            loss.backward()
        del loss
        if self.optimizer is not None:
            self.optimizer.step()
        if self.holds_output:
            del output  # as in loops that read it afterwards
        self.clear_gradients()

    def _loss_of(self, output: Any) -> _Tensor:
        loss: Any = self.loss or default_loss
        return loss(output, self.batch) if self.takes_batch else loss(output)  # type: ignore[no-any-return]

    def _forward(self) -> Any:
        try:
            return self.model(*self.args, **self.kwargs)
        except TypeError as error:
            # Only now: hooks may have changed the arguments.
            if not tensors_of_batch(self.args, self.kwargs):
                is_budget = isinstance(self.batch, (str, int, float))
                budget = repr(self.batch if is_budget else "12GiB")
                raise TypeError(
                    f"batch: there is no tensor in this {type(self.batch).__name__}, and the model "
                    f"cannot be called with it ({error}). Pass what the loop calls the model with: "
                    f"recollect.plan(model, batch, {budget}); or no batch: "
                    f"recollect.fit(model, budget={budget})"
                ) from error
            if refusal_of(self.model.forward, self.args, self.kwargs) is not None:
                raise self._cannot_be_called(error) from error
            if type(self.batch) is list:
                raise TypeError(
                    f"batch: the model was called with the list as its one argument, and raised: "
                    f"{error}. If the items are its arguments, pass a tuple: "
                    "recollect.plan(model, (x, ...), budget)"
                ) from error
            raise
        except NotImplementedError as error:
            if getattr(self.model.forward, "__func__", None) is not nn.Module.forward:
                raise
            raise TypeError(
                f"model: this {type(self.model).__name__} has no forward. Pass the module that the "
                "loop calls. A LightningModule is fitted by its Trainer: "
                "callbacks=[recollect.integrations.lightning.Fit(budget)]"
            ) from error
        except RuntimeError as error:
            given = tensors_of_batch(self.args, self.kwargs)
            if (fault := inference_fault(error, given)) is not None:
                raise RuntimeError(f"batch: {fault}") from error
            if (where := self._other_device()) is None or is_out_of_memory(error):
                raise
            raise RuntimeError(f"batch: {where} ({error})") from error

    def _other_device(self) -> str | None:
        """How to fix a batch on other devices than the model; None if they share one."""
        given = {tensor.device for tensor in tensors_of_batch(self.args, self.kwargs)}
        own = {parameter.device for parameter in self.model.parameters()}
        if not given or not own or given & own:
            return None
        (device, *_), (other, *_) = own, given
        return f'it is on {other}, but the model on {device}. Move it: batch.to("{device}")'

    def _cannot_be_called(self, why: object) -> TypeError:
        return TypeError(
            f"batch: this {type(self.model).__name__} cannot be called with it ({why}). A tuple is "
            "the arguments of the model, a dict its keyword arguments. What only the loss takes is "
            "not among them: recollect.plan(model, x, budget, loss=lambda output: "
            "criterion(output, target))"
        )

    def check_call(self) -> None:
        """Refuse a batch that the model cannot be called with, if other processes wait for it."""
        refusal = refusal_of(self.model.forward, self.args, self.kwargs)
        if self.is_shared and refusal is not None:
            raise self._cannot_be_called(refusal)

    def clear_gradients(self) -> None:
        """Remove the gradients of parameters and inputs."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        others = [parameter for group in groups for parameter in group["params"]]
        inputs = tensors_of_batch(self.args, self.kwargs)
        for tensor in [*self.model.parameters(), *others, *inputs]:
            if tensor.is_leaf:
                tensor.grad = None
        if self.shards is not None:
            self.shards.take_gradients()

    @contextmanager
    def undone(self, *, logs_writes: bool = False) -> Iterator[None]:
        """A context whose end restores everything that the step has changed.

        Memory that it writes to is copied beforehand; at the first write if that ``logs_writes``.
        """
        check_arguments(self.args, self.kwargs)
        roots = {
            "model": self.model,
            "loss": self.loss,
            "optimizer": self.optimizer,
            "batch": (self.args, self.kwargs),
            "the batch of the loss": self.batch if self.takes_batch else None,
        }
        written = () if logs_writes else self._written
        with (
            self._shards_restored(),
            Snapshot(roots, self.model.parameters(), written) as self._snapshot,
        ):
            if not self._snapshot.is_whole and not self._was_warned:
                self._was_warned = True
                warn_user(_INCOMPLETE.format(limit=LIMIT), PlanWarning)
            self.clear_gradients()
            try:
                yield
            finally:
                self.clear_gradients()

    @contextmanager
    def _shards_restored(self) -> Iterator[None]:
        """A context after which parameters are sharded, and waiting gradients are as before."""
        if self.shards is None:
            yield
            return
        # What the first forward sets up stays, and has to be there when the rest is captured.
        self.shards.initialize()
        taken = self.shards.take_gradients()
        try:
            yield
        finally:
            self.shards.reshard()
            put_gradients(taken)

    def run_first(self) -> None:
        """Run it for the first time, and log the memory that it writes to.

        Inside of `undone`, with ``logs_writes``.
        """
        refused = nullcontext() if self.is_shared else collectives_refused()
        with self._snapshot.log(), refused:
            self.run()
        self._written = self._snapshot.written

    def caches(self) -> list[Any]:
        """Every ``functools.lru_cache`` that the last `undone` has found."""
        snapshot = vars(self).get("_snapshot")
        return [] if snapshot is None else [*snapshot.caches]

    # --- memory and time --------------------------------------------------------------------------

    def base_bytes(self) -> int:
        """Bytes that are allocated before the step begins, and throughout."""
        return self._allocated_bytes() + self.late_bytes()

    def late_bytes(self) -> int:
        """Bytes of collectives that may be there for longer than in the steps that were seen."""
        return late_bytes(self.shards, self.largest_collective, self.device)

    def note_collective(self, nbytes: int) -> int:
        """Note what one collective takes. Returns by how much the base grows with that."""
        before = self.late_bytes()
        self.largest_collective = max(self.largest_collective, nbytes)
        return self.late_bytes() - before

    def _allocated_bytes(self) -> int:
        if self.on_cuda:
            return torch.cuda.memory_allocated(self.device)
        return sum(storage_sizes(self.static_tensors())) + self.gradient_bytes

    def _weights(self) -> Iterable[_Tensor]:
        return [*parameters_of(self.model), *self.model.buffers()]

    def static_tensors(self) -> Iterator[_Tensor]:
        """Parameters, buffers and optimizer state, in the parts that this process has."""
        states = {} if self.optimizer is None else self.optimizer.state
        leaves = [leaf for state in states.values() for leaf in tree_leaves(state)]
        for tensor in [*self._weights(), *leaves]:
            if isinstance(tensor, _Tensor):
                yield from local_tensors(tensor)

    def measured_peak(self) -> int:
        """Run it, and measure the peak of allocated bytes."""
        was_on = gc.isenabled()
        if self.on_cuda:
            gc.collect()
        else:
            gc.disable()  # it would free at other times than usual
        try:
            return self._allocated_bytes() + allocated_by(self.run, self.device)[0]
        finally:
            if was_on:
                gc.enable()

    def spare_blocks(self) -> int:
        """Bytes by which the peak of another such step may exceed that of the last one."""
        if not self.on_cuda:
            return 0
        stats = torch.cuda.memory_stats(self.device)
        blocks: int = stats["allocation.large_pool.peak"] - stats["allocation.large_pool.current"]
        return math.ceil(blocks / _ONE_BLOCK_IN) * _BLOCK_EXCESS

    def measured_seconds(self) -> Timing:
        """Run it until its times agree."""
        return sampled(lambda: [self.seconds()], long=True, most=_SAMPLES, seconds=_SECONDS)

    def seconds(self) -> float:
        """Run it once. Returns the time it took."""
        self._wait()
        start = now()
        self.run()
        self._wait()
        return now() - start

    def _wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def free_memory(self) -> None:
        """Free what earlier work left on the device: garbage, caches, workspaces of cuBLAS."""
        gc.collect()
        if self.on_cuda:
            free_cuda_workspaces()
            torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether ``error`` says that memory has run out."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def late_bytes(shards: Shards | None, collective: int, device: torch.device) -> int:
    """Bytes of collectives that a backend may free late.

    ``collective``: the most that one of the step itself takes.
    """
    late = 0 if shards is None else shards.in_flight_bytes()
    return late + (BACKEND_THREADS * collective if device.type == "cpu" else 0)


def device_of(model: nn.Module) -> torch.device:
    """The device that a model computes on: an accelerator, if it has parameters on one."""
    shards = shards_of(model)
    if shards is not None:  # whose parameters may be offloaded
        return shards.device
    devices = {parameter.device for parameter in model.parameters()}
    accelerated = [device for device in devices if device.type not in ("cpu", "meta")]
    return min(accelerated or devices, key=str)


def bytes_of_gradients(model: nn.Module) -> int:
    """The bytes of all gradients of a model, in the parts that are here."""
    return sum(storage_sizes(gradients_of(model)))


def storage_sizes(tensors: Iterable[_Tensor]) -> list[int]:
    """The bytes of the storages of ``tensors``, each once."""
    storages = {storage_key(tensor): tensor.untyped_storage() for tensor in tensors}
    return [storage.nbytes() for storage in storages.values()]


def refusal_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why ``function`` does not take such arguments; None if it does, or if that is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it has no signature
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def takes_batch(loss: Any, batch: Any) -> bool:
    """Whether a loss is ``loss(output, batch)``, and not ``loss(output)``: by its parameters."""
    forms = "loss=lambda output: ... or loss=lambda output, batch: ..."
    if not callable(loss):
        raise TypeError(
            f"loss should be a function of the model's output, or of that and the batch, {forms}, "
            f"but got {argument_text(loss)}"
        )
    name = getattr(loss, "__name__", type(loss).__name__)
    function = loss.forward if isinstance(loss, nn.Module) else loss
    if refusal_of(function, (None,), {}) is None:
        return False
    refusal = refusal_of(function, (None, None), {})
    if refusal is not None:
        raise TypeError(
            f"loss is called with the output of the model, or with that and the batch, and {name} "
            f"takes neither ({refusal}): {forms}"
        )
    if not isinstance(batch, Tensor) and str(getattr(loss, "__module__", "")).startswith(
        "torch.nn."
    ):
        raise TypeError(
            f"loss: {name} has two parameters, so it would be called with the output of the model "
            f"and the batch, which is a {type(batch).__name__} and not the target. Say which part "
            f"is: loss=lambda output, batch: {name}(output, ...), or have it know the target: "
            "loss=lambda output: criterion(output, target)"
        )
    return True


def check_loss(loss: Any, model: nn.Module) -> None:
    """Refuse a loss that backward cannot start from."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(
            f"loss should give one number to call backward on, but gave {what}. {_loss_fix(loss)}"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"loss: the loss of this {type(model).__name__} depends on nothing that requires a "
            "gradient, so there is no backward to plan for. Does forward or the loss function run "
            "under torch.no_grad, or detach its result?"
        )


def _loss_fix(loss: Any) -> str:
    if loss is None:
        return "Does the loss function end without a return? Return the loss"
    if isinstance(loss, (int, float)):
        return "Return the tensor: leave out .item() or float()"
    return "Reduce it: loss=lambda output: ....mean()"


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse what is no optimizer, needs a closure, or trains another model."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer should be a torch.optim.Optimizer, but got {argument_text(optimizer)}. "
            "Pass the one of the loop, such as torch.optim.AdamW(model.parameters())"
        )
    # The method of its class: schedulers replace it by one that says that it takes `self`.
    refusal = refusal_of(type(optimizer).step, (optimizer,), {})
    if refusal is not None:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} needs a closure ({refusal}), and calls the "
            "model an unknown number of times: that is not one step. Leave it out, "
            "recollect.plan(model, batch, budget): its state is then not counted"
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
