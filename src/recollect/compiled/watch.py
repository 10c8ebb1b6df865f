"""Warns of training steps that do not run by the plan of a compiled model (P7).

Compiled code can be left without an error. The compiler gives up on a function that it has compiled
too often, and runs it as it is. Somebody compiles the model once more, or calls it from code that
is compiled, which takes in the model and not what the plan had made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from recollect._torch.autograd import backward_keeps_graph
from recollect._torch.dynamo import hide_with_calls, outside_of_compiler
from recollect.checks.place import WarnOnce
from recollect.compiled.backend import Notes
from recollect.compiled.sites import Called, Site, wrapped
from recollect.planning.loop import notices
from recollect.planning.loop.planned_step import PlannedStep
from recollect.planning.loop.watch import PeakWatch, Waiting
from recollect.planning.recording.model_state import compare_state, extra_gradient_bytes
from recollect.replay.function_call import casts
from recollect.report.units import bytes_text

#: The error if code that is compiled with ``fullgraph=True`` calls a model with a plan.
FULLGRAPH = (
    "a compiled model with a plan of recollect is called in code that is compiled, too: leave out "
    "fullgraph=True there, or plan.remove(model)"
)


class Watch:
    """Watches the compiled modules of a model from now on.

    ``notes`` count the graphs that run by the plan; ``forwards``: how often the planned step calls
    the first module.
    """

    def __init__(
        self,
        plan: PlannedStep,
        model: nn.Module,
        sites: Sequence[Site],
        notes: Notes,
        forwards: int = 1,
    ) -> None:
        self._plan, self._model = plan, ref(model)
        self._sites, self._notes = sites, notes
        self._forwards = forwards
        #: The calls of the first module that wait for their backward.
        self._waiting: list[Waiting] = []
        self._warnings = WarnOnce()
        self._peaks = PeakWatch(plan.budget)
        #: What autocast casts to, when it was last looked at.
        self._casts = casts()
        self._graphs = Graphs(sites, self._warnings)
        self._bypass = Bypass(sites, self._warnings)

    def end(self) -> None:
        """Watch no longer."""
        self._bypass.end()

    def watched(self, called: Called) -> Called:
        """What modules call, watched."""
        return wrapped(called, self._watched)

    def _watched(self, number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        notes = self._notes

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            peak = self._begin() if number == 0 else None
            before = notes.runs
            result = function(*args, **kwargs)
            self._graphs.ran(number, notes.runs - before)
            self._bypass.called(number)
            if number == 0:
                self._waiting.append(Waiting(result))
            if peak is not None:
                self._peaks.compare(result, peak)
            return result

        return outside_of_compiler(watched, FULLGRAPH)

    # --- steps that are not as planned ------------------------------------------------------------

    def _begin(self) -> int | None:
        """The first module is called. Returns the peak so far, if that can be read."""
        self._waiting = [each for each in self._waiting if each.is_waiting()]
        if len(self._waiting) >= self._forwards:
            self._warnings.warn(
                "forwards",
                f"{len(self._waiting) + 1} forwards wait for their backward, and the plan was made "
                f"for a step that has {self._forwards} at once: what all hold is in memory, "
                "and this step may exceed its budget. Have the loop's own steps planned, "
                "recollect.fit(model, budget=...); or if there is no backward, delete the "
                "output, or call the model under torch.no_grad()",
            )
        model, over = self._model(), self._peaks.take_excess()
        if over is not None:
            notices.of_excess(self._warnings, self._plan, over, keeps_less=False)
        if model is None:
            return None
        if self._bypass.has_gradient:
            self._check_gradients(model)
        if casts() != self._casts:
            self._casts = casts()
            self._check_state(model)
        return self._peaks.read(model)

    def _check_gradients(self, model: nn.Module) -> None:
        more = extra_gradient_bytes(model, [*model.parameters()], self._plan.gradients)
        if more and self._plan.predicted_peak + more > self._plan.budget:
            self._warnings.warn(
                "gradients",
                f"{bytes_text(more)} of gradients are there when forward begins, as when they "
                "accumulate, or after zero_grad(set_to_none=False), and the plan was made without: "
                "the step may exceed its budget by as much. Make the plan after a backward, while "
                "gradients are there: it counts them",
            )

    def _check_state(self, model: nn.Module) -> None:
        found = compare_state(self._plan.state, model)
        if found is not None:
            self._warnings.warn(
                "state",
                f"this step is not the one that the plan was made for: {'; '.join(found.texts)}. "
                "Its graphs are split for the same budget by simulation, but what the loss and the "
                f"rest of the step take is not known. Plan for it: {'; '.join(found.cures)}",
            )


class Graphs:
    """Warns of calls of compiled modules that run less compiled code than they did."""

    def __init__(self, sites: Sequence[Site], warnings: WarnOnce) -> None:
        self._sites, self._warnings = sites, warnings
        #: By site: the most graphs that a call of it has run.
        self._most = [1] * len(sites)

    def ran(self, number: int, count: int) -> None:
        """A call of a module for training has run so many graphs."""
        if count < self._most[number]:
            which = "none of its" if not count else f"{count} of {self._most[number]}"
            self._warnings.warn(
                "uncompiled",
                f"{_titled(self._sites[number])} has run {which} compiled graphs, so the plan is "
                "not in effect, and the step may exceed its budget. Either the compiler has given "
                "up after too many versions (torch._dynamo.config.recompile_limit; TORCH_LOGS="
                "recompiles shows the causes) or at a graph break in a loop (TORCH_LOGS="
                "graph_breaks), or it is switched off (torch.compiler.set_stance)",
            )
        self._most[number] = max(self._most[number], count)


class Bypass:
    """Warns of backwards that go through a compiled module which was not called."""

    def __init__(self, sites: Sequence[Site], warnings: WarnOnce) -> None:
        self._warnings = warnings
        #: By site: the parameters by which a backward is noticed.
        self._reached = [_ends(site.module, partial(self._missed, site)) for site in sites]

    @property
    def has_gradient(self) -> bool:
        """Whether the first module has a gradient."""
        return any(each.has_gradient for each in self._reached[0])

    def called(self, number: int) -> None:
        """A module was called for training."""
        for each in self._reached[number]:
            each.awaited += 1

    def end(self) -> None:
        """Watch no longer."""
        for reached in self._reached:
            for each in reached:
                each.remove()

    def _missed(self, site: Site) -> None:
        self._warnings.warn(
            "bypassed",
            f"a backward went through {_titled(site)} without the code of its plan, so the "
            "plan is not in effect, and the step may exceed its budget. Perhaps it was compiled "
            "again, is called by other compiled code, or the original model is called in place of "
            "the one that torch.compile returned. Compile the model once, call what that returns, "
            "and then recollect.fit(...)",
        )


class _Reached:
    """Notices backwards that reach a parameter, and compares them with the forwards before."""

    def __init__(self, parameter: nn.Parameter, missed: Callable[[], None]) -> None:
        #: The forwards whose backward has not come.
        self.awaited = 0
        self._missed = missed
        self._parameter = ref(parameter)
        self.remove = parameter.register_post_accumulate_grad_hook(self._reach).remove

    @property
    def has_gradient(self) -> bool:
        """Whether the parameter has a gradient."""
        parameter = self._parameter()
        return parameter is not None and parameter.grad is not None

    @hide_with_calls
    def _reach(self, _: Any) -> None:
        if not self.awaited:
            self._missed()
        elif not backward_keeps_graph():  # else another one may go the same way
            self.awaited -= 1


def _ends(module: nn.Module, missed: Callable[[], None]) -> list[_Reached]:
    """The first and the last trained parameter of a module: not all may be in use."""
    trained = [each for each in module.parameters() if each.requires_grad]
    ends = trained[:1] + (trained[-1:] if len(trained) > 1 else [])
    return [_Reached(each, missed) for each in ends]


def _titled(site: Site) -> str:
    name = type(getattr(site.module, "_orig_mod", site.module)).__name__
    return f"the compiled {name}" + (f" ({site.path})" if site.path else "")
