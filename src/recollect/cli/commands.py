"""The commands of ``recollect``, and their exit codes.

A wrong argument is one sentence on stderr. A traceback means a fault in code: in the user's
function, or in recollect.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import recollect
from recollect.checks.place import hide_own_frames
from recollect.cli.demo import demo
from recollect.cli.doctor import doctor
from recollect.cli.screen import Status, UsageError, say
from recollect.cli.target import Target, is_config, load_config_target, load_target, make_optimizer
from recollect.errors import InfeasibleBudget
from recollect.planning.plan import Plan
from recollect.planning.recording.batch import split_batch
from recollect.planning.sizes.largest_batch import MOST
from recollect.report.compare import Comparison
from recollect.report.page import HasPage
from recollect.report.rows import Row, sums_of
from recollect.report.table import rows_table

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130

#: How errors about arguments begin that recollect raises.
_ARGUMENT = re.compile(r"(model|batch|make_batch|loss|optimizer|budget|offload|path)\b")


class _Result(NamedTuple):
    text: str
    figures: dict[str, Any]  #: for ``--json``
    shown: HasPage
    plan: Plan | None = None  #: for ``--save``, which writes the figures if there is none


def run(arguments: Namespace) -> int:
    """Run the command that was parsed. Returns the exit code."""
    try:
        result = _COMMANDS[arguments.command](arguments)
        return result if isinstance(result, int) else _show(result, arguments)
    except UsageError as error:
        code, text = _USAGE, str(error)
    except InfeasibleBudget as error:
        code, text = _FAILED, f"{error}\nThe least that works:  --budget {error.least}"
    except Exception as error:
        if not _names_an_argument(error):
            hide_own_frames(error)
            raise
        code, text = _FAILED, str(error)
    except KeyboardInterrupt:
        code, text = _INTERRUPTED, "stopped"
    sys.stderr.write(f"recollect {arguments.command}: error: {text}\n")  # as argparse does
    return code


def _names_an_argument(error: Exception) -> bool:
    """Whether recollect itself raised ``error``, about an argument."""
    if not isinstance(error, (TypeError, ValueError, RuntimeError)):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = str(frame.f_globals.get("__name__")).startswith("recollect.")
    return is_ours and _ARGUMENT.match(str(error)) is not None


# --- commands -------------------------------------------------------------------------------------


def _plan(arguments: Namespace) -> _Result:
    with Status(arguments.quiet) as status:
        plan = _frontier_of(arguments, status).plan_for(arguments.budget)
    return _Result(str(plan), _plan_figures(plan), plan, plan)


def _frontier(arguments: Namespace) -> _Result:
    with Status(arguments.quiet) as status:
        frontier = _frontier_of(arguments, status)
        report, points = frontier.report, [asdict(point) for point in frontier.points]
        figures = {"model": report.title, "device": report.device, "least": frontier.least}
        figures |= {**_named(report, "plain_peak plain_time"), "points": points}
        return _Result(str(frontier), figures, frontier)


def _frontier_of(arguments: Namespace, status: Status) -> recollect.Frontier:
    target = _target(arguments)
    options = _options(arguments, target, status)
    return recollect.frontier(target.model, target.batch, **options)


def _options(arguments: Namespace, target: Target, status: Status) -> dict[str, Any]:
    return {
        "loss": target.loss,
        "optimizer": target.optimizer,
        "offload": False if arguments.no_offload else "auto",
        "holds_output": not arguments.frees_output,
        "progress": status,
    }


def _target(arguments: Namespace) -> Target:
    if is_config(arguments.target):
        return load_config_target(arguments)
    for name in ("set", "batch", "dtype"):
        if getattr(arguments, name):
            is_function = ":" in arguments.target
            raise UsageError(
                f"--{name} is for a config of transformers, such as transformers:LlamaConfig, and "
                f"not for {arguments.target}"
                + (
                    ", whose function makes the model and the batch"
                    if is_function
                    else ". Name the class of the model's config, and its values with --set"
                )
            )
    target = load_target(arguments.target)
    if arguments.optimizer is None:
        return target
    if target.optimizer is not None:
        raise UsageError(
            f"--optimizer: {arguments.target} returns an optimizer already, a "
            f"{type(target.optimizer).__name__}. Leave --optimizer out, or change the function"
        )
    return target._replace(optimizer=make_optimizer(arguments.optimizer, target.model))


def _largest(arguments: Namespace) -> _Result:
    if is_config(arguments.target):
        raise UsageError(
            f"MODULE:FUNCTION: {arguments.target} is a config, and does not say how batches grow. "
            "Write a function that makes the model on the meta device, and batches of any size:  "
            "def build(): return model, make_batch"
        )
    target = load_target(arguments.target, "make_batch")
    with Status(arguments.quiet) as status:
        found = recollect.largest_batch(
            target.model,
            target.batch,
            arguments.budget,
            time=arguments.time,
            multiple_of=arguments.multiple_of,
            most=arguments.most or MOST,
            **_options(arguments, target, status),
        )
    points, plan = [asdict(point) for point in found.points], _plan_figures(found.plan)
    figures = {**_named(found, _LARGEST_FIGURES), "points": points, "plan": plan}
    return _Result(str(found), figures, found, found.plan)


def _explain(arguments: Namespace) -> _Result:
    if arguments.target.endswith(".json"):
        plan = _load(arguments.target, "PLAN.json")
        rows = plan.explain()
        text = f"{plan}\n\n{rows_table([[row] for row in rows])}\n\nMade with {plan.origin}"
        return _Result(text, _plan_figures(plan, rows), plan)
    target = _target(arguments)
    args, kwargs = split_batch(target.batch, target.model)
    found = recollect.explain(target.model, *args, **kwargs)
    figures = {**_named(found, _HELD_FIGURES), "rows": [*map(_row, found.rows)]}
    return _Result(str(found), figures, found)


def _compare(arguments: Namespace) -> _Result:
    paths = arguments.first, arguments.second
    first, second = (_load(path, name) for path, name in zip(paths, ("A", "B"), strict=True))
    stems = (Path(paths[0]).stem, Path(paths[1]).stem)
    compared = Comparison(first.report, second.report, stems if stems[0] != stems[1] else paths)
    changes = [asdict(change) for change in compared.changes]
    figures = {"first": _plan_figures(first), "second": _plan_figures(second), "changes": changes}
    return _Result(str(compared), figures, compared)


_COMMANDS: dict[str, Callable[[Namespace], _Result | int]] = {
    "plan": _plan,
    "frontier": _frontier,
    "largest": _largest,
    "explain": _explain,
    "compare": _compare,
    "demo": lambda arguments: demo(arguments.html, arguments.steps),
    "doctor": lambda _: doctor(),
}


def _load(path: str, name: str) -> Plan:
    try:
        return Plan.load(path)
    except (OSError, ValueError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        what = f"there is no file {path}" if is_missing else f"{path} is not a saved plan"
        raise UsageError(
            f"{name}: {what}. Write one:  "
            "recollect plan MODULE:FUNCTION --budget ... --save plan.json"
        ) from error


def _show(result: _Result, arguments: Namespace) -> int:
    """Print the result, and write the files that were named."""
    tell = (lambda _: None) if arguments.json or arguments.quiet else say
    if arguments.json:
        say(json.dumps(result.figures, indent=1), plain=True)
    tell(result.text)
    save = getattr(arguments, "save", None)
    if save is not None and result.plan is not None:
        result.plan.save(save)
        tell(f"\nThe plan is in {save}")
    elif save is not None:
        save.write_text(json.dumps(result.figures, indent=1), encoding="utf-8")
        tell(f"\nThe points are in {save}")
    if arguments.html is not None:
        result.shown.to_html(arguments.html)
        tell(f"\nThe page is in {arguments.html}")
    return 0


# --- what --json prints: bytes and seconds, by the names of the Python interface -----------------

_PLAN_FIGURES = (
    "model budget predicted_peak measured_peak plain_peak predicted_time measured_time plain_time "
    "measured_plain_time bound_time gap spread"
)
_LARGEST_FIGURES = (
    "size plain_size budget time time_per_sample plain_time_per_sample samples_per_second slowdown "
    "limited_by device"
)
_HELD_FIGURES = "held_bytes offloaded_bytes recomputed_bytes regions remarks"


def _named(thing: Any, names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names.split()}


def _plan_figures(plan: recollect.Plan, rows: Sequence[Row] = ()) -> dict[str, Any]:
    """The figures of a plan, and the rows that are given."""
    sums = sums_of(plan.explain())
    return {
        **_named(plan, _PLAN_FIGURES),
        "device": plan.report.device,
        "kept_bytes": sums["kept"].bytes,
        "recomputed_bytes": sums["recomputed"].bytes,
        "offloaded_bytes": sums["offloaded"].bytes,
        "peak_parts": dict(plan.report.parts),
        "notes": plan.report.notes,
        "origin": asdict(plan.origin),
        **({"rows": [*map(_row, rows)]} if rows else {}),
    }


def _row(row: Row) -> dict[str, Any]:
    dtype = None if row.dtype is None else str(row.dtype).removeprefix("torch.")
    return {**asdict(row), "dtype": dtype}
