"""``fit`` of a compiled model without a batch: the plan is made from the loop's own steps (P8).

1. The first steps run with as little saved as can be: each graph is solved where it is split. They
   compile, and optimizers make their state.
2. A step in which nothing was compiled is measured. If it is of the largest shapes that were seen,
   it is planned before the next one.
3. A step of the same shapes is measured under the plan. If it took more than the budget, or much
   less, the plan is made again with what was learned, and compiled again, a few times at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import nn

from recollect._torch.dynamo import never_traced, outside_of_compiler
from recollect._torch.inductor import (
    compile_in_place,
    drop_compiled,
    function_of,
    is_compiled_here,
    settings_in,
)
from recollect.checks.place import WarnOnce, warn_user
from recollect.compiled.applied import Applied, Installed
from recollect.compiled.backend import Backend, Call, Compiler, Notes
from recollect.compiled.joint import Joint
from recollect.compiled.loop import LoopPlanner, LoopSteps, observed_loop
from recollect.compiled.merge import merge_alone
from recollect.compiled.observe import merged_calls
from recollect.compiled.part import NodeCosts, make_part
from recollect.compiled.planner import can_offload
from recollect.compiled.sites import Called, called_now, install, model_name, prepare, wrapped
from recollect.compiled.split import Decide, ObservingSplit
from recollect.compiled.timeline import Timeline
from recollect.compiled.watch import FULLGRAPH, Bypass, Graphs
from recollect.errors import PlanWarning
from recollect.graph.graph import Schedule
from recollect.graph.simulate import levels_under, simulate
from recollect.modules import OPTIONS, wrap_module
from recollect.planning.loop import notices
from recollect.planning.plan import Plan
from recollect.planning.prepare import Offload, check_can_offload
from recollect.planning.progress import Progress
from recollect.planning.recording.model_state import ModelState
from recollect.planning.recording.sampling import measured_link
from recollect.planning.recording.step import device_of
from recollect.planning.solving.solve import Solver
from recollect.report.units import bytes_text

_log = logging.getLogger("recollect")
#: After how many steps that could not be measured there is no plan, or it is not corrected.
_FUTILE = 8
#: How many steps are measured while there is no plan, if there is no reason for more.
_MEASURED = 4
#: How many plans are compiled.
_COMPILES = 3


def fit_lazily(
    model: nn.Module, budget: float | str, offload: Offload, progress: Progress
) -> LazyFit:
    """Have a compiled model, which is called now, make its plan from the steps of the loop."""
    lazy = LazyFit(model, budget, offload, progress)
    if lazy.is_of_model:
        vars(model)[OPTIONS] = lazy
        lazy.bypass.called(0)  # by whoever calls it
    else:  # what runs before the first compiled module is part of a step
        wrap_module(model, lazy)
    return lazy


def fit_called_by_compiler(
    model: nn.Module, budget: float | str, offload: Offload, progress: Progress, callback: Any
) -> bool:
    """As `fit_lazily`, for a model that compiled code calls now. Returns whether it can be.

    The code around it stops where it calls the model, and the model is compiled by itself.
    ``callback``: that of the compiler.
    """
    found = settings_in(callback)
    if found is None:
        return False
    compile_in_place(model, *found)
    try:
        fit_lazily(model, budget, offload, progress).on_end = drop_compiled
    except BaseException:
        drop_compiled(model)
        raise
    return True


class LazyFit(Installed):
    """Runs a compiled model without a plan, and makes one of its steps.

    It offloads only if ``offload`` is True: nobody compares times in the loop.
    """

    def __init__(
        self, model: nn.Module, budget: float | str, offload: Offload, progress: Progress
    ) -> None:
        super().__init__(model)
        self._budget, self._progress = budget, progress
        self._model = ref(model)
        self._offloads = can_offload(self.sites, offload) and offload is True
        if self._offloads and not torch.cuda.is_available():
            check_can_offload(device_of(model), is_shared=False)
        #: Called when the model runs as it did before.
        self.on_end: Callable[[nn.Module], None] | None = None
        self._warnings = WarnOnce()
        self._notes = Notes()
        self._steps = LoopSteps(model, self._notes, self._begin, self._keep)
        #: Warns of steps that this does not see, before there is a plan.
        self.bypass = Bypass(self.sites, self._warnings)
        self._graphs = Graphs(self.sites, self._warnings)
        #: What was measured: the largest step without a plan, or one like it under the plan.
        self._timeline: Timeline | None = None
        self._measured = 0
        # Of the largest step that was measured without a plan:
        self._calls: list[Call] = []  #: its calls of compiled graphs
        self._size = 0  #: how many numbers they take
        self._shapes: Sequence[Any] = ()  #: the shapes of what they take
        self._forwards = 1  #: how often it calls the model
        self._largest = 0  #: the size of the largest step, measured or not
        #: The state of the model before the step that is under way.
        self._state: ModelState | None = None
        self._planner: LoopPlanner | None = None
        self._applied: Applied | None = None
        self._compiles = 0
        #: By site: what it calls now, but for this.
        self._functions: list[Callable[..., Any]] = []
        self._install(self._first_code())

    @property
    def is_of_model(self) -> bool:
        """Whether the model itself is compiled, and not modules in it."""
        model = self._model()
        return model is not None and is_compiled_here(model)

    def _first_code(self) -> Called:
        backends: list[Backend] = []

        def make_backend(compiler: Compiler, _: int) -> Backend:
            split = ObservingSplit(self._least_of(compiler))
            backends.append(Backend(compiler, split, self._notes))
            return backends[-1]

        called = prepare(self.sites, make_backend)
        for backend in backends:  # not before: Lightning copies what torch.compile is given
            backend.on_copy = self.warn_of_copy
        return called

    def _least_of(self, compiler: Compiler) -> Decide:
        """Decides for graphs before there is a plan."""

        def decide(key: str, joint: Joint) -> Collection[str]:
            part = make_part(key, joint, NodeCosts(self._steps.device), fused=compiler.is_fused)
            merged = merge_alone(part)
            solver = Solver(merged.graph, rough=True)
            found = [each.schedule for each in (solver.least_solution(), *solver.frontier())]

            def peak(schedule: Schedule) -> int:
                # What the graphs of other modules hold is there besides.
                held = levels_under(merged.graph, schedule)[merged.gaps[1]]
                return simulate(merged.graph, schedule).peak + held * (len(self.sites) - 1)

            return merged.kept_in(0, min((Schedule(frozenset()), *found), key=peak))

        return decide

    def _install(self, called: Called) -> None:
        self._functions = [*map(function_of, called.values())]
        install(wrapped(called, self._noticed))

    def _noticed(self, number: int, _: Any) -> Callable[..., Any]:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            return self._steps.run(partial(self._call, number, args, kwargs))

        return outside_of_compiler(noticed, FULLGRAPH)

    def _call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._notes.begin(number)
        before = self._notes.runs
        result = self._functions[number](*args, **kwargs)
        if torch.is_grad_enabled():
            self.bypass.called(number)
            if self._applied is None:
                self._graphs.ran(number, self._notes.runs - before)
        return result

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the forward of a model that has compiled modules in it."""
        return self._steps.run(partial(function, *args, **kwargs))

    def unwrapped(self, model: nn.Module) -> None:
        """The model runs as it did before."""
        self._steps.end()
        self.bypass.end()
        if self._applied is not None:
            self._applied.unwrapped(model)
        super().unwrapped(model)
        if self.on_end is not None:
            self.on_end(model)

    def warn_of_copy(self) -> None:
        """Warn that the copy will have no plan, or as the plan does once it is there."""
        if self._applied is not None:
            self._applied.warn_of_copy()
            return
        warn_user(
            "a compiled model is copied or pickled before its plan is made, and the copy will have "
            "none. If it is to be trained: recollect.fit(copy, budget=...)",
            PlanWarning,
        )

    # --- steps ------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """A step begins. Returns whether to measure it."""
        self._act_on_last_step()
        self._notes.clear()
        if self._applied is not None:
            if self._planner is not None:
                self._applied.code.notes.clear()
            return True
        if (model := self._model()) is not None:
            self._state = ModelState.of(model)
        return self._measured < _MEASURED or self._size < self._largest

    def _act_on_last_step(self) -> None:
        """Make the plan, correct it, or give up, by what was measured."""
        steps, model, timeline = self._steps, self._model(), self._timeline
        if model is None:
            return
        if self._applied is not None:
            if timeline is not None:
                self._judge(model, self._applied, timeline)
            elif steps.missed >= _FUTILE:
                self._finish()
        else:
            self._largest = max(self._largest, _size_of(self._notes.calls))
            is_largest = self._size == self._largest or self._measured >= _FUTILE
            is_updated = not steps.updates.are_awaited(steps.count, model)
            if timeline is not None and is_largest and is_updated:
                self._make_plan(model, timeline)
            elif timeline is None and steps.missed >= _FUTILE:
                self._give_up()

    def _keep(self, timeline: Timeline) -> None:
        """A step was measured."""
        if self._applied is not None:
            if _shapes_of(self._applied.code.notes.calls) == self._shapes:
                self._timeline = timeline
            else:  # it is smaller, or larger, and says nothing
                self._steps.missed += 1
            return
        if not self._notes.observed():  # the compiler has given up
            self._steps.missed += 1
            return
        self._measured += 1
        size, peak = _size_of(self._notes.calls), timeline.peak
        if self._timeline is None or (size, peak) >= (self._size, self._timeline.peak):
            self._timeline, self._size = timeline, size
            self._shapes = _shapes_of(self._notes.calls)
            self._calls = self._notes.observed()
            self._forwards = self._notes.forwards

    def _make_plan(self, model: nn.Module, timeline: Timeline) -> None:
        assert self._state is not None
        base = self._steps.updates.base_bytes(model, self._steps.gradients)
        costs = NodeCosts(self._steps.device)
        self._progress("planning the step of the loop", 0.0)
        link = measured_link(self._steps.device) if self._offloads else None
        merged = merged_calls(self._calls, self.sites, timeline, base, costs)
        observed = observed_loop(self._calls, self.sites, merged, link, self._forwards)
        peak = base + timeline.peak
        planner = LoopPlanner.of_loop(
            model, observed, self._state, self._steps.gradients, peak, self._progress
        )
        self._planner = planner
        plan = planner.plan_or_least(self._budget)
        how = "with as little saved of each compiled graph as possible"
        notices.of_first_steps(plan, peak, how)
        self._apply(model, plan)

    def _apply(self, model: nn.Module, plan: Plan, measured: int = -1) -> None:
        if self._applied is not None:
            self._applied.unwrapped(model)
        else:
            self.bypass.end()
            install(self._before)
        self._timeline = None
        self.plan, self._compiles = plan, self._compiles + 1
        self._applied = Applied(plan, model)
        self._install(called_now(self.sites))
        self._steps.watch_compiler(self._applied.code.notes)
        _log.info(
            "recollect: %s -> %s (%s) for the compiled step",
            bytes_text(plan.plain_peak),
            bytes_text(plan.predicted_peak),
            "measured" if plan.predicted_peak == measured else "predicted",
        )

    def _judge(self, model: nn.Module, applied: Applied, timeline: Timeline) -> None:
        """A step under the plan was measured."""
        plan, planner = applied.plan, self._planner
        assert planner is not None
        peak = self._steps.updates.base_bytes(model, self._steps.gradients) + timeline.peak
        planner.note(peak, applied.code)
        better = planner.better_plan(plan, peak)
        is_last = planner.is_measured
        if not is_last and self._compiles >= _COMPILES:
            better, is_last = planner.best_known(plan.budget), True
        if peak > plan.budget >= better.predicted_peak and not planner.is_measured:
            self._warnings.warn(
                "measured",
                f"a step under the plan took {bytes_text(peak)}, more than its budget of "
                f"{bytes_text(plan.budget)}: the compiler has put more into memory than was "
                "simulated. Those that follow save less",
            )
        self._apply(model, better, peak)
        if is_last:
            self._finish()

    def _finish(self) -> None:
        """The plan stays as it is."""
        self._steps.end()
        assert self._applied is not None
        plan = self._applied.plan
        if plan.predicted_peak > plan.budget:
            self._warnings.warn(
                "over",
                f"steps take {bytes_text(plan.predicted_peak)}, more than the budget of "
                f"{bytes_text(plan.budget)}: that is the least of the plans that were compiled. "
                "Raise the budget, or use a smaller batch",
            )
        self._applied.code.notes.calls = self._notes.calls = None
        self._planner = None
        self._calls = []
        install(wrapped(called_now(self.sites), lambda number, _: self._functions[number]))

    def _give_up(self) -> None:
        model = self._model()
        self._steps.missed = 0
        self._warnings.warn(
            "no plan",
            f"the steps of this {'model' if model is None else model_name(model)} could not be "
            "measured, so there is no plan: another profiler is on, there is a process group "
            "(torch.distributed), each step is compiled once more (TORCH_LOGS=recompiles shows "
            "why), or nothing is (TORCH_LOGS=graph_breaks; torch.compiler.set_stance). What is "
            "compiled runs with as little saved as possible. Make a plan with a batch: "
            "recollect.fit(model, batch, budget)",
        )


never_traced(LazyFit.__call__, FULLGRAPH)


def _shapes_of(calls: Sequence[Call] | None) -> list[Any]:
    """What the compiled graphs of a step take in forward."""
    return [call.shapes for call in calls or () if not call.again]


def _size_of(calls: Sequence[Call] | None) -> int:
    """How many numbers that are."""
    return sum(prod(shape) for shapes in _shapes_of(calls) for shape in shapes)
