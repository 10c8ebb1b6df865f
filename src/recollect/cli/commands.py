"""The commands that are about a model of the user's."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import recollect
from recollect.cli.screen import Status, UsageError, say
from recollect.cli.target import Target, load_target
from recollect.planning.api import Frontier, planner_of
from recollect.planning.batch import split_batch
from recollect.planning.plan import Plan
from recollect.report.table import rows_table

__all__ = ["explain", "frontier", "plan"]


def plan(arguments: Namespace) -> int:
    """Print the plan for a budget, and write the files that were named."""
    target = load_target(arguments.target)
    with Status() as status:
        found = _frontier(target, status, arguments)
        made = found.plan_for(arguments.budget)
    say(str(made))
    if arguments.save is not None:
        made.save(arguments.save)
        say(f"\nThe plan is in {arguments.save}")
    if arguments.html is not None:
        made.to_html(arguments.html)
        say(f"\nThe page is in {arguments.html}")
    return 0


def frontier(arguments: Namespace) -> int:
    """Print all trade-offs."""
    target = load_target(arguments.target)
    with Status() as status:
        found = _frontier(target, status, arguments)
        text = str(found)
    say(text)
    if arguments.html is not None:
        found.to_html(arguments.html)
        say(f"\nThe page is in {arguments.html}")
    return 0


def explain(arguments: Namespace) -> int:
    """Print what a forward holds, or what a saved plan does."""
    if arguments.target.endswith(".json"):
        saved = _loaded(arguments.target)
        say(f"{saved}\n\n{rows_table([[row] for row in saved.explain()])}")
        return 0
    target = load_target(arguments.target)
    args, kwargs = split_batch(target.batch)
    say(str(recollect.explain(target.model, *args, **kwargs)))
    return 0


def _frontier(target: Target, status: Status, arguments: Namespace) -> Frontier:
    planner = planner_of(
        target.model,
        target.batch,
        status,
        loss=target.loss,
        optimizer=target.optimizer,
        offload=False if arguments.no_offload else "auto",
        holds_output=not arguments.frees_output,
    )
    return Frontier(planner)


def _loaded(path: str) -> Plan:
    if not Path(path).is_file():
        raise UsageError(
            f"PLAN.json: there is no file {path}. Write one:  "
            f"recollect plan MODULE:FUNCTION --budget ... --save {path}"
        )
    return Plan.load(path)
