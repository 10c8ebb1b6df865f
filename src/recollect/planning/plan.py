"""A plan: what becomes of every value of a model's step, and what that comes to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from recollect._torch.modules import is_compiled
from recollect.graph.graph import Tally
from recollect.modules import OPTIONS, unwrap_module, wrap_module
from recollect.planning.batch import tensors_of_batch
from recollect.planning.blocks import wrap_blocks
from recollect.planning.choices import Choices
from recollect.planning.conditions import Conditions
from recollect.planning.footprint import Footprint
from recollect.planning.identity import Identity, difference, identity_of
from recollect.planning.replan import Basis, replanned
from recollect.planning.runner import Runner
from recollect.replay.planned_ops import Decisions
from recollect.report.page import page
from recollect.report.plan_report import PlanReport, Point
from recollect.report.rows import Row
from recollect.report.table import table

__all__ = ["Plan"]

M = TypeVar("M", bound=nn.Module)

_FORMAT = 3


@dataclass(frozen=True)
class Plan:
    """What is kept, recomputed and offloaded in a training step, for its peak to obey a budget.

    Made by `recollect.plan`. Not to be changed. ``str()`` of it is a table.

    Attributes:
        budget: Bytes that the step may allocate at most.
        predicted_peak: Bytes that it will.
        predicted_time: Seconds that it will take.
        plain_peak: Bytes without a plan.
        plain_time: Seconds without a plan.
        bound_time: Seconds that no plan of this budget can be below.
        alternatives: Other choices for the same step, from the quickest to the one of least peak:
            for steps that are not the one planned for.
        measured_peak: Bytes that steps under the plan took; None where it could not be run.
        measured_time: Seconds that one took; None where it could not be run.
        measured_plain_time: Seconds that plain steps took, in turn with those; None where they
            could not be run.
        spread: By how much times may be off, as a fraction: samples of the same work differed so.
        holds_output: Whether the output of the model is taken to be held through backward.
        output_bytes: How much of it was, in the steps that were measured.
    """

    budget: int
    predicted_peak: int
    predicted_time: float
    plain_peak: int
    plain_time: float
    bound_time: float
    choices: Choices
    base: int
    signature: tuple[Any, ...]
    model: str
    identity: Identity
    picture: PlanReport
    conditions: Conditions
    footprint: Footprint
    alternatives: tuple[Choices, ...] = field(default=(), repr=False)
    basis: Basis | None = field(default=None, repr=False, compare=False)
    measured_peak: int | None = None
    measured_time: float | None = None
    measured_plain_time: float | None = None
    spread: float = 0.0
    holds_output: bool = True
    output_bytes: int | None = None

    @property
    def gap(self) -> float:
        """How far the predicted time is above what no plan can be below, as a fraction of it."""
        if not self.bound_time:
            return 0.0
        return max(0.0, self.predicted_time / self.bound_time - 1)

    @cached_property
    def decisions(self) -> Decisions:
        """What the engine goes by."""
        return self.choices.decisions(self.footprint.alike)

    @property
    def least_decisions(self) -> Decisions:
        """What the engine goes by where nothing is known of a step: the least peak of all."""
        return self.decisions_for(self.alternatives[-1] if self.alternatives else self.choices)

    def decisions_for(self, choices: Choices) -> Decisions:
        """The decisions for one of the alternatives; always the same, as recordings know them."""
        known = self._decisions.get(choices)
        if known is None:
            known = (
                self.decisions
                if choices == self.choices
                else choices.decisions(self.footprint.alike)
            )
            self._decisions[choices] = known
        return known

    @cached_property
    def _decisions(self) -> dict[Choices, Decisions]:
        return {}

    # --- use --------------------------------------------------------------------------------------

    def apply(self, model: M) -> M:
        """Have ``model`` run by this plan from now on. Returns the same object.

        Its class name, parameters, ``state_dict`` and hooks stay as they are.
        """
        self._check(model)
        wrap_module(model, Runner(self))
        try:
            wrap_blocks(model, self.choices.blocks)
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
                "out, or apply the plan to the model that it was made from, of which the compiler "
                "then leaves forward as it is"
            )
        how = difference(self.identity, identity_of(model))
        if how is not None:
            raise ValueError(
                f"model: this plan is for another model, {self.model}: of the "
                f"{type(model).__name__} given, {how}. Make a plan for it: "
                "recollect.plan(model, batch, budget)"
            )

    def for_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """The plan for a batch of another shape: the quickest choices of this one that fit.

        Raises `CannotPredict` if it cannot be told what the batch takes.
        """
        options = dict.fromkeys((self.choices, *self.alternatives))
        other = replanned(self.basis, self.budget, options, tensors_of_batch(args, kwargs))
        tally = other.tally or self.footprint.tally
        plan = replace(
            self,
            choices=other.choices,
            footprint=replace(self.footprint, tally=tally),
            predicted_peak=other.peak,
            predicted_time=other.seconds,
            plain_peak=other.plain_peak,
            measured_peak=None,  # which were of another batch
            measured_time=None,
            measured_plain_time=None,
        )
        plan.__dict__["decisions"] = self.decisions_for(other.choices)
        return plan

    # --- show -------------------------------------------------------------------------------------

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
        # The step leads to code and ops, which need not be such as can be pickled.
        names = {each.name for each in fields(self)}
        return {**{k: v for k, v in vars(self).items() if k in names}, "basis": None}

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON."""
        content = {"format": _FORMAT, **asdict(replace(self, basis=None))}
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
                "Make it anew: recollect.plan(...).save(path)"
            ) from error


def _from_json(content: dict[str, Any]) -> dict[str, Any]:
    if content.pop("format") != _FORMAT:
        raise ValueError("another version of recollect wrote it")
    picture = content["picture"]
    return {
        **content,
        "choices": _choices(content["choices"]),
        "alternatives": tuple(map(_choices, content["alternatives"])),
        "signature": _tuples(content["signature"]),
        "identity": _tuples(content["identity"]),
        "conditions": Conditions(**_tupled(content["conditions"])),
        "footprint": _footprint(**content["footprint"]),
        "picture": PlanReport(
            **{
                **picture,
                "before": _tuples(picture["before"]),
                "after": _tuples(picture["after"]),
                "rows": tuple(Row(**row) for row in picture["rows"]),
                "points": tuple(Point(**point) for point in picture["points"]),
                "parts": _tuples(picture["parts"]),
                "notes": tuple(picture["notes"]),
            }
        ),
    }


def _choices(content: dict[str, Any]) -> Choices:
    return Choices(**_tupled(content))


def _footprint(tally: dict[str, Any], factors: list[float], counts: list[Any]) -> Footprint:
    return Footprint(Tally(**_tupled(tally)), tuple(factors), _tuples(counts))


def _tupled(content: dict[str, Any]) -> dict[str, Any]:
    return {name: _tuples(value) for name, value in content.items()}


def _tuples(value: Any) -> Any:
    """Lists as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
