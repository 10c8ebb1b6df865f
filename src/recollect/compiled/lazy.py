"""``fit`` of a compiled model without a batch: the plan is made from the loop's own steps (P8).

1. The first steps run with as little saved as can be: each graph is solved where it is split. They
   compile, and optimizers make their state.
2. A step in which nothing was compiled is measured, and planned before the next one.
3. A step under the plan is measured. If it took more than the budget, or much less, the plan is
   made again with what was learned, and compiled again, a few times at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

from torch import nn

from recollect._torch.dynamo import never_traced, outside_of_compiler
from recollect._torch.inductor import (
    called_around,
    called_by_compiler,
    compile_in_place,
    drop_compiled,
    function_of,
    method_settings,
    settings_in,
)
from recollect.checks.place import warn_user
from recollect.compiled.applied import Applied, Installed
from recollect.compiled.backend import Backend, Call, Compiler, Notes, Runs
from recollect.compiled.costs import NodeCosts
from recollect.compiled.joint import Joint
from recollect.compiled.loop import LoopSteps
from recollect.compiled.loop_planner import LoopPlanner, observed_calls
from recollect.compiled.merge import merge_alone
from recollect.compiled.part import make_part
from recollect.compiled.sites import Called, Site, find_sites, install, model_name, prepare
from recollect.compiled.split import Observer, Solve
from recollect.compiled.watch import FULLGRAPH
from recollect.errors import PlanWarning
from recollect.graph.schedule import Schedule
from recollect.graph.simulate import levels_under, simulate
from recollect.modules import OPTIONS, wrap_module
from recollect.planning.recording.model_state import ModelState
from recollect.planning.recording.step import device_of
from recollect.planning.solving.solve import Solver
from recollect.planning.trial import Progress
from recollect.planning.warn_once import WarnOnce
from recollect.report.units import bytes_text

_log = logging.getLogger("recollect")
#: How many steps may come before the first step of an optimizer.
_UPDATE = 64
#: After how many steps that could not be measured there is no plan, or it is not corrected.
_FUTILE = 8
#: How many plans are compiled.
_COMPILES = 3
_NOTHING_AROUND = [(0, 0)] * 3


class CompiledMethod(nn.Module):
    """A compiled method of a module, as a module that is compiled: it can be planned for.

    Args:
        module: The module.
        method: What ``torch.compile`` returned for the method.
    """

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.train(module.training)
        found = method_settings(method)
        assert found is not None
        self._method, *settings = found
        compile_in_place(self, *settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self._method(*args, **kwargs)


def is_compiled_method(method: Any) -> bool:
    """Whether ``torch.compile`` has returned it."""
    return method_settings(method) is not None


def fit_lazily(model: nn.Module, budget: float | str, progress: Progress) -> LazyFit:
    """Have a compiled model make its plan from the steps of the loop."""
    lazy = LazyFit(model, budget, progress)
    if lazy.is_of_model:
        vars(model)[OPTIONS] = lazy
    else:  # what runs before the first compiled module is part of a step
        wrap_module(model, lazy)
    return lazy


def fit_called_by_compiler(
    model: nn.Module, budget: float | str, progress: Progress, callback: Any
) -> bool:
    """The same for a model that compiled code calls now. Returns whether it can be.

    The code around it stops where it calls the model, and the model is compiled by itself.
    ``callback``: that of the compiler.
    """
    found = settings_in(callback)
    if found is None:
        return False
    compile_in_place(model, *found)
    try:
        fit_lazily(model, budget, progress).on_end = drop_compiled
    except BaseException:
        drop_compiled(model)
        raise
    return True


class LazyFit(Installed):
    """Runs a compiled model without a plan, and makes one of its steps."""

    def __init__(self, model: nn.Module, budget: float | str, progress: Progress) -> None:
        self._budget, self._progress = budget, progress
        self._model, self._device = ref(model), device_of(model)
        self.sites: Sequence[Site] = find_sites(model)
        self._before = {n: called_by_compiler(site.module) for n, site in enumerate(self.sites)}
        #: Called when the model runs as it did before.
        self.on_end: Callable[[nn.Module], None] | None = None
        self._warnings = WarnOnce()
        self._notes, runs = Notes(), Runs()
        self._steps = LoopSteps(model, runs, self._begin, self._keep)
        #: Of the step that was measured: its calls of compiled graphs, and the state of the model.
        self._calls: list[Call] = []
        self._forwards = 1
        self._state: ModelState | None = None
        self._planner: LoopPlanner | None = None
        self._applied: Applied | None = None
        self._compiles = 0
        #: By site: what it calls now, but for this.
        self._functions: dict[int, Callable[..., Any]] = {}
        self._install(self._first_code(runs))

    @property
    def is_of_model(self) -> bool:
        """Whether the model itself is compiled, and not modules in it."""
        return self.sites[0].path == ""

    def _first_code(self, runs: Runs) -> Called:
        backends: list[Backend] = []

        def backend_for(number: int) -> Backend:
            compiler = self.sites[number].compiler
            for backend in backends:
                if backend.compiler == compiler:
                    return backend
            split = Observer(self._least_of(compiler))
            backends.append(Backend(compiler, split, None, runs, self._notes))
            return backends[-1]

        called = prepare(self.sites, backend_for)
        for backend in backends:  # not before: Lightning copies what torch.compile is given
            backend.on_copy = self.warn_of_copy
        return called

    def _least_of(self, compiler: Compiler) -> Solve:
        """Decides for graphs before there is a plan."""

        def solve(key: str, joint: Joint) -> Collection[str]:
            part = make_part(key, joint, NodeCosts(self._device), fused=compiler.is_fused)
            merged = merge_alone(part, 0, _NOTHING_AROUND)
            solver = Solver(merged.graph, rough=True)
            found = [each.schedule for each in (solver.least(), *solver.frontier())]

            def peak(schedule: Schedule) -> int:
                # What the graphs of other modules hold is there besides.
                held = levels_under(merged.graph, schedule)[merged.gaps[1]]
                return simulate(merged.graph, schedule).peak + held * (len(self.sites) - 1)

            return merged.kept_in(0, min((Schedule(frozenset()), *found), key=peak))

        return solve

    def _install(self, called: Called) -> None:
        self._functions = {number: function_of(each) for number, each in called.items()}
        ours = {n: called_around(each, partial(self._noticed, n)) for n, each in called.items()}
        install(self.sites, ours)

    def _noticed(self, number: int, _: Any) -> Callable[..., Any]:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            return self._steps.run(partial(self._call, number, args, kwargs))

        return outside_of_compiler(noticed, FULLGRAPH)

    def _call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._notes.begin(number)
        return self._functions[number](*args, **kwargs)

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the forward of a model that has compiled modules in it."""
        return self._steps.run(partial(function, *args, **kwargs))

    def unwrapped(self, model: nn.Module) -> None:
        """The model runs as it did before."""
        self._steps.end()
        if self._applied is None:
            install(self.sites, self._before)
        else:
            self._applied.unwrapped(model)
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

    def _begin(self) -> None:
        """A step begins: the last one may tell something."""
        steps = self._steps
        if self._applied is not None:
            if steps.timeline is not None:
                self._judge(self._applied)
            elif steps.missed >= _FUTILE:
                self._finish()
        elif steps.timeline is not None:
            if steps.updates.are_there or steps.count >= _UPDATE:
                self._make_plan()
        elif steps.missed >= _FUTILE:
            self._give_up()
        self._notes.clear()
        model = self._model()
        if model is not None and self._planner is None:
            self._state = ModelState.of(model)

    def _keep(self) -> None:
        """A step was measured."""
        if self._applied is None:
            self._calls = [call for call in self._notes.calls if call.graph is not None]
            self._forwards = self._notes.forwards

    def _make_plan(self) -> None:
        model, timeline = self._model(), self._steps.timeline
        assert model is not None
        assert timeline is not None
        assert self._state is not None
        base = self._steps.base_bytes(model)
        costs = NodeCosts(self._device)
        self._progress("planning the step of the loop", 0.0)
        observed = observed_calls(self._calls, self.sites, timeline, base, costs)
        observed = replace(observed, forwards=self._forwards)
        peak = base + timeline.peak
        planner = LoopPlanner.of_loop(
            model, observed, self._state, self._steps.gradients, peak, self._progress
        )
        self._planner = planner
        plan = planner.plan_within(self._budget)
        _compare_first(peak, plan)
        self._apply(model, plan)

    def _apply(self, model: nn.Module, plan: Any) -> None:
        if self._applied is not None:
            self._applied.unwrapped(model)
        else:
            install(self.sites, self._before)
        self.plan, self._compiles = plan, self._compiles + 1
        self._applied = Applied(plan, model)
        self._install({n: called_by_compiler(s.module) for n, s in enumerate(self.sites)})
        self._steps.watch_compiler(self._applied.code.runs)
        _log.info(
            "recollect: %s -> %s for the compiled step",
            bytes_text(plan.plain_peak),
            bytes_text(plan.predicted_peak),
        )

    def _judge(self, applied: Applied) -> None:
        """A step under the plan was measured."""
        model, planner, timeline = self._model(), self._planner, self._steps.timeline
        assert model is not None
        assert planner is not None
        assert timeline is not None
        plan = applied.plan
        peak = self._steps.base_bytes(model) + timeline.peak
        planner.note(peak, applied.code)
        better = planner.better_plan(plan, peak)
        is_last = planner.is_measured or self._compiles >= _COMPILES
        if peak > plan.budget >= better.predicted_peak and not planner.is_measured:
            self._warnings.warn(
                "measured",
                f"a step under the plan took {bytes_text(peak)}, more than its budget of "
                f"{bytes_text(plan.budget)}: the compiler has put more into memory than was "
                "simulated. Those that follow save less",
            )
        if peak <= plan.budget and is_last and not planner.is_measured:
            self._finish()  # as it is: it fits, and enough was compiled
            return
        self._apply(model, better)
        if is_last:
            self._finish()

    def _finish(self) -> None:
        """The plan stays as it is."""
        self._steps.end()
        self._planner = None
        self._calls = []
        for number, site in enumerate(self.sites):
            called = called_by_compiler(site.module)
            install(self.sites, {number: called_around(called, partial(self._bare, number))})

    def _bare(self, number: int, _: Any) -> Callable[..., Any]:
        return self._functions[number]

    def _give_up(self) -> None:
        model = self._model()
        self._steps.missed = 0
        self._warnings.warn(
            "no plan",
            f"the steps of this {'model' if model is None else model_name(model)} could not be "
            "measured, so there is no plan: another profiler is on, there is a process group "
            "(torch.distributed), or each step is compiled once "
            "more (TORCH_LOGS=recompiles shows why). The model runs with as little saved as "
            "possible. Make a plan with a batch: recollect.fit(model, batch, budget)",
        )


never_traced(LazyFit.__call__, FULLGRAPH)


def _compare_first(peak: int, plan: Any) -> None:
    """Warn if the steps before there was a plan have exceeded the budget."""
    if peak > plan.budget >= plan.predicted_peak:
        warn_user(
            f"the training steps before there was a plan took {bytes_text(peak)}, more than the "
            f"budget of {bytes_text(plan.budget)}, with as little saved of each compiled graph as "
            "possible. Those that follow are within the budget",
            PlanWarning,
        )
