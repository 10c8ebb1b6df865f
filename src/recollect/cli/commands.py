"""What the commands of ``recollect`` do, and their exit codes.

A mistake in what a user passed is one sentence on stderr. A traceback means a fault in code: in the
user's function, or in recollect.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import recollect
from recollect.cli.demo import demo
from recollect.cli.doctor import doctor
from recollect.cli.figures import (
    comparison_figures,
    explanation_figures,
    frontier_figures,
    largest_figures,
    plan_figures,
)
from recollect.cli.from_config import is_config, load_config_target
from recollect.cli.screen import Status, UsageError, say
from recollect.cli.target import Target, load_sized_target, load_target
from recollect.errors import InfeasibleBudget
from recollect.planning.plan import Plan
from recollect.planning.recording.batch import split_batch
from recollect.planning.sizes.largest_batch import MOST
from recollect.report.compare import Comparison
from recollect.report.table import rows_table

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130

#: How errors begin that recollect raises for what a user has passed.
_ARGUMENT = re.compile(r"(model|batch|make_batch|loss|optimizer|budget|offload|path)\b")


def run(arguments: Namespace) -> int:
    """Run the command that was parsed. Returns the exit code."""
    try:
        return _COMMANDS[arguments.command](arguments)
    except UsageError as error:
        code, text = _USAGE, str(error)
    except InfeasibleBudget as error:
        code, text = _FAILED, f"{error}\nThe least that works:  --budget {error.least}"
    except ValueError as error:
        if not _names_an_argument(error):
            raise
        code, text = _FAILED, str(error)
    except KeyboardInterrupt:
        code, text = _INTERRUPTED, "stopped"
    sys.stderr.write(f"recollect {arguments.command}: error: {text}\n")  # as argparse does
    return code


def _names_an_argument(error: ValueError) -> bool:
    """Whether recollect raised ``error`` for what it was given, and not a function it called."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = str(frame.f_globals.get("__name__")).startswith("recollect.")
    return is_ours and _ARGUMENT.match(str(error)) is not None


# --- commands -------------------------------------------------------------------------------------


def _plan(arguments: Namespace) -> int:
    """Print the plan for a budget, and write the files that were named."""
    with Status(arguments.quiet) as status:
        plan = _frontier_of(arguments, status).plan_for(arguments.budget)
    _print(arguments, lambda: str(plan), lambda: plan_figures(plan))
    _save(plan, arguments)
    _write_page(plan, arguments)
    return 0


def _frontier(arguments: Namespace) -> int:
    """Print all trade-offs."""
    with Status(arguments.quiet) as status:
        frontier = _frontier_of(arguments, status)
        text, figures = str(frontier), frontier_figures(frontier)
    _print(arguments, lambda: text, lambda: figures)
    if arguments.save is not None:
        arguments.save.write_text(json.dumps(figures, indent=1), encoding="utf-8")
        _tell(arguments, f"\nThe points are in {arguments.save}")
    _write_page(frontier, arguments)
    return 0


def _frontier_of(arguments: Namespace, status: Status) -> recollect.Frontier:
    target = _target(arguments)
    return recollect.frontier(
        target.model,
        target.batch,
        loss=target.loss,
        optimizer=target.optimizer,
        offload=False if arguments.no_offload else "auto",
        holds_output=not arguments.frees_output,
        progress=status,
    )


def _target(arguments: Namespace) -> Target:
    if is_config(arguments.target):
        return load_config_target(arguments)
    for name, value in (("set", arguments.set), ("batch", arguments.batch)):
        if value:
            raise UsageError(
                f"--{name} is for a config of transformers, such as transformers:LlamaConfig, and "
                f"not for {arguments.target}, whose function makes the model and the batch"
            )
    return load_target(arguments.target)


def _largest(arguments: Namespace) -> int:
    """Print the largest batch for which a plan fits, and the sizes that were tried."""
    target = load_sized_target(arguments.target)
    with Status(arguments.quiet) as status:
        found = recollect.largest_batch(
            target.model,
            target.make_batch,
            arguments.budget,
            time=arguments.time,
            loss=target.loss,
            optimizer=target.optimizer,
            offload=False if arguments.no_offload else "auto",
            holds_output=not arguments.frees_output,
            multiple_of=arguments.multiple_of,
            most=arguments.most or MOST,
            progress=status,
        )
    _print(arguments, lambda: str(found), lambda: largest_figures(found))
    _save(found.plan, arguments)
    _write_page(found, arguments)
    return 0


def _explain(arguments: Namespace) -> int:
    """Print what a forward holds, or what a saved plan does."""
    if arguments.target.endswith(".json"):
        plan = _load(arguments.target, "PLAN.json")
        rows = plan.explain()
        text = f"{plan}\n\n{rows_table([[row] for row in rows])}\n\nMade with {plan.origin}"
        _print(arguments, lambda: text, lambda: plan_figures(plan, rows))
        _write_page(plan, arguments)
        return 0
    target = _target(arguments)
    args, kwargs = split_batch(target.batch, target.model)
    found = recollect.explain(target.model, *args, **kwargs)
    _print(arguments, lambda: str(found), lambda: explanation_figures(found))
    _write_page(found, arguments)
    return 0


def _compare(arguments: Namespace) -> int:
    """Print two plans side by side."""
    paths = arguments.first, arguments.second
    first, second = (_load(path, name) for path, name in zip(paths, ("A", "B"), strict=True))
    stems = (Path(paths[0]).stem, Path(paths[1]).stem)
    compared = Comparison(first.report, second.report, stems if stems[0] != stems[1] else paths)
    _print(arguments, lambda: str(compared), lambda: comparison_figures(compared, first, second))
    _write_page(compared, arguments)
    return 0


_COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "plan": _plan,
    "frontier": _frontier,
    "largest": _largest,
    "explain": _explain,
    "compare": _compare,
    "demo": lambda arguments: demo(arguments.html, arguments.steps),
    "doctor": lambda _: doctor(),
}


# --- what they print and write --------------------------------------------------------------------


class _HasPage(Protocol):
    def to_html(self, path: str | Path) -> None: ...


def _load(path: str, name: str) -> Plan:
    if not Path(path).is_file():
        raise UsageError(
            f"{name}: there is no file {path}. Write one:  "
            f"recollect plan MODULE:FUNCTION --budget ... --save {path}"
        )
    return Plan.load(path)


def _print(
    arguments: Namespace, text: Callable[[], str], figures: Callable[[], dict[str, Any]]
) -> None:
    if arguments.json:
        say(json.dumps(figures(), indent=1), plain=True)
    else:
        _tell(arguments, text())


def _tell(arguments: Namespace, text: str) -> None:
    """Write for a person, unless what is printed is for a program, or nothing at all."""
    if not (arguments.quiet or arguments.json):
        say(text)


def _save(plan: Plan, arguments: Namespace) -> None:
    if arguments.save is not None:
        plan.save(arguments.save)
        _tell(arguments, f"\nThe plan is in {arguments.save}")


def _write_page(shown: _HasPage, arguments: Namespace) -> None:
    if arguments.html is not None:
        shown.to_html(arguments.html)
        _tell(arguments, f"\nThe page is in {arguments.html}")
