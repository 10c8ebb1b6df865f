"""The commands and options of ``recollect``."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from recollect import __version__
from recollect.cli import commands
from recollect.cli.demo import demo
from recollect.cli.doctor import doctor
from recollect.planning.budget import check_budget

__all__ = ["make_parser"]

_TARGET = """\
MODULE is a file or a dotted name that can be imported from here. FUNCTION takes no arguments, and
returns the parts of a training step:

    def build():
        return model, batch            # of a batch, a tuple is *args and a dict is **kwargs

    def build():
        return dict(model=model, batch=batch, loss=loss, optimizer=optimizer)
"""

_PLAN = f"""\
{_TARGET}
A budget is what the step may allocate at most, with parameters, gradients and optimizer state:
12GiB, 8GB, a number of bytes, a fraction of what the plain step takes (0.5), or auto: what the
device has.

examples:
  recollect plan train.py:build --budget 12GiB
  recollect plan package.train:build --budget 0.5 --html plan.html --save plan.json

A saved plan is used with  recollect.Plan.load("plan.json").apply(model)
"""

_FRONTIER = f"""\
{_TARGET}
examples:
  recollect frontier train.py:build
  recollect frontier package.train:build --html frontier.html
"""

_EXPLAIN = f"""\
{_TARGET}
examples:
  recollect explain train.py:build    what one forward holds until backward, and why
  recollect explain plan.json         what a plan does that `recollect plan --save` has written
"""

_ALL = """\
examples:
  recollect demo                      see what it does, in half a minute
  recollect plan train.py:build --budget 12GiB
  recollect frontier train.py:build --html frontier.html

`recollect COMMAND --help` says more.
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="recollect",
        description="Fit the training step of a PyTorch model into less memory.",
        epilog=_ALL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"recollect {__version__}")
    several = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_plan(several)
    _add_frontier(several)
    _add_explain(several)
    _add_demo(several)
    what = "check that recollect works on this machine"
    _add(several, "doctor", what).set_defaults(run=lambda _: doctor())
    return parser


def _add(several: Any, name: str, what: str, more: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = several.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_plan(several: Any) -> None:
    parser = _add(several, "plan", "plan a training step for a budget of memory", _PLAN)
    _add_step_options(parser)
    budgets = "such as 12GiB, 8GB, 0.5 or auto"
    parser.add_argument("--budget", type=_budget, required=True, help=budgets)
    what = "write the plan, for recollect.Plan.load"
    parser.add_argument("--save", type=_output, metavar="FILE", help=what)
    parser.set_defaults(run=commands.plan)


def _add_frontier(several: Any) -> None:
    what = "show all trade-offs of memory for time that there are"
    parser = _add(several, "frontier", what, _FRONTIER)
    _add_step_options(parser)
    parser.set_defaults(run=commands.frontier)


def _add_explain(several: Any) -> None:
    what = "show what a forward holds and why, or what a saved plan does"
    parser = _add(several, "explain", what, _EXPLAIN)
    examples = "such as train.py:build or plan.json"
    parser.add_argument("target", metavar="MODULE:FUNCTION|PLAN.json", help=examples)
    parser.set_defaults(run=commands.explain)


def _add_demo(several: Any) -> None:
    what = "train a small transformer within three budgets, and compare"
    parser = _add(several, "demo", what)
    _add_html(parser)
    parser.add_argument("--steps", type=int, metavar="N", help="training steps, 10 by default")
    parser.set_defaults(run=lambda arguments: demo(arguments.html, arguments.steps))


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    """The options of commands that plan a training step."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="such as train.py:build")
    _add_html(parser)
    what = "hold nothing in the memory of the host"
    parser.add_argument("--no-offload", action="store_true", help=what)
    what = (
        "the training loop frees the model's output before backward, as the Trainer of "
        "transformers does: holds_output=False"
    )
    parser.add_argument("--frees-output", action="store_true", help=what)


def _add_html(parser: argparse.ArgumentParser) -> None:
    what = "write a page to open in a browser"
    parser.add_argument("--html", type=_output, metavar="FILE", help=what)


# --- values ---------------------------------------------------------------------------------------


def _budget(text: str) -> float | str:
    budget: float | str = text
    for number in (float, int):
        with suppress(ValueError):
            budget = number(text)
    try:
        check_budget(budget)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return budget


def _output(text: str) -> Path:
    """A file that can be written, as far as can be told: planning may take minutes."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {path.parent} to write {path.name} into: "
            f"make it, with  mkdir -p {path.parent}"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file that can be")
    return path
