"""Kept tensors in the memory of the host: what it costs, and what it saves.

A decoder whose blocks keep a GPU busy long enough for the copies to hide behind them, in every way
at once: plain, checkpointed, selective, and the latter two with part of what is kept on the host.
Takes about three minutes on an H200, and 40 GiB of host memory for `save_on_cpu`.

    PYTHONPATH=src python3 benchmarks/offload.py [--rounds N] [--modes TEXT ...]
        [--in-flight MIB ...] [--depth N] [--width N] [--batch N] [--tokens N] [--small]
        [--json PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _decoder import decoder
from _measure import (
    Spread,
    bitwise_equal,
    clear_gradients,
    deterministic,
    gradients,
    interleaved,
    largest_difference,
    steadied,
)
from _modes import MODES, PLAIN, Mode, run_blocks
from _table import Progress, table
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import recollect
import recollect.store.host as default_store
from recollect import policy
from recollect.store import HostStore, host_store

MIB, GIB = 2**20, 2**30
HEAD = 128  # the width of an attention head
CHECKPOINT, SELECTIVE = "recollect.checkpoint", "selective"

COLUMNS = ["", "x plain", "step ms", "quartiles", "held GiB", "at rest", "peak GiB", "on host"]

# How much longer a step may take with offload than without it, and what the model of this
# benchmark may need at most with the most offload.
TIME_LIMIT, PEAK_LIMIT = 1.02, 12.5
ROUNDING = MIB  # what the allocator may round up


@dataclass(frozen=True)
class Config:
    """A decoder and its input. The defaults are those that the targets are about."""

    depth: int = 12
    width: int = 4096
    batch: int = 4
    tokens: int = 4096

    @property
    def heads(self) -> int:
        """The number of attention heads."""
        return max(1, self.width // HEAD)

    def __str__(self) -> str:
        shape = f"{self.depth} blocks, width {self.width}, {self.heads} heads"
        return f"{shape}, {self.batch} x {self.tokens} tokens"


SMALL = Config(depth=3, width=256, batch=2, tokens=32)


# --- the ways of running all blocks ---------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way of running all blocks. `base` names the row that differs in the offload only."""

    run: Callable[[nn.ModuleList, Tensor], Tensor]
    base: str | None = None
    in_flight: int | None = None  # bytes; None: as the store has it by default
    moves_inputs: bool = False
    moves_most: bool = False
    slow: bool = False  # timed in few rounds, beside plain


def every(mode: Mode) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    """Run every block as `mode` does."""
    return lambda blocks, x: run_blocks(mode, blocks, x)


def run_with_inputs_offloaded(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Checkpoint every block, and hold its input on the host."""
    for block in blocks:
        x = recollect.checkpoint(block, x, offload_inputs=True)
    return x


def selective(offloaded: int = 0) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    """Keep products and attention; of the first blocks, what the MLP needs on the host."""
    kept = policy.matmuls() | policy.attention()
    moved = policy.offload_modules("gate", "up") | kept

    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for number, block in enumerate(blocks):
            x = recollect.checkpoint(block, x, policy=moved if number < offloaded else kept)
        return x

    return run


def run_saving_on_cpu(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Run plainly, with all that autograd saves on the host: torch's own offload."""
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return run_blocks(MODES[PLAIN], blocks, x)


def run_remat(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Checkpoint every block with torch_remat, which few machines have."""
    import torch_remat  # noqa: PLC0415 - optional

    for number, block in enumerate(blocks):
        x = torch_remat.checkpoint(region_name=f"blocks.{number}")(block)(x)
    return x


def all_ways(depth: int, in_flight: Sequence[int | None]) -> dict[str, Way]:
    """Return the rows by name. Those with offload are there once for each of `in_flight`."""
    half, most = depth // 2, depth - 1
    moved_inputs = Way(run_with_inputs_offloaded, CHECKPOINT, moves_inputs=True)
    moved_half = Way(selective(half), SELECTIVE)
    moved_most = Way(selective(most), SELECTIVE, moves_most=True)
    ways = {
        PLAIN: Way(every(MODES[PLAIN])),
        "torch checkpoint": Way(every(MODES["torch non-reentrant"])),
        CHECKPOINT: Way(every(MODES["recollect.checkpoint"])),
        **_for_each(in_flight, f"{CHECKPOINT}, inputs offloaded", moved_inputs),
        "torch selective": Way(every(MODES["torch selective, function"])),
        SELECTIVE: Way(selective()),
        **_for_each(in_flight, f"{SELECTIVE}, MLP of {half} offloaded", moved_half),
        **_for_each(in_flight, f"{SELECTIVE}, MLP of {most} offloaded", moved_most),
    }
    if importlib.util.find_spec("torch_remat"):
        ways["torch_remat"] = Way(run_remat)
    ways["save_on_cpu"] = Way(run_saving_on_cpu, slow=True)
    return ways


def _for_each(in_flight: Sequence[int | None], name: str, way: Way) -> dict[str, Way]:
    """Return `way` with each of the bounds, which is in the name if there are several."""
    if len(in_flight) == 1:
        return {name: dataclasses.replace(way, in_flight=in_flight[0])}
    return {
        f"{name}, {(size or 0) // MIB} MiB": dataclasses.replace(way, in_flight=size)
        for size in in_flight
    }


def chosen(ways: Mapping[str, Way], texts: Sequence[str]) -> dict[str, Way]:
    """Return the rows whose name has one of `texts` in it, and those they are compared with."""
    if not texts:
        return dict(ways)
    named = {name for name in ways if any(text in name for text in texts)}
    wanted = {PLAIN} | named | {ways[name].base for name in named}
    return {name: way for name, way in ways.items() if name in wanted}


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one step took: seconds, and bytes of the device over what was allocated before it."""

    seconds: float
    held: int  # when forward has returned; copies may be under way
    peak: int


@dataclass(frozen=True)
class Row:
    """What was measured of one way."""

    seconds: Spread
    x_plain: float
    held: int
    peak: int
    at_rest: int  # held after forward when all copies are done
    on_host: int  # bytes of kept tensors in the host store then
    bitwise: bool
    difference: float  # of gradients, relative to the largest element


class Bench:
    """A model, and a training step of it in every way."""

    def __init__(self, config: Config) -> None:
        self.config = config
        cuda = torch.cuda.is_available()
        device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
        self.blocks = decoder(config.depth, config.width, config.heads, device=device, dtype=dtype)
        shape = (config.batch, config.tokens, config.width)
        self.x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        self.grad = torch.randn(shape, device=device, dtype=dtype)
        self._stores: dict[int | None, HostStore] = {}

    def step(self, way: Way) -> Step:
        """Go forward and backward once, from an idle device to an idle device."""
        with self._ready(way) as before:
            start = time.perf_counter()
            y = way.run(self.blocks, self.x)
            held = torch.cuda.memory_allocated()  # the host's own count: no need to wait
            y.backward(self.grad)
            synchronize()
            seconds = time.perf_counter() - start
            return Step(seconds, held - before, torch.cuda.max_memory_allocated() - before)

    def at_rest(self, way: Way) -> tuple[int, int]:
        """Return the bytes held on device and host after forward, all copies being done."""
        with self._ready(way) as before:
            y = way.run(self.blocks, self.x)
            synchronize()
            host_store().prefetch([])  # it looks which copies are done
            held, on_host = torch.cuda.memory_allocated() - before, host_store().held_bytes
            y.backward(self.grad)
        return held, on_host

    def gradients_of(self, way: Way) -> list[Tensor]:
        """Return what one step of `way` gives."""
        with self._ready(way):
            way.run(self.blocks, self.x).backward(self.grad)
        found = gradients(self.blocks, self.x)
        clear_gradients(self.blocks, self.x)
        return found

    def sampler(self, way: Way) -> Callable[[], Step]:
        """Return a function that measures one step of `way`."""
        return lambda: self.step(way)

    @contextlib.contextmanager
    def _ready(self, way: Way) -> Iterator[int]:
        """Yield the bytes that are allocated before a step of `way`."""
        self._use_store(way.in_flight)
        clear_gradients(self.blocks, self.x)
        synchronize()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        yield torch.cuda.memory_allocated()

    def _use_store(self, in_flight: int | None) -> None:
        """Make the store with that bound the one of the process."""
        if in_flight not in self._stores:
            options = {} if in_flight is None else {"in_flight": in_flight}
            self._stores[in_flight] = HostStore(**options)
        default_store._default = self._stores[in_flight]


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(bench: Bench, ways: Mapping[str, Way], rounds: int, slow_rounds: int) -> dict[str, Row]:
    """Time all ways side by side, the slow ones in few rounds, and look at memory and gradients."""
    timed = _timed(bench, {name: way for name, way in ways.items() if not way.slow}, rounds)
    slow = {name: way for name, way in ways.items() if way.slow}
    if slow:
        beside_plain = _timed(bench, {PLAIN: ways[PLAIN], **slow}, slow_rounds)
        timed.update({name: beside_plain[name] for name in slow})
    # Last, when the store has all the memory it needs and no copy is slowed by pinning any.
    rests = {name: bench.at_rest(way) for name, way in ways.items()}
    compared = _compared(bench, ways)
    return {name: Row(*timed[name], *rests[name], *compared[name]) for name in ways}


def _timed(
    bench: Bench, ways: Mapping[str, Way], rounds: int
) -> dict[str, tuple[Spread, float, int, int]]:
    """Return the first four fields of each `Row`."""
    samplers = {name: bench.sampler(way) for name, way in ways.items()}
    steps = interleaved(samplers, rounds, warmup=2, progress=Progress("round", rounds))
    seconds = steadied({name: [step.seconds for step in of] for name, of in steps.items()})
    plain = statistics.median(seconds[PLAIN])
    return {
        name: (
            Spread.of(seconds[name]),
            statistics.median(seconds[name]) / plain,
            int(statistics.median(step.held for step in of)),
            int(statistics.median(step.peak for step in of)),
        )
        for name, of in steps.items()
    }


def _compared(bench: Bench, ways: Mapping[str, Way]) -> dict[str, tuple[bool, float]]:
    """Compare the gradients of each way with plain's; for plain, with those of a second run."""
    compared = {}
    with deterministic():
        plain = bench.gradients_of(ways[PLAIN])
        for name, way in ways.items():
            found = bench.gradients_of(way)
            compared[name] = (bitwise_equal(found, plain), largest_difference(found, plain))
    return compared


# --- reports --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The most that `what` of a row may be, and what it was."""

    name: str
    what: str
    limit: float
    measured: float

    @property
    def met(self) -> bool:
        """Whether it was no more."""
        return self.measured <= self.limit


def targets(rows: Mapping[str, Row], ways: Mapping[str, Way], bench: Bench) -> list[Target]:
    """Return the targets of all rows that were measured together with their base."""
    found = []
    for name, row in rows.items():
        way = ways[name]
        base = None if way.base is None else rows.get(way.base)
        if base is None:
            continue
        ratio = row.seconds.median / base.seconds.median
        found.append(Target(name, f"time / {way.base}", TIME_LIMIT, ratio))
        if way.moves_inputs:
            # The input of the first block is a leaf, which is there anyway.
            inputs = (bench.config.depth - 1) * bench.x.nbytes
            limit = (base.at_rest - inputs + ROUNDING) / GIB
            found.append(Target(name, "at rest GiB, less the inputs", limit, row.at_rest / GIB))
        if way.moves_most and bench.config == Config():
            found.append(Target(name, "peak GiB", PEAK_LIMIT, row.peak / GIB))
    return found


def report(rows: Mapping[str, Row]) -> str:
    """Lay out one row per way. On a CPU there are no bytes to report."""
    return table([*COLUMNS, "gradients"], [_cells(name, row) for name, row in rows.items()])


def _cells(name: str, row: Row) -> list[str]:
    memory = (row.held, row.at_rest, row.peak, row.on_host)
    return [
        name,
        f"{row.x_plain:.3f}",
        f"{row.seconds.median * 1e3:.2f}",
        f"{row.seconds.low * 1e3:.2f}..{row.seconds.high * 1e3:.2f}",
        *(f"{size / GIB:.3f}" if torch.cuda.is_available() else "" for size in memory),
        "bitwise equal" if row.bitwise else f"off by {row.difference:.1e}",
    ]


def report_targets(found: Sequence[Target]) -> str:
    """Say of each target whether this run met it."""
    rows = [
        [
            target.name,
            target.what,
            f"<= {target.limit:.3f}",
            f"{target.measured:.3f}",
            "met" if target.met else "not met",
        ]
        for target in found
    ]
    return table(["", "", "target", "measured", ""], rows)


def as_json(
    config: Config, rows: Mapping[str, Row], ways: Mapping[str, Way], found: Sequence[Target]
) -> dict[str, object]:
    """Return everything that was measured, for comparison with other runs."""
    return {
        "device": _device(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "config": dataclasses.asdict(config),
        "modes": {
            name: {"in_flight": ways[name].in_flight, **dataclasses.asdict(row)}
            for name, row in rows.items()
        },
        "targets": [{**dataclasses.asdict(target), "met": target.met} for target in found],
    }


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


# --- the command ----------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure offload to the memory of the host.")
    parser.add_argument("--rounds", type=int, default=10, help="samples of each mode (%(default)s)")
    parser.add_argument(
        "--slow-rounds", type=int, default=3, help="samples of save_on_cpu (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds, for a first look")
    parser.add_argument("--small", action="store_true", help="tiny shapes; needs no GPU")
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=int, help=f"{field.default}")
    parser.add_argument(
        "--modes", nargs="+", default=[], metavar="TEXT", help="only rows with a TEXT in the name"
    )
    parser.add_argument(
        "--in-flight",
        nargs="+",
        type=int,
        metavar="MIB",
        help="HostStore(in_flight=...): of several, each gets its rows",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.slow_rounds = 3, 2
    if min(arguments.rounds, arguments.slow_rounds) < 2:
        parser.error("--rounds and --slow-rounds must be at least 2")
    return arguments


def _config(arguments: argparse.Namespace) -> Config:
    """Return the small or the usual shape, with what the arguments change."""
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Config)}
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(SMALL if arguments.small else Config(), **changes)


def main() -> None:
    """Measure every way and print the tables."""
    arguments = _arguments()
    cuda = torch.cuda.is_available()
    if not cuda and not arguments.small:
        raise SystemExit("This needs a CUDA device, and there is none. --small runs without one.")
    if not cuda:
        torch.set_num_threads(1)
    config = _config(arguments)
    in_flight = [size * MIB for size in arguments.in_flight] if arguments.in_flight else [None]
    ways = chosen(all_ways(config.depth, in_flight), arguments.modes)
    bench = Bench(config)
    rows = measure(bench, ways, arguments.rounds, arguments.slow_rounds)
    found = targets(rows, ways, bench) if cuda else []

    print(f"{config}, {str(bench.x.dtype).removeprefix('torch.')}, forward and backward")
    print(f"{_device()}, torch {torch.__version__}; interleaved, medians of {arguments.rounds}\n")
    print(report(rows))
    if found:
        print(f"\n{report_targets(found)}")
    if not cuda:
        print("\nThere is no CUDA device: nothing is offloaded, and no target applies.")
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(config, rows, ways, found), indent=2) + "\n")


if __name__ == "__main__":
    main()
