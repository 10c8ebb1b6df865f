"""How much Python a checkpoint runs: exact, and the same at every run.

Calls of Python functions, calls of C functions and bytecodes per block, of the steps that
`overhead.py` times. Between the kernels of a GPU caches are cold, so each of them counts.

    python benchmarks/counts.py [MODE ...] [--functions]
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from _modes import MODES, PLAIN, run_blocks
from _table import table
from overhead import DEPTH, Bench

TOKENS = 32
USUAL = (PLAIN, "recollect.checkpoint", "policy, ops", "replay, nothing kept", "replay, ops")

#: By the function that runs: how much of one kind it runs.
Counts = Counter[CodeType]


def calls(run: Callable[[], Any], event: str) -> Counts:
    """Count what `sys.setprofile` reports as `event` while `run` runs."""
    found: Counts = Counter()

    def note(frame: FrameType, what: str, _: Any) -> None:
        if what == event:
            found[frame.f_code] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def bytecodes(run: Callable[[], Any]) -> Counts:
    """Count the bytecodes that run while `run` runs."""
    found: Counts = Counter()

    def step(frame: FrameType, what: str, _: Any) -> Any:
        if what == "opcode":
            found[frame.f_code] += 1
        return step

    def enter(frame: FrameType, *_: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(None)
    return found


def count(bench: Bench, name: str) -> list[Counts]:
    """Count a step of a mode: calls of Python functions, calls of C functions, bytecodes."""

    def step() -> None:
        run_blocks(MODES[name], bench.blocks, bench.x).backward(bench.grad)

    for _ in range(4):  # recorded, and checked until nothing is new
        bench.gradients_of(MODES[name])
    gc.disable()
    try:
        return [calls(step, "call"), calls(step, "c_call"), bytecodes(step)]
    finally:
        gc.enable()


def row(name: str, numbers: list[int]) -> list[str]:
    """Lay out numbers of a step, per block."""
    return [name, *(f"{number / DEPTH:,.0f}" for number in numbers)]


def place(code: CodeType) -> str:
    """Name a function, and where it is."""
    return f"{code.co_name} {Path(code.co_filename).name}:{code.co_firstlineno}"


def main() -> None:
    """Count a step in each mode, and print the tables."""
    parser = argparse.ArgumentParser(description="Count what Python a checkpoint runs, per block.")
    parser.add_argument("modes", nargs="*", default=USUAL, help=f"of {', '.join(MODES)}")
    parser.add_argument("--functions", action="store_true", help="by function, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(TOKENS)
    header = ["", "Python calls", "C calls", "bytecodes"]
    found = {name: count(bench, name) for name in arguments.modes}
    print(table(header, [row(name, [each.total() for each in found[name]]) for name in found]))
    for name in found if arguments.functions else ():
        codes = sorted(found[name][-1], key=lambda code: -found[name][-1][code])
        rows = [row(place(code), [each[code] for each in found[name]]) for code in codes]
        print(f"\n{name}", table(header, rows), sep="\n")


if __name__ == "__main__":
    main()
