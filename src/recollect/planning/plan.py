"""The `Plan` of a training step: its schedule, figures and report; apply, show and save (P6)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recollect._torch.modules import is_compiled
from recollect._version import __version__
from recollect.compiled.applied import Applied, Installed
from recollect.compiled.decisions import CompiledStep
from recollect.compiled.sites import has_sites
from recollect.modules import OPTIONS, unwrap_module, wrap_module
from recollect.planning.loop.planned_step import PlannedForward, PlannedStep
from recollect.planning.loop.runner import Runner
from recollect.planning.recording.model_state import ModelState, check_model, first_difference
from recollect.planning.regions.module_regions import wrap_modules
from recollect.replay.named_schedule import Alike, NamedSchedule
from recollect.report.compare import Comparison
from recollect.report.page import HasPage, page
from recollect.report.plan_report import Band, Mark, PlanReport, Point, Stack, Traffic
from recollect.report.rows import Row
from recollect.report.table import table
from recollect.report.units import argument_text, bytes_text, percent_text

M = TypeVar("M", bound=nn.Module)

_FORMAT = 10

#: What marks a model that a plan is applied to.
_RUNNERS = (Runner, Installed)


@dataclass(frozen=True)
class Origin:
    """The versions that a plan was made with, and when."""

    recollect: str
    torch: str
    date: str  #: in UTC, such as ``2026-11-18T07:10:00+00:00``

    @classmethod
    def now(cls) -> Origin:
        """Here and now."""
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(__version__, str(torch.__version__), date)

    def __str__(self) -> str:
        return f"recollect {self.recollect}, torch {self.torch}, {self.date[:10]}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(PlannedStep, HasPage):
    """The results that a training step keeps, recomputes and offloads to stay within a budget.

    Made by `recollect.plan`. Immutable. ``str()`` of it is a table. Peaks are in bytes, times in
    seconds. Measured values are None where the step could not run.

    Attributes:
        budget: The highest peak that is allowed.
        predicted_peak: The peak of a step under the plan.
        predicted_time: The time of a step under the plan.
        plain_peak: The peak without a plan.
        plain_time: The time without a plan.
        bound_time: A lower bound on the step time of any plan within the budget.
        alternatives: Other schedules for the same step, from the fastest to the one of least peak:
            for steps that are not the planned one.
        measured_peak: The peak of steps that ran under the plan.
        measured_time: The time of a step that ran under the plan.
        measured_plain_time: The time of plain steps, timed in turn with those.
        spread: By how much times may be off: the relative difference of timings of the same work.
        holds_output: Whether the loop is assumed to hold the output of the model through backward.
        output_bytes: The bytes of the output held in the measured steps.
        gradients: The bytes of gradients that existed when the plan was made. They count.
        base: The bytes that are allocated throughout.
        made: The bytes that forward allocates, by module: one that allocates more is another step.
        stopped: Why forward could not be recorded to its end, if so. The rest of it is kept.
        excess: By what fraction of the simulated peak the measured one was higher.
        from_loop: Whether it was made from a step of the loop, by a fit without a batch.
        state_bytes: The bytes of optimizer state that such a plan counts.
        is_solved: Whether other schedules were searched for. A fit without a batch does not if the
            step fits plain, until there is a step that does not.
        others: The forwards after the first, if the step calls the model several times.
        origin: The versions it was made with, and when.
    """

    plain_time: float
    bound_time: float
    model: str
    report: PlanReport
    measured_time: float | None = None
    measured_plain_time: float | None = None
    spread: float = 0.0
    holds_output: bool = True
    origin: Origin = field(default_factory=Origin.now, compare=False)
    #: Of a compiled model: what is saved of its graphs. The schedule is then for reading.
    compiled: CompiledStep | None = None

    @property
    def gap(self) -> float:
        """How far the predicted time is above its lower bound, as a fraction of it."""
        if not self.bound_time:
            return 0.0
        return max(0.0, self.predicted_time / self.bound_time - 1)

    # --- apply ------------------------------------------------------------------------------------

    def apply(self, model: M) -> M:
        """Have ``model`` run under this plan from now on. Returns the same object.

        Its class name, parameters, ``state_dict`` and hooks stay as they are.
        """
        self._check(model)
        if self.compiled is not None:
            vars(model)[OPTIONS] = Applied(self, model)
            return model
        runner = Runner(self)
        wrap_module(model, runner)
        try:
            wrap_modules(model, self.wrapped)
        except ValueError:
            unwrap_module(model)
            raise
        runner.expect_calls(model)
        return model

    def remove(self, model: M) -> M:
        """Undo `apply`: ``model`` runs plain again."""
        runner = vars(model).get(OPTIONS)
        if not isinstance(runner, _RUNNERS) or runner.plan != self:
            which = "another plan" if isinstance(runner, _RUNNERS) else "no plan"
            raise ValueError(
                f"model: {which} is applied to this {type(model).__name__}, so this one cannot be "
                "removed. To undo whatever is applied: recollect.unwrap(model)"
            )
        unwrap_module(model)
        return model

    @contextmanager
    def applied(self, model: M) -> Iterator[M]:
        """A context in which ``model`` runs under this plan."""
        self.apply(model)
        try:
            yield model
        finally:
            self.remove(model)

    def _check(self, model: nn.Module) -> None:
        check_model(model)
        if isinstance(vars(model).get(OPTIONS), _RUNNERS):
            raise ValueError(
                f"model: a plan is applied to this {type(model).__name__} already; "
                "call plan.remove(model) first"
            )
        if is_compiled(model) and self.compiled is None:
            raise ValueError(
                "model: it is compiled, and this plan was made for a model that is not. Make a "
                "plan for the compiled one, recollect.plan(model, batch, budget), or apply this "
                "one to the model that it was made from"
            )
        if self.compiled is not None and not has_sites(model):
            raise ValueError(
                "model: it is not compiled, and this plan was made for one that is: "
                f"torch.compile(model, backend={self.compiled.backend!r}) first, or make a plan "
                "for it as it is"
            )
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "model: it is wrapped in DistributedDataParallel, and the plan is for the "
                "module inside: plan.apply(model.module)"
            )
        difference = first_difference(self.state, model)
        if difference is not None:
            raise ValueError(
                f"model: this plan is for another model, {self.model}. The "
                f"{type(model).__name__} given differs: {difference}. Make a plan for it: "
                "recollect.plan(model, batch, budget)"
            )

    # --- show -------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        slower = self.predicted_time / self.plain_time - 1 if self.plain_time else 0.0
        return (
            f"<Plan for {self.model}: {bytes_text(self.predicted_peak)} of "
            f"{bytes_text(self.budget)}, {percent_text(slower)} slower than plain>"
        )

    def __str__(self) -> str:
        return table(self.report)

    def explain(self) -> tuple[Row, ...]:
        """Whether the results of each op are kept, recomputed or offloaded, in forward's order."""
        return self.report.rows

    def compare(self, other: Plan) -> Comparison:
        """This plan beside another one: ``print(plan.compare(other))``.

        The columns are called by the budgets. ``to_html`` of the result writes a page.
        """
        if not isinstance(other, Plan):
            raise TypeError(
                f"other should be a Plan, but got {argument_text(other)}. Read a file by "
                "recollect.Plan.load(path)"
            )
        first, second = bytes_text(self.budget), bytes_text(other.budget)
        names = (first, second) if first != second else ("this plan", "the other")
        return Comparison(self.report, other.report, names)

    def _page(self) -> str:
        return page(self.report)

    # --- files ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        names = {each.name for each in fields(self)}
        return {**{k: v for k, v in vars(self).items() if k in names}, "graph": None}

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON. All ranks may do so: the file is always whole."""
        bare = replace(
            self,
            graph=None,
            schedule=NamedSchedule(),
            alternatives=(),
            others=(),
            rivals=(),
            compiled=None,
        )
        content = {
            "format": _FORMAT,
            # First, for a reader who opens the file.
            "origin": {**asdict(self.origin), "device": self.report.device},
            **{name: value for name, value in asdict(bare).items() if name != "origin"},
            "schedule": self.schedule.to_json(),
            "compiled": None if self.compiled is None else self.compiled.to_json(),
            "alternatives": [each.to_json() for each in self.alternatives],
            "others": [
                (each.signature, each.schedule.to_json(), each.made, each.extra_bytes)
                for each in self.others
            ],
        }
        del content["graph"], content["rivals"]
        own = Path(f"{path}.{os.getpid()}")
        try:
            own.write_text(json.dumps(content, indent=1), encoding="utf-8")
        except OSError as error:  # which names the file of this process
            raise OSError(error.errno, error.strerror, str(path)) from None
        own.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that was saved. `apply` checks whether it is for a model."""
        try:
            return cls(**_from_json(json.loads(Path(path).read_text(encoding="utf-8"))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(
                f"path: {path} is not a plan that this version of recollect can read ({why}). "
                "Make it again: recollect.plan(...).save(path)"
            ) from error


def _from_json(content: dict[str, Any]) -> dict[str, Any]:
    origin = {name: str(value) for name, value in content.pop("origin", {}).items()}
    origin.pop("device", None)  # which is in the report
    if content.pop("format") != _FORMAT:
        by = f": {Origin(**origin)}" if origin else ""
        raise ValueError(f"another version of recollect wrote it{by}")
    content = {name: _tuples(value) for name, value in content.items()}
    alike, report = Alike(dict(content["op_counts"])), content["report"]
    compiled = content["compiled"]
    return {
        **content,
        "schedule": NamedSchedule(**content["schedule"], alike=alike),
        "alternatives": tuple(
            NamedSchedule(**each, alike=alike) for each in content["alternatives"]
        ),
        "others": tuple(
            PlannedForward(signature, NamedSchedule(**schedule, alike=alike), made, more)
            for signature, schedule, made, more in content["others"]
        ),
        "origin": Origin(**origin),
        "state": ModelState(**content["state"]),
        "compiled": compiled and CompiledStep.from_json(compiled),
        "report": PlanReport(
            **{
                **report,
                "rows": tuple(Row(**row) for row in report["rows"]),
                "points": tuple(Point(**point) for point in report["points"]),
                "before_marks": tuple(Mark(*mark) for mark in report["before_marks"]),
                "after_marks": tuple(Mark(*mark) for mark in report["after_marks"]),
                "before_stack": _stack(report["before_stack"]),
                "after_stack": _stack(report["after_stack"]),
                "traffic": report["traffic"] and Traffic(*report["traffic"]),
            }
        ),
    }


def _stack(content: Any) -> Stack:
    found = Stack(*content)
    return found._replace(bands=tuple(Band(*band) for band in found.bands))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
