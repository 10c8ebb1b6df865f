"""The options of ``recollect``, and its help. Imports no torch: help is there at once."""

from __future__ import annotations

import difflib
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from recollect._version import __version__

_T = TypeVar("_T")
#: Adds an option to the parser of a command.
_Add = Callable[[ArgumentParser], Any]
#: Has the checks of `largest`.
_SIZES = "sizes.largest_batch"

_TARGET = """\
MODULE is a file, or a dotted name that can be imported from here. FUNCTION
takes no arguments and returns the parts of a training step:

    def build():
        return model, batch     # a tuple is *args, a dict is **kwargs

    def build():
        return dict(model=model, batch=batch, loss=loss, optimizer=optimizer)

A model of transformers needs no file. It is made on the meta device, without
weights, so that it takes no memory here:

    transformers:LlamaConfig --set hidden_size=2048 --batch 8x2048
"""

_PLAN = f"""\
{_TARGET}
A budget is the most that the step may allocate, with parameters, gradients and
optimizer state: 12GiB, 8GB, a number of bytes, a share of what the plain step
takes (50%, 0.5), or auto: what the device has.

examples:
  recollect plan train.py:build --budget 12GiB
  recollect plan package.train:build --budget 50% --html plan.html
  recollect plan train.py:build --budget 12GiB --save plan.json
  recollect plan transformers:LlamaConfig --set num_hidden_layers=16 \\
      --batch 8x2048 --dtype bfloat16 --optimizer AdamW --budget 24GiB

A saved plan is used with  recollect.Plan.load("plan.json").apply(model)
"""

_FRONTIER = f"""\
{_TARGET}
examples:
  recollect frontier train.py:build
  recollect frontier package.train:build --html frontier.html
  recollect frontier train.py:build --save frontier.json
"""

_LARGEST = """\
MODULE is a file, or a dotted name that can be imported from here. FUNCTION
takes no arguments and returns a model, and a function that makes a batch of a
given size:

    def build():
        return model, lambda n: torch.randn(n, 64)

    def build():
        return dict(model=model, make_batch=make_batch, loss=loss,
                    optimizer=optimizer)

A size is whatever make_batch makes of it: a number of samples, or the length
of sequences.

examples:
  recollect largest train.py:build --budget 12GiB
  recollect largest train.py:build --budget auto --time 1.2 --multiple-of 8
"""

_EXPLAIN = f"""\
{_TARGET}
examples:
  recollect explain train.py:build    what one forward holds, and why
  recollect explain plan.json         what a saved plan does
"""

_COMPARE = """\
examples:
  recollect plan train.py:build --budget 12GiB --save a.json
  recollect plan train.py:build --budget 8GiB --save b.json
  recollect compare a.json b.json --html compared.html
"""

_ALL = """\
examples:
  recollect demo                      see what it does, in half a minute
  recollect plan train.py:build --budget 12GiB
  recollect frontier train.py:build --html frontier.html
  recollect largest train.py:build --budget 12GiB --time 1.2

`recollect COMMAND --help` says more.
"""


def closest(word: str, words: Sequence[str]) -> str:
    """A question that names the closest of ``words``; empty if nothing is close."""
    # Without dashes, which would make any two short options look alike.
    by_lower = {each.lower().lstrip("-"): each for each in words}
    found = difflib.get_close_matches(word.lower().lstrip("-"), by_lower, n=1)
    return f" Did you mean {by_lower[found[0]]}?" if found else ""


class _Parser(ArgumentParser):
    """Asks whether something else was meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=RawDescriptionHelpFormatter, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        args = sys.argv[1:] if args is None else args
        # Before argparse misses a required option that was only misspelt.
        known = [*self._option_string_actions]
        # Those after a command are for its own parser.
        own = takewhile(lambda arg: arg.startswith("-"), args) if self._subparsers else args
        for name in (arg.partition("=")[0] for arg in own if arg.startswith("--")):
            if not any(option.startswith(name) for option in known):
                self.error(f"there is no option {name}.{closest(name, known)}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']+)' \(choose from (.*)\)", message)
        if wrong:
            there = re.findall(r"[\w-]+", wrong[2])
            message = f"there is no command {wrong[1]!r}.{closest(wrong[1], there)}"
            message += f" There are: {', '.join(there)}"
        super().error(message)


def make_parser() -> ArgumentParser:
    """The parser of all commands; ``command`` of what it returns is the name of one."""
    main_parser = _Parser(
        prog="recollect",
        description="Fit the training step of a PyTorch model into less memory.",
        epilog=_ALL,
    )
    main_parser.add_argument("--version", action="version", version=f"recollect {__version__}")
    several: Any = main_parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    options = _options()
    for name, (what, more) in _COMMANDS.items():
        about = f"{what[0].upper()}{what[1:]}."
        parser = several.add_parser(name, help=what, description=about, epilog=more)
        for add in options[name]:
            add(parser)
    return main_parser


# --- the commands and their options ---------------------------------------------------------------


#: By command: what it does, and more help.
_COMMANDS = {
    "plan": ("plan a training step for a memory budget", _PLAN),
    "frontier": ("show every trade-off of memory for time", _FRONTIER),
    "largest": ("find the largest batch that a plan fits into a budget", _LARGEST),
    "explain": ("show what a forward holds and why, or what a saved plan does", _EXPLAIN),
    "compare": ("show two saved plans side by side", _COMPARE),
    "demo": ("train a small transformer within three budgets, and compare", ""),
    "doctor": ("check that recollect works on this machine", ""),
}


def _options() -> dict[str, list[_Add]]:
    """By command: its options."""
    target = _option("target", metavar="MODULE:FUNCTION", help="such as train.py:build")
    either = "such as train.py:build or plan.json"
    explained = _option("target", metavar="MODULE:FUNCTION|PLAN.json", help=either)
    first = _option("first", metavar="A.json", help="a plan that `plan --save` wrote")
    second = _option("second", metavar="B.json", help="another one")
    steps = _option("--steps", type=int, metavar="N", help="training steps, 10 by default")
    page = _option("--html", type=_output, metavar="FILE", help="write a page to open in a browser")
    save = partial(_option, "--save", type=_output, metavar="FILE")
    save_plan = save(help="write the plan, for recollect.Plan.load")
    save_points = save(help="write the points, as --json prints them")
    shown, step = [page, _add_output], [target, *_planning(), _add_config, _optimizer()]
    return {
        "plan": [*step, _budget("budget", "check_budget", ", 50%% or auto"), save_plan, *shown],
        "frontier": [*step, save_points, *shown],
        "largest": [target, *_sizes(), *_planning(), save_plan, *shown],
        "explain": [explained, _add_config, _optimizer(), *shown],
        "compare": [first, second, *shown],
        "demo": [steps, page],
        "doctor": [],
    }


def _option(*names: str, **how: Any) -> _Add:
    return lambda parser: parser.add_argument(*names, **how)


def _budget(module: str, check: str, others: str) -> _Add:
    read, such = _checked(str, module, check), f"such as 12GiB, 8GB{others}"
    return _option("--budget", type=read, required=True, help=such)


def _planning() -> list[_Add]:
    """The options of commands that plan a training step."""
    frees = (
        "the training loop frees the model's output before backward, as the Trainer of "
        "transformers does: holds_output=False"
    )
    return [
        _option("--no-offload", action="store_true", help="offload nothing to the host"),
        _option("--frees-output", action="store_true", help=frees),
    ]


def _sizes() -> list[_Add]:
    count, time = _checked(int, _SIZES, "check_count"), _checked(float, _SIZES, "check_time")
    what = "how many times plain's time a sample may take, such as 1.2"
    multiples = "consider only multiples of it"
    return [
        _budget(_SIZES, "check_bytes", " or auto"),
        _option("--time", type=time, metavar="TIMES", help=what),
        _option("--multiple-of", type=count, default=1, metavar="N", help=multiples),
        _option("--most", type=count, metavar="N", help="the largest size to consider"),
    ]


def _optimizer() -> _Add:
    what = "a class of torch.optim whose state counts, such as AdamW"
    return _option("--optimizer", metavar="NAME", help=what)


def _add_output(parser: ArgumentParser) -> None:
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--json", action="store_true", help="print JSON instead of a table")
    either.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _add_config(parser: ArgumentParser) -> None:
    """What makes a model of transformers from its config."""
    group = parser.add_argument_group("for transformers:SomeConfig")
    what = "a value of the config, such as hidden_size=2048; may be repeated"
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=what)
    what = "sequences and their length, such as 8x2048"
    group.add_argument("--batch", type=_shape, metavar="NxLENGTH", help=what)
    group.add_argument("--dtype", metavar="DTYPE", help="of the parameters, such as bfloat16")


# --- values ---------------------------------------------------------------------------------------


def _checked(kind: Callable[[str], _T], module: str, check: str) -> Callable[[str], _T]:
    """Reads an option as a value that a check of ``recollect.planning`` accepts."""

    def read(text: str) -> _T:
        value = kind(text)
        try:
            getattr(import_module(f"recollect.planning.{module}"), check)(value)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error
        return value

    read.__name__ = kind.__name__  # which argparse calls an invalid value by
    return read


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or "0" in found.groups():
        raise ArgumentTypeError(f"{text!r} should be sequences x length, such as 8x2048")
    return int(found[1]), int(found[2])


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
        raise ArgumentTypeError(f"{text} cannot be written: name another file")
    return path
