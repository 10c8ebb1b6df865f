"""Watches steps under a plan: whether the loop holds the model's output, and the peak (P7).

A plan has to assume either that the loop holds the output of the model through backward, or that it
does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakMethod, ref

import torch
from torch import nn

from recollect._torch.autograd import (
    at_end_of_backward,
    backward_keeps_graph,
    current_graph_task,
    current_node,
    graph_nodes,
)
from recollect._torch.dtensors import local_tensor
from recollect._torch.dynamo import hide_with_calls
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key
from recollect.checks.place import warn_user
from recollect.errors import PlanWarning
from recollect.replay.rematerialize import Rematerializer
from recollect.report.units import bytes_text

T = TypeVar("T")
_Tensor = torch.Tensor
_log = logging.getLogger("recollect")
#: The unused fraction of a budget that is worth a line in the log.
_WORTH_A_LINE = 1e-3


def watch_output(output: Any, act: Callable[[int, int], None]) -> None:
    """Have ``act`` called once, when backward first reaches ``output``. Holds no tensor.

    Its arguments are the bytes of ``output`` that are still in memory, and all bytes of it. By then
    the tensors that the loss saved have been freed, unless the graph is retained.
    """
    storages: dict[int, tuple[Any, int]] = {}
    for tensor in _tensors(output):
        key = storage_key(tensor)
        if key is not None:
            storage = local_tensor(tensor).untyped_storage()
            storages[key] = ref(storage), storage.nbytes()

    def reached() -> None:
        alive = sum(nbytes for storage, nbytes in storages.values() if storage() is not None)
        act(alive, sum(nbytes for _, nbytes in storages.values()))

    if storages:
        when_backward_reaches(output, reached)


def weakly(method: Callable[..., T]) -> Callable[..., T | None]:
    """Calls a method while its object is alive, which this does not keep alive."""
    weak = WeakMethod(method)

    def call(*args: Any) -> T | None:
        bound = weak()
        return None if bound is None else bound(*args)

    return call


class _Token:
    """Alive for as long as the output of a forward, or a graph through it, is."""


class Waiting:
    """A forward that waits for its backward. Holds no tensor.

    Args:
        output: What it returned.
        remat: Its held tensors; None if it ran without the engine.
        on_reached: Called when a backward reaches the output.
        on_dropped: Called when the output and its graph are freed.
        on_again: Called when a backward reaches a tensor of the output that none had reached, after
            one that has freed the graph of others.
        in_parts: Whether that is expected: it waits until all of the output was reached.
        since: The number of the graph's first node that it may have made.
    """

    def __init__(
        self,
        output: Any,
        remat: Rematerializer | None = None,
        on_reached: Callable[[], None] | None = None,
        on_dropped: Callable[[], None] | None = None,
        on_again: Callable[[], None] | None = None,
        *,
        in_parts: bool = False,
        since: int = 0,
    ) -> None:
        self._since = since
        self._remat = None if remat is None else ref(remat)
        self._on_reached, self._on_again, self._in_parts = on_reached, on_again, in_parts
        self._backward = -1  #: the last backward that reached it
        self._retained = 0  #: how many saved tensors that has left to another one
        # Of a graph that a backward has retained:
        self._left: Callable[[], _Token | None] | None = None  #: whether any node is alive
        self._followed: set[int] = set()  #: the nodes of the output from which it was followed
        self._freed_by = -1  #: the last backward that freed a part of it
        #: Whether a backward that has reached it has not ended: it runs, or has failed.
        self.is_running = False
        #: Whether a backward has gone through it, and whether that has freed the graph.
        self.is_reached = self._is_over = False
        token = _Token()
        self._token = ref(token, None if on_dropped is None else lambda _: on_dropped())
        nodes = _nodes_of(output)
        #: Whether a backward can come at all.
        self.has_graph = bool(nodes)
        #: By node that made a tensor of it: the handle of the hook; and the nodes that no backward
        #: has reached.
        self._handles = {
            key: node.register_prehook(partial(self._reached, token, key))
            for key, node in nodes.items()
        }
        self._missing = {*nodes}

    @hide_with_calls
    def _reached(self, _: _Token, key: int, __: Any) -> None:
        """Backward has reached the output; perhaps in a thread of autograd's."""
        backward = current_graph_task()
        self._missing.discard(key)
        if self._is_over and backward != self._backward:
            if self._on_again is not None:
                self._on_again()
            return
        if backward_keeps_graph() and key not in self._followed:
            self._followed.add(key)
            self._follow()
        if backward == self._backward:
            return  # as by another of its nodes
        self._backward, self.is_running = backward, True
        at_end_of_backward(partial(self._ended, backward_keeps_graph(), self._count()))
        if self._on_reached is not None:
            self._on_reached()

    @hide_with_calls
    def _ended(self, is_retained: bool, count: int) -> None:
        self.is_reached, self.is_running = True, False
        if self._in_parts and not is_retained and self._missing:
            is_retained, count = True, self._count()  # in part
        self._retained, self._is_over = count, not is_retained
        if self._is_over:
            for key in self._handles.keys() - self._missing:
                self._handles.pop(key).remove()

    def _follow(self) -> None:
        """The graph is retained, so a later backward may come, which need not pass the output."""
        token = (self._left and self._left()) or _Token()
        self._left = ref(token)
        # Not those of parameters, nor of an earlier graph: they outlive this one.
        for node in graph_nodes([current_node()], self._since):
            node.register_prehook(partial(self._passed, token))

    @hide_with_calls
    def _passed(self, _: _Token, __: Any) -> None:
        """A backward goes through a graph that was retained."""
        backward = current_graph_task()
        if not backward_keeps_graph() and backward != self._freed_by:
            self._freed_by = backward
            at_end_of_backward(self._is_freed)

    @hide_with_calls
    def _is_freed(self) -> None:
        self._is_over = True

    def _count(self) -> int:
        """The number of its saved tensors in the graph, as far as known."""
        remat = None if self._remat is None else self._remat()
        return 0 if remat is None else remat.count_waiting()

    def is_waiting(self) -> bool:
        """Whether a later backward may still need the tensors that it holds."""
        if self._is_over:
            return False
        if self._left is not None and not self.is_running:
            return self._left() is not None
        if self._token() is None and not self._retained:
            return False
        if self.is_running and current_graph_task() == -1:
            return False  # backward has failed, and cannot go through it again
        return self._count() >= self._retained


def when_backward_reaches(output: Any, act: Callable[[], None]) -> None:
    """Have ``act`` called once, when backward first reaches ``output``."""
    nodes = _nodes_of(output)
    handles: list[Any] = []

    @hide_with_calls
    def reached(_: Any) -> None:
        found = [*handles]
        handles.clear()
        for handle in found:
            handle.remove()
        if found:  # else another of the nodes was first
            act()

    handles += [node.register_prehook(reached) for node in nodes.values()]


def _nodes_of(output: Any) -> dict[int, Any]:
    """The nodes that made the tensors of an output, by id."""
    return {id(t.grad_fn): t.grad_fn for t in _tensors(output) if t.grad_fn is not None}


def _tensors(output: Any) -> Iterator[_Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, _Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([*vars(leaf).values()])


def report_output(alive: int, planned: int, budget: int) -> bool:
    """Warn or log if the loop holds more or less of the output than planned; return whether so.

    ``alive``: bytes of the output in memory when backward reaches it; ``planned``: in the plan.
    """
    if alive > planned:
        warn_user(
            f"the plan was made for a loop that frees the model's output before backward, and "
            f"{alive - planned:,} bytes more of it than planned are in memory in backward: the "
            f"step may exceed its budget of {budget:,} bytes by as much. Delete the output "
            "before loss.backward(), or plan for it: plan(..., holds_output=True)",
            PlanWarning,
        )
        return True
    if planned - alive > _WORTH_A_LINE * budget:
        _log.info(
            "the plan assumes that the loop holds the model's output through backward, but it "
            "does not: %s of the budget go unused. Plan with holds_output=False to use them",
            bytes_text(planned - alive),
        )
        return True
    return False


class PeakWatch:
    """Compares the peak of CUDA's allocator in a step, forward and backward, with the budget.

    What happens between steps (evaluation, other models) does not count. The statistics are the
    user's and are never reset, so a step whose peak is below an earlier one is not noticed.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._device: torch.device | None = None
        self._over: int | None = None

    def take_excess(self) -> int | None:
        """The peak of the last step, if it exceeded the budget; None when that was told."""
        over, self._over = self._over, None
        return over

    def read(self, model: Any) -> int | None:
        """The peak so far; None if the model is not on a CUDA device."""
        if not torch.cuda.is_initialized() or not isinstance(model, nn.Module):
            return None
        if self._device is None:
            devices = {parameter.device for parameter in model.parameters()}
            on_cuda = [device for device in devices if device.type == "cuda"]
            self._device = min(on_cuda, key=str, default=torch.device("cpu"))
        return None if self._device.type != "cuda" else _peak_on(self._device)

    def compare(self, output: Any, before: int) -> None:
        """Compare when the backward of ``output`` ends. ``before``: the peak before the step."""

        def compare() -> None:
            assert self._device is not None
            peak = _peak_on(self._device)
            if peak > before and peak > self._budget:
                self._over = peak

        when_backward_reaches(output, lambda: at_end_of_backward(compare))


def _peak_on(device: torch.device) -> int:
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    peak: int = stats["allocated_bytes"]["all"]["peak"]
    return peak
