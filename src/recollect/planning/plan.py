"""A plan: what becomes of every value of a model's step, and what that comes to (P6)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from recollect._torch.modules import is_compiled
from recollect.graph.graph import Tally
from recollect.modules import OPTIONS, unwrap_module, wrap_module
from recollect.planning.blocks import wrap_blocks
from recollect.planning.estimate import Footprint
from recollect.planning.model_state import ModelState, other_model
from recollect.planning.planned import PlannedStep
from recollect.planning.runner import Runner
from recollect.replay.named_schedule import NamedSchedule
from recollect.report.page import page
from recollect.report.plan_report import PlanReport, Point
from recollect.report.rows import Row
from recollect.report.table import table
from recollect.report.units import bytes_text, percent_text

__all__ = ["Plan"]

M = TypeVar("M", bound=nn.Module)

_FORMAT = 3


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(PlannedStep):
    """What is kept, recomputed and offloaded in a training step, for its peak to obey a budget.

    Made by `recollect.plan`. Not to be changed. ``str()`` of it is a table.

    Attributes:
        budget: Bytes that the step may allocate at most.
        predicted_peak: Bytes that it will.
        predicted_time: Seconds that it will take.
        plain_peak: Bytes without a plan.
        plain_time: Seconds without a plan.
        bound_time: A lower bound on the step time of any plan within the budget, in seconds.
        alternatives: Other schedules for the same step, from the quickest to the one of least peak:
            for steps that are not the planned one.
        measured_peak: Bytes that steps under the plan took; None where it could not be run.
        measured_time: Seconds that one took; None where it could not be run.
        measured_plain_time: Seconds that plain steps took, in turn with those; None where they
            could not be run.
        spread: By how much times may be off, as a fraction: samples of the same work differed so.
        holds_output: Whether the loop is assumed to hold the output of the model through backward.
        output_bytes: How much of it was held in the steps that were measured.
    """

    plain_time: float
    bound_time: float
    model: str
    picture: PlanReport
    spread: float = 0.0
    holds_output: bool = True

    @property
    def gap(self) -> float:
        """How far the predicted time is above its lower bound, as a fraction of it."""
        if not self.bound_time:
            return 0.0
        return max(0.0, self.predicted_time / self.bound_time - 1)

    # --- use --------------------------------------------------------------------------------------

    def apply(self, model: M) -> M:
        """Have ``model`` run by this plan from now on. Returns the same object.

        Its class name, parameters, ``state_dict`` and hooks stay as they are.
        """
        self._check(model)
        wrap_module(model, Runner(self))
        try:
            wrap_blocks(model, self.schedule.blocks)
        except ValueError:
            unwrap_module(model)
            raise
        return model

    def remove(self, model: M) -> M:
        """Have ``model`` run as it did before `apply`."""
        runner = vars(model).get(OPTIONS)
        if not isinstance(runner, Runner) or runner.plan != self:
            which = "another plan" if isinstance(runner, Runner) else "no plan"
            raise ValueError(
                f"model: {which} is applied to this {type(model).__name__}, so this one cannot be "
                "removed"
            )
        unwrap_module(model)
        return model

    @contextmanager
    def applied(self, model: M) -> Iterator[M]:
        """A context in which ``model`` runs by this plan."""
        self.apply(model)
        try:
            yield model
        finally:
            self.remove(model)

    def _check(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model should be an nn.Module, but got {type(model).__name__}")
        if isinstance(vars(model).get(OPTIONS), Runner):
            raise ValueError(
                f"model: a plan is applied to this {type(model).__name__} already; "
                "plan.remove(model) it first"
            )
        if is_compiled(model):
            raise ValueError(
                "model: it is compiled, and a compiler does not go by a plan. Leave torch.compile "
                "out, or apply the plan to the model that it was made from: the compiler then "
                "leaves its forward as it is"
            )
        how = other_model(self.state, model)
        if how is not None:
            raise ValueError(
                f"model: this plan is for another model, {self.model}: of the "
                f"{type(model).__name__} given, {how}. Make a plan for it: "
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
        return table(self.picture)

    def explain(self) -> tuple[Row, ...]:
        """What becomes of the results of each op, in the order of forward."""
        return self.picture.rows

    def to_html(self, path: str | Path) -> None:
        """Write a page that shows the plan, for any browser, in one file."""
        Path(path).write_text(page(self.picture), encoding="utf-8")

    # --- files ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # The basis refers to ops and code, which pickle may not take.
        names = {each.name for each in fields(self)}
        return {**{k: v for k, v in vars(self).items() if k in names}, "basis": None}

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON."""
        bare = replace(self, basis=None, schedule=NamedSchedule(), alternatives=())
        content = {
            "format": _FORMAT,
            **asdict(bare),
            "schedule": self.schedule.to_json(),
            "alternatives": [each.to_json() for each in self.alternatives],
        }
        del content["basis"]
        Path(path).write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that was saved. Whether it is for a model is checked when it is applied."""
        try:
            return cls(**_from_json(json.loads(Path(path).read_text(encoding="utf-8"))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"path: {path} is no plan that this version of recollect can read ({error}). "
                "Make it again: recollect.plan(...).save(path)"
            ) from error


def _from_json(content: dict[str, Any]) -> dict[str, Any]:
    if content.pop("format") != _FORMAT:
        raise ValueError("another version of recollect wrote it")
    content = {name: _tuples(value) for name, value in content.items()}
    footprint = Footprint(
        **{**content["footprint"], "tally": Tally(**content["footprint"]["tally"])}
    )
    picture = content["picture"]
    return {
        **content,
        "schedule": NamedSchedule(**content["schedule"], alike=footprint.alike),
        "alternatives": tuple(
            NamedSchedule(**each, alike=footprint.alike) for each in content["alternatives"]
        ),
        "state": ModelState(**content["state"]),
        "footprint": footprint,
        "picture": PlanReport(
            **{
                **picture,
                "rows": tuple(Row(**row) for row in picture["rows"]),
                "points": tuple(Point(**point) for point in picture["points"]),
            }
        ),
    }


def _tuples(value: Any) -> Any:
    """Lists as the tuples that they were."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
