"""How many instructions a checkpoint adds: the same at every run, whatever else the machine does.

The steps that `overhead.py` times, on one CPU thread under callgrind, each mode minus plain. Needs
valgrind and a C compiler. `--profile` writes a file for callgrind_annotate for each mode.

    python benchmarks/instructions.py [MODE ...] [--steps N] [--profile FOLDER]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from _measure import clear_gradients
from _modes import FLOOR, MODES, PLAIN
from _table import table
from overhead import DEPTH, Bench

TOKENS = 32

#: Functions that tell callgrind what to count.
_SWITCHES = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void toggle(void) { CALLGRIND_TOGGLE_COLLECT; }
void dump(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
"""


def count_here(name: str, steps: int, switches: ctypes.CDLL) -> None:
    """Run steps of a mode; for callgrind, which this process runs under."""
    torch.set_num_threads(1)
    bench = Bench(TOKENS)
    for _ in range(4):  # recorded, and checked until nothing is new
        bench.gradients_of(MODES[name])
    gc.collect()
    gc.disable()
    switches.start()
    for count in range(steps + 1):
        clear_gradients(bench.blocks, bench.x)
        if count > 0:  # after one that is not counted
            switches.toggle()
        bench.step(MODES[name])
        if count > 0:
            switches.toggle()
    switches.dump(name.encode())


def count_each(modes: list[str], steps: int, switches: ctypes.CDLL) -> None:
    """Count each mode in a process of its own, so that no other has left traces in memory."""
    for name in modes:
        if os.fork() == 0:
            count_here(name, steps, switches)
            os._exit(0)
        os.wait()


def count(modes: list[str], steps: int, folder: Path) -> dict[str, float]:
    """Return the instructions per block of each mode, counted by processes under callgrind."""
    source, library = folder / "switches.c", folder / "switches.so"
    source.write_text(_SWITCHES)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    callgrind = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
    script = [sys.executable, __file__, *modes, f"--steps={steps}", f"--switches={library}"]
    # Addresses and hashes are the same every time, so that dictionaries are laid out alike.
    subprocess.run(
        ["setarch", "-R", *callgrind, f"--callgrind-out-file={folder}/counts.%p", *script],
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
    )
    return read_counts(folder, steps)


def read_counts(folder: Path, steps: int) -> dict[str, float]:
    """Read what callgrind wrote, and name the files by mode."""
    found = {}
    for path in folder.glob("counts.*"):
        text = path.read_text()
        name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
        total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
        if name and total:
            found[name[1]] = int(total[1]) / steps / DEPTH
            path.rename(folder / f"{name[1].replace(' ', '_')}.callgrind")
    return found


def report(found: Mapping[str, float]) -> str:
    """Lay out one row per mode."""

    def added(name: str) -> float:
        return found[name] - found[PLAIN]

    def over(name: str, base: str | None) -> str:
        has_both = base in found and name not in (PLAIN, base)
        return f"{added(name) / added(base):.3f}" if base and has_both else ""

    rows = [
        [
            name,
            f"{found[name] / 1e3:,.0f}",
            f"{added(name) / 1e3:,.0f}",
            over(name, FLOOR),
            over(name, MODES[name].rival),
        ]
        for name in MODES
        if name in found
    ]
    return table(["", "thousands/block", "added", "x floor's", "x torch's"], rows)


def main() -> None:
    """Count a few steps of each mode, and print the table."""
    parser = argparse.ArgumentParser(description="Count the instructions that a checkpoint adds.")
    parser.add_argument("modes", nargs="*", default=[*MODES], help=f"of {', '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=5, help="steps of each mode (%(default)s)")
    parser.add_argument("--profile", type=Path, help="a folder for what callgrind writes")
    parser.add_argument("--switches", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.switches is not None:
        count_each(arguments.modes, arguments.steps, ctypes.CDLL(arguments.switches))
        return
    modes = [*dict.fromkeys((PLAIN, *arguments.modes))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.profile or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(report(count(modes, arguments.steps, folder)))


if __name__ == "__main__":
    main()
