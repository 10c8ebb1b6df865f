"""What a checkpoint costs beyond running the block again.

Blocks so small that the time goes into launching ops, not into arithmetic, forward and backward on
one CPU thread: any bookkeeping shows here first. "Added" is a mode's time less plain's, and what
the floor adds is the least that rerunning can cost.

    python benchmarks/overhead.py [--rounds N] [--tokens N] [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _decoder import decoder
from _measure import (
    Spread,
    bitwise_equal,
    clear_gradients,
    gradients,
    interleaved,
    microseconds,
    steadied,
)
from _modes import FLOOR, MODES, PLAIN, Mode, run_blocks
from _table import Progress, table
from torch import Tensor

DEPTH, WIDTH, HEADS, BATCH = 4, 64, 4, 2

# A ratio is worked out over each of so many parts of the run too: how far they differ is its noise.
PARTS = 5

TIME_COLUMNS = ["us/block", "quartiles", "x plain", "added us"]
COLUMNS = ["", *TIME_COLUMNS, "added / floor's", "added / torch's", "gradients"]


@dataclass(frozen=True)
class Target:
    """The most that `mode` may add, as a multiple of what `base` adds."""

    mode: str
    base: str
    limit: float


TARGETS = (
    Target("recollect.checkpoint", FLOOR, 1.4),
    Target("recollect.checkpoint", "torch non-reentrant", 0.55),
    Target("compat non-reentrant", FLOOR, 1.4),
    Target("compat non-reentrant", "torch non-reentrant", 0.55),
    Target("selective, function", "torch selective, function", 0.55),
    Target("selective, op list", "torch selective, op list", 0.55),
    Target("compat reentrant", "torch reentrant", 1.0),
    Target("policy, modules", "policy, ops", 1.05),
    Target("policy, names", "policy, ops", 1.05),
    Target("replay, nothing kept", "torch non-reentrant", 1.0),
    Target("replay, ops", "torch selective, function", 0.33),
    Target("replay, recording", "torch selective, function", 0.8),
)


@dataclass(frozen=True)
class Ratio:
    """One added cost over another: of the whole run, and the least and the most of any part."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}..{self.high:.2f}]"


class Bench:
    """The model, its input, and a training step of it in every mode."""

    def __init__(self, tokens: int) -> None:
        self.blocks = decoder(DEPTH, WIDTH, HEADS)
        self.x = torch.randn(BATCH, tokens, WIDTH, requires_grad=True)
        self.grad = torch.randn(BATCH, tokens, WIDTH)

    def step(self, mode: Mode) -> None:
        """Go forward and backward once. The gradient is given: no loss adds to the time."""
        run_blocks(mode, self.blocks, self.x).backward(self.grad)

    def gradients_of(self, mode: Mode) -> list[Tensor]:
        """Return what one step of `mode` gives."""
        clear_gradients(self.blocks, self.x)
        self.step(mode)
        return gradients(self.blocks, self.x)

    def sampler(self, mode: Mode) -> Callable[[], float]:
        """Return a function that times one step of `mode`, in microseconds per block."""

        def sample() -> float:
            clear_gradients(self.blocks, self.x)
            return microseconds(lambda: self.step(mode)) / DEPTH

        return sample


Samples = Mapping[str, Sequence[float]]


def added(samples: Samples, mode: str) -> float:
    """Return the microseconds per block that `mode` adds to plain."""
    return statistics.median(samples[mode]) - statistics.median(samples[PLAIN])


def ratio(samples: Samples, mode: str, base: str) -> Ratio:
    """Return what `mode` adds over what `base` adds."""
    by_part = [added(part, mode) / added(part, base) for part in _parts(samples)]
    return Ratio(added(samples, mode) / added(samples, base), min(by_part), max(by_part))


def _parts(samples: Samples) -> Iterator[Samples]:
    """Cut the run into `PARTS` stretches of rounds."""
    edges = [len(samples[PLAIN]) * part // PARTS for part in range(PARTS + 1)]
    for start, end in itertools.pairwise(edges):
        yield {name: values[start:end] for name, values in samples.items()}


def report(samples: Samples, equal: Mapping[str, bool]) -> str:
    """Lay out one row per mode."""
    return table(COLUMNS, [_row(name, samples, equal[name]) for name in samples])


def _row(name: str, samples: Samples, equal: bool) -> list[str]:
    spread, rival = Spread.of(samples[name]), MODES[name].rival
    return [
        name,
        f"{spread.median:.1f}",
        f"{spread.low:.1f}..{spread.high:.1f}",
        f"{spread.median / statistics.median(samples[PLAIN]):.2f}",
        "" if name == PLAIN else f"{added(samples, name):.1f}",
        "" if name in (PLAIN, FLOOR) else str(ratio(samples, name, FLOOR)),
        "" if rival is None else str(ratio(samples, name, rival)),
        "bitwise equal" if equal else "DIFFERENT",
    ]


def report_targets(samples: Samples) -> str:
    """Say of each target whether this run met it."""
    rows = []
    for target in TARGETS:
        found = ratio(samples, target.mode, target.base)
        verdict = "met" if found.value <= target.limit else "not met"
        rows.append([target.mode, target.base, f"<= {target.limit:.2f}", str(found), verdict])
    return table(["added by", "over added by", "target", "measured", ""], rows)


def as_json(samples: Samples, equal: Mapping[str, bool]) -> dict[str, object]:
    """Return everything that was measured, for comparison with other runs."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rounds": len(samples[PLAIN]),
        "modes": {
            name: {
                "us_per_block": dataclasses.asdict(Spread.of(values)),
                "added_us": added(samples, name),
                "bitwise_equal": equal[name],
            }
            for name, values in samples.items()
        },
        "targets": [
            {
                **dataclasses.asdict(target),
                "measured": dataclasses.asdict(ratio(samples, target.mode, target.base)),
            }
            for target in TARGETS
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure what a checkpoint costs beyond rerunning."
    )
    parser.add_argument(
        "--rounds", type=int, default=300, help="samples of each mode (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=32, help="length of a sequence (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="40 rounds: seconds, for a first look")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 40
    if arguments.rounds < 2 * PARTS:
        parser.error(f"--rounds must be at least {2 * PARTS}")
    return arguments


def main() -> None:
    """Check every mode's gradients, time all of them side by side, and print the tables."""
    arguments = _arguments()
    torch.set_num_threads(1)
    bench = Bench(arguments.tokens)
    plain = bench.gradients_of(MODES[PLAIN])
    equal = {name: bitwise_equal(bench.gradients_of(mode), plain) for name, mode in MODES.items()}
    samplers = {name: bench.sampler(mode) for name, mode in MODES.items()}
    progress = Progress("round", arguments.rounds)
    samples = steadied(interleaved(samplers, arguments.rounds, progress=progress))

    print(f"{DEPTH} decoder blocks, width {WIDTH}, {BATCH} x {arguments.tokens} tokens, float32")
    print(f"CPU, one thread, torch {torch.__version__}; medians of {arguments.rounds} rounds")
    print(f"behind a ratio: its range over {PARTS} parts of the run\n")
    print(report(samples, equal), report_targets(samples), sep="\n\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(samples, equal), indent=2) + "\n")


if __name__ == "__main__":
    main()
