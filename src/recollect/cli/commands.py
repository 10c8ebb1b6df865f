"""The commands of ``recollect``: their options, what they do, and exit codes.

A mistake in what a user passed is one sentence on stderr. A traceback means a fault in code: in the
user's function, or in recollect.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import recollect
from recollect.cli.demo import demo
from recollect.cli.doctor import doctor
from recollect.cli.screen import Status, UsageError, say
from recollect.cli.target import load_sized_target, load_target
from recollect.errors import InfeasibleBudget
from recollect.planning.api import Frontier
from recollect.planning.batch import split_batch
from recollect.planning.budget import check_budget
from recollect.planning.largest_batch import MOST, check_bytes, check_count, check_time
from recollect.planning.plan import Plan
from recollect.planning.planner import Planner
from recollect.report.table import rows_table

__all__ = ["main"]

_T = TypeVar("_T")

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130

#: How errors begin that recollect raises for what a user has passed.
_ARGUMENT = re.compile(r"(model|batch|make_batch|loss|optimizer|budget|offload|path)\b")

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

_LARGEST = """\
MODULE is a file or a dotted name that can be imported from here. FUNCTION takes no arguments, and
returns a model, and a function that makes a batch of a given size:

    def build():
        return model, lambda n: torch.randn(n, 64)

    def build():
        return dict(model=model, make_batch=make_batch, loss=loss, optimizer=optimizer)

A size is whatever make_batch makes of it: a number of samples, or the length of sequences.

examples:
  recollect largest train.py:build --budget 12GiB
  recollect largest train.py:build --budget auto --time 1.2 --multiple-of 8 --html largest.html
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
  recollect largest train.py:build --budget 12GiB --time 1.2

`recollect COMMAND --help` says more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default the one of this process. Returns the exit code."""
    parser = _make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return _USAGE
    try:
        return int(arguments.run(arguments))
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
    with Status() as status:
        plan = _frontier_of(arguments, status).plan_for(arguments.budget)
    say(str(plan))
    _save(plan, arguments)
    _write_page(plan, arguments)
    return 0


def _frontier(arguments: Namespace) -> int:
    """Print all trade-offs."""
    with Status() as status:
        frontier = _frontier_of(arguments, status)
        text = str(frontier)
    say(text)
    _write_page(frontier, arguments)
    return 0


def _frontier_of(arguments: Namespace, status: Status) -> Frontier:
    target = load_target(arguments.target)
    planner = Planner.of(
        target.model,
        target.batch,
        loss=target.loss,
        optimizer=target.optimizer,
        offload=False if arguments.no_offload else "auto",
        progress=status,
        holds_output=not arguments.frees_output,
    )
    return Frontier(planner)


def _largest(arguments: Namespace) -> int:
    """Print the largest batch for which a plan fits, and the sizes that were tried."""
    target = load_sized_target(arguments.target)
    with Status() as status:
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
            most=arguments.most,
            progress=status,
        )
    say(str(found))
    _save(found.plan, arguments)
    _write_page(found, arguments)
    return 0


def _save(plan: Plan, arguments: Namespace) -> None:
    if arguments.save is not None:
        plan.save(arguments.save)
        say(f"\nThe plan is in {arguments.save}")


def _write_page(shown: Plan | Frontier | recollect.LargestBatch, arguments: Namespace) -> None:
    if arguments.html is not None:
        shown.to_html(arguments.html)
        say(f"\nThe page is in {arguments.html}")


def _explain(arguments: Namespace) -> int:
    """Print what a forward holds, or what a saved plan does."""
    path = arguments.target
    if path.endswith(".json"):
        if not Path(path).is_file():
            raise UsageError(
                f"PLAN.json: there is no file {path}. Write one:  "
                f"recollect plan MODULE:FUNCTION --budget ... --save {path}"
            )
        plan = Plan.load(path)
        say(f"{plan}\n\n{rows_table([[row] for row in plan.explain()])}")
    else:
        target = load_target(path)
        args, kwargs = split_batch(target.batch, target.model)
        say(str(recollect.explain(target.model, *args, **kwargs)))
    return 0


# --- options --------------------------------------------------------------------------------------


def _make_parser() -> ArgumentParser:
    main_parser = ArgumentParser(
        prog="recollect",
        description="Fit the training step of a PyTorch model into less memory.",
        epilog=_ALL,
        formatter_class=RawDescriptionHelpFormatter,
    )
    version = f"recollect {recollect.__version__}"
    main_parser.add_argument("--version", action="version", version=version)
    several = main_parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def add(
        name: str,
        run: Callable[[Namespace], int],
        what: str,
        more: str = "",
        parents: Sequence[ArgumentParser] = (),
    ) -> ArgumentParser:
        parser: ArgumentParser = several.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=more,
            formatter_class=RawDescriptionHelpFormatter,
            parents=parents,
        )
        parser.set_defaults(run=run)
        return parser

    page, step = _page_options(), _step_options()
    parser = add("plan", _plan, "plan a training step for a budget of memory", _PLAN, [step])
    budgets = "such as 12GiB, 8GB, 0.5 or auto"
    parser.add_argument("--budget", type=_budget, required=True, help=budgets)
    _add_save(parser)

    what = "show all trade-offs of memory for time that there are"
    add("frontier", _frontier, what, _FRONTIER, [step])

    what = "find the largest batch for which a plan fits into a budget of memory"
    parser = add("largest", _largest, what, _LARGEST, [step])
    _add_largest_options(parser)

    what = "show what a forward holds and why, or what a saved plan does"
    parser = add("explain", _explain, what, _EXPLAIN)
    examples = "such as train.py:build or plan.json"
    parser.add_argument("target", metavar="MODULE:FUNCTION|PLAN.json", help=examples)

    what = "train a small transformer within three budgets, and compare"
    parser = add("demo", lambda given: demo(given.html, given.steps), what, parents=[page])
    parser.add_argument("--steps", type=int, metavar="N", help="training steps, 10 by default")

    add("doctor", lambda _: doctor(), "check that recollect works on this machine")
    return main_parser


def _add_save(parser: ArgumentParser) -> None:
    what = "write the plan, for recollect.Plan.load"
    parser.add_argument("--save", type=_output, metavar="FILE", help=what)


def _add_largest_options(parser: ArgumentParser) -> None:
    budgets = "such as 12GiB, 8GB or auto"
    parser.add_argument("--budget", type=_bytes, required=True, help=budgets)
    what = "how many times plain's time per sample a sample may take, such as 1.2"
    parser.add_argument("--time", type=_checked(float, check_time), metavar="TIMES", help=what)
    count = _checked(int, check_count)
    what = "consider only multiples of it"
    parser.add_argument("--multiple-of", type=count, default=1, metavar="N", help=what)
    what = f"the largest size to consider, {MOST} by default"
    parser.add_argument("--most", type=count, default=MOST, metavar="N", help=what)
    _add_save(parser)


def _page_options() -> ArgumentParser:
    parser = ArgumentParser(add_help=False)
    what = "write a page to open in a browser"
    parser.add_argument("--html", type=_output, metavar="FILE", help=what)
    return parser


def _step_options() -> ArgumentParser:
    """The options of commands that plan a training step."""
    parser = ArgumentParser(add_help=False, parents=[_page_options()])
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="such as train.py:build")
    what = "hold nothing in the memory of the host"
    parser.add_argument("--no-offload", action="store_true", help=what)
    what = (
        "the training loop frees the model's output before backward, as the Trainer of "
        "transformers does: holds_output=False"
    )
    parser.add_argument("--frees-output", action="store_true", help=what)
    return parser


def _budget(text: str) -> float | str:
    budget: float | str = text
    for number in (float, int):
        with suppress(ValueError):
            budget = number(text)
    return _accepted(budget, check_budget)


def _bytes(text: str) -> float | str:
    return _accepted(_budget(text), check_bytes)


def _checked(kind: type[_T], check: Callable[[_T], None]) -> Callable[[str], _T]:
    """Reads an option as a number that ``check`` accepts."""

    def read(text: str) -> _T:
        return _accepted(kind(text), check)  # type: ignore[call-arg]

    read.__name__ = kind.__name__  # which argparse calls an invalid value by
    return read


def _accepted(value: _T, check: Callable[[_T], None]) -> _T:
    try:
        check(value)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    return value


def _output(text: str) -> Path:
    """A file that can be written. Checked before planning, which may take minutes."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ArgumentTypeError(
            f"there is no folder {path.parent} to write {path.name} into: "
            f"make it, with  mkdir -p {path.parent}"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text} cannot be written: name a file that can be")
    return path
