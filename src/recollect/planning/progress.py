"""Shows what is being done while a plan is made, and the plan in a line: ``progress=``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from recollect.planning.plan import Plan
from recollect.report.units import bytes_text

_log = logging.getLogger("recollect")
#: From which part of the plain step on what the engine costs is worth a word.
_MUCH = 0.15
_WITHOUT_PYTHON = (
    "the step is many small ops, and Python decides how long it takes. "
    'torch.compile(model, backend="recollect"), given to fit, runs the same ops without it: see '
    '"Steps of many small operations" in docs/guide/compile.md'
)
#: Called with the work that is being done, and the fraction of it that is.
Progress = Callable[[str, float], None]


def silent(_what: str, _done: float) -> None:
    """Report nothing."""


def reporter(progress: bool | Progress | None) -> Progress:
    """The function to call with the current stage and the fraction done."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise TypeError(
            "progress should be True, False or a function of a text (the current stage) and a "
            f"number (the fraction done), but got {progress!r}"
        )
    if callable(progress):
        return progress
    if not progress:
        return silent
    try:
        tqdm = import_module("tqdm.auto").tqdm
    except ImportError:
        return _Lines()
    return _Bar(tqdm)


def tell_plan(plan: Plan, took: float, progress: Progress) -> None:
    """Say in a line what a plan does, once it is made: in the log, and where progress is shown.

    ``took``: the seconds that it took to plan.
    """
    slower = plan.predicted_time / plan.plain_time - 1 if plan.plain_time else 0.0
    peaks = f"{bytes_text(plan.plain_peak)} -> {bytes_text(plan.predicted_peak)}"
    text = f"{peaks}, step {100 * slower:+.0f}%, {took:.1f} s to plan"
    if plan.plain_peak <= min(plan.budget, plan.predicted_peak):
        plain, budget = bytes_text(plan.plain_peak), bytes_text(plan.budget)
        text = f"the plain step takes {plain}, within the budget of {budget}: it runs plain"
    if plan.rivals:
        text += f"; {1 + len(plan.rivals)} ways to do so take turns at first, and the fastest stays"
    _log.info("recollect: %s", text)
    if _is_for_python(plan, slower):
        _log.info("recollect: %s", _WITHOUT_PYTHON)
    if progress is not silent:
        progress(text, 1.0)


def _is_for_python(plan: Plan, slower: float) -> bool:
    """Whether much of what a plan adds is the engine, which compiled code does without."""
    graph = plan.graph
    if graph is None or graph.units:
        return False
    return min(slower, graph.engine_cost / (plan.plain_time or 1.0)) > _MUCH


class _Lines:
    def __init__(self) -> None:
        self._last = ""

    def __call__(self, what: str, _: float) -> None:
        if what != self._last:
            self._last = what
            print(f"recollect: {what}", file=sys.stderr)  # noqa: T201 - it was asked for


class _Bar:
    """A bar for each stage, which disappears when the next one begins, or with this object."""

    _FORMAT = "{desc} {percentage:3.0f}%|{bar}| {elapsed}"

    def __init__(self, tqdm: Any) -> None:
        self._tqdm = tqdm
        self._last = ""
        self._bar: Any = None

    def __call__(self, what: str, done: float) -> None:
        if what != self._last:
            self._close()
            self._last = what
            if done >= 1.0:  # a result, which stays
                print(f"recollect: {what}", file=sys.stderr)  # noqa: T201 - it was asked for
                return
            self._bar = self._tqdm(
                desc=f"recollect: {what}", total=1.0, leave=False, bar_format=self._FORMAT
            )
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __del__(self) -> None:
        self._close()
