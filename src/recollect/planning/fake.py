"""Recording a step that is not run: for a model that does not fit, or has no memory yet.

Tensors have shapes and no values (torch's fake tensors), so that only what depends on values cannot
be recorded. What ops cost is measured afterwards, each once and on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.func import functional_call
from torch.optim import Optimizer

from recollect._torch.pytree import tree_leaves, tree_map_only
from recollect._torch.tensors import fake_on, fake_tensors
from recollect.graph.graph import Graph, Link
from recollect.graph.simulate import simulate_plain
from recollect.planning.batch import tensors_of_batch
from recollect.planning.profile import Profile, graph_of, observed
from recollect.planning.rates import Rates
from recollect.planning.rescale import CannotPredict
from recollect.planning.script import Script
from recollect.planning.step import Step, check_loss, default_loss, sizes
from recollect.planning.trace import Saved, Trace
from recollect.replay.engine import Hooks
from recollect.replay.record import Recorder
from recollect.replay.rematerialize import Recall

__all__ = ["CannotPredict", "predict_step", "trace_fake"]

_Tensor = torch.Tensor


def predict_step(step: Step, link: Link | None = None) -> Profile:
    """What can be said of a step without running it."""
    graph, script = _trace(step, link)
    plain = simulate_plain(graph)
    can_run = step.device.type != "meta"
    return Profile(graph, plain.peak, plain.seconds, False, can_run, script)


def trace_fake(step: Step, link: Link | None = None) -> Graph:
    """Record the step on tensors without values."""
    return _trace(step, link)[0]


def _trace(step: Step, link: Link | None) -> tuple[Graph, Script]:
    rates = Rates(_device(step), fakes=True)
    try:
        with fake_tensors() as mode, torch.enable_grad():
            fakes = _Fakes(step, mode)
            trace = _FakeTrace(rates, Script(fakes.batch(), fakes.static()))
            recordings: list[Any] = []
            with observed(step.model, trace, recordings, trace.wrap), trace:
                fakes.run(partial(setattr, trace, "is_backward", True))
    except Exception as error:
        # The model and the loss are the user's, and may raise anything where there are no values.
        text = str(error).partition("\n")[0]
        raise CannotPredict(
            f"model: the step of this {type(step.model).__name__} cannot be recorded without "
            f"running it ({type(error).__name__}: {text})"
        ) from error
    rates.settle()
    return graph_of(step, trace, recordings, sum(sizes(fakes.static())), link)


def _device(step: Step) -> torch.device:
    """Where the step would run."""
    if step.device.type != "meta":
        return step.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _FakeTrace(Trace):
    """Gives backward tensors of the looks that were saved, without making them again."""

    def wrap(self, recorder: Recorder, recall: Recall) -> Hooks:
        self.count_ops = recorder.count_ops
        return partial(self.pack, recorder.pack), self._unpack

    def _unpack(self, saved: Saved) -> _Tensor:
        return self.unpack(_alike, saved)


def _alike(ticket: list[Any]) -> _Tensor:
    tensor, _, view = ticket
    if view is None or tensor is not None:
        return tensor  # type: ignore[no-any-return]
    size, stride, _, dtype, _ = view.layout
    return torch.empty_strided(size, stride, dtype=dtype, device=view.buffer.device)


class _Fakes:
    """The step with tensors that stand for its own."""

    def __init__(self, step: Step, mode: Any) -> None:
        self._step = step
        device = _device(step)

        def fake(tensor: _Tensor) -> _Tensor:
            if tensor.device.type == "meta":
                return fake_on(mode, tensor, device)
            return mode.from_tensor(tensor)  # type: ignore[no-any-return]

        self._known: dict[int, _Tensor] = {}
        named = [*step.model.named_parameters(), *step.model.named_buffers()]
        for _, tensor in named:
            self._known[id(tensor)] = fake(tensor)
        self._tensors = {name: self._known[id(tensor)] for name, tensor in named}
        self._args = tree_map_only(_Tensor, fake, step.args)
        self._kwargs = tree_map_only(_Tensor, fake, step.kwargs)
        self._optimizer = _twin(step.optimizer, self._known)
        if self._optimizer is not None:
            self.run(lambda: None)  # its state is there before the step, as in all but the first

    def run(self, before_backward: Callable[[], None]) -> None:
        """As `Step.run`."""
        step = self._step
        output = functional_call(step.model, self._tensors, self._args, self._kwargs)
        loss = (step.loss or default_loss)(output)
        check_loss(loss, step.model)
        if not step.holds_output:
            del output
        before_backward()
        loss.backward()
        del loss
        if self._optimizer is not None:
            self._optimizer.step()
        if step.holds_output:
            del output
        for tensor in self._tensors.values():
            tensor.grad = None

    def batch(self) -> list[_Tensor]:
        """The tensors of the batch."""
        return tensors_of_batch(self._args, self._kwargs)

    def static(self) -> list[_Tensor]:
        """Parameters, buffers and optimizer state."""
        states = [] if self._optimizer is None else tree_leaves([*self._optimizer.state.values()])
        return [*self._tensors.values(), *(s for s in states if isinstance(s, _Tensor))]


def _twin(optimizer: Optimizer | None, fakes: dict[int, _Tensor]) -> Optimizer | None:
    """An optimizer like another, of the tensors that stand for its parameters."""
    if optimizer is None:
        return None
    groups = [
        {**group, "params": [fakes[id(p)] for p in group["params"] if id(p) in fakes]}
        for group in optimizer.param_groups
    ]
    try:
        return type(optimizer)(groups)  # type: ignore[call-arg]
    except TypeError:
        # One that is made otherwise. Its state counts if it is there.
        return None
