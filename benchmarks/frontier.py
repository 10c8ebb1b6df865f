"""Memory against time: plans of recollect at several budgets, and the peers, in one run.

Decoder blocks, forward and backward. Torch's checkpoint of every block and its selective one,
torch_remat where it is installed, and torch.compile with its own memory budget. On a CUDA device
the blocks are large, and bytes are what `torch.cuda.max_memory_allocated` says, over what was
allocated before the step; on the CPU they are small, and bytes are the allocator's own events.

    python benchmarks/frontier.py [--html frontier.html] [--budgets 18.6 12.0 7.3]
        [--parts peers plans torch-compile compiled-plans compiled-plans-no-offload]
        [--json figures.json]

Rows that the file of ``--json`` has are replaced by those that are measured; others stay.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from _decoder import decoder
from _measure import bitwise_equal, clear_gradients, gradients, held_and_peak
from _modes import MODES, run_blocks
from _table import table
from torch import Tensor, nn

import recollect
from recollect.report.page import page
from recollect.report.plan_report import Point

MIB, GIB = 2**20, 2**30
PEERS = {
    "torch checkpoint, every block": "torch non-reentrant",
    "torch selective, products and attention": "torch selective, function",
}
COMPILED_PLANS = {"compiled-plans": "auto", "compiled-plans-no-offload": False}
PARTS = ("peers", "plans", "torch-compile", *COMPILED_PLANS)
#: Of torch.compile: what share of the activations may be saved.
COMPILE_BUDGETS = (1.0, 0.5, 0.3, 0.1)


@dataclass(frozen=True)
class Config:
    """The blocks, their input, the budgets in GiB over what is there before, and the rounds."""

    depth: int
    width: int
    heads: int
    batch: int
    tokens: int
    dtype: torch.dtype
    budgets: tuple[float, ...]
    rounds: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.depth} blocks, width {self.width}, {self.batch} x {self.tokens}, {dtype}"


LARGE = Config(12, 4096, 32, 4, 4096, torch.bfloat16, (18.6, 15.0, 12.0, 9.0, 7.3), 5)
SMALL = Config(8, 256, 4, 4, 128, torch.float32, (), 9)


class Model(nn.Module):
    """Blocks in a row, each run as a peer does it."""

    def __init__(self, config: Config, device: str) -> None:
        super().__init__()
        self.blocks = decoder(
            config.depth, config.width, config.heads, device=device, dtype=config.dtype
        )
        self.run: Callable[[nn.ModuleList, Tensor], Tensor] = _plain

    def forward(self, x: Tensor) -> Tensor:
        """Map batch x tokens x width to the same shape."""
        return self.run(self.blocks, x)


def _plain(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return run_blocks(MODES["plain"], blocks, x)


def _remat(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    import torch_remat  # noqa: PLC0415 - optional

    for number, block in enumerate(blocks):
        x = torch_remat.checkpoint(region_name=f"blocks.{number}")(block)(x)
    return x


def loss_of(y: Tensor) -> Tensor:
    """Something to go backward from."""
    return y.float().square().mean()


@dataclass(frozen=True)
class Way:
    """One way to run the step: a name, what it runs in, the model as called, and the budget."""

    name: str
    around: Callable[[], AbstractContextManager[object]]
    call: Callable[[Tensor], Tensor]
    budget: int | None = None


class Bench:
    """The step, run in every way."""

    def __init__(self, config: Config, device: str) -> None:
        self.config, self.device = config, device
        self.model = Model(config, device)
        shape = (config.batch, config.tokens, config.width)
        self.x = torch.randn(shape, device=device, dtype=config.dtype, requires_grad=True)
        self.plain = Way("plain", nullcontext, self.model)
        self.step(self.plain)
        clear_gradients(self.model, self.x)
        self.base = torch.cuda.memory_allocated() if self.on_cuda else 0

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def step(self, way: Way) -> None:
        """Forward and backward."""
        clear_gradients(self.model, self.x)
        loss = loss_of(way.call(self.x))
        loss.backward()

    def seconds(self, way: Way) -> float:
        """Of one step, from an idle device to an idle device."""
        self._wait()
        start = time.perf_counter()
        self.step(way)
        self._wait()
        return time.perf_counter() - start

    def peak(self, way: Way) -> int:
        """The most that a step allocates over what was there before it."""
        clear_gradients(self.model, self.x)
        if not self.on_cuda:
            return held_and_peak(
                lambda: loss_of(way.call(self.x)), lambda loss: loss.backward()
            ).peak
        torch.cuda.reset_peak_memory_stats()
        self.step(way)
        peak = torch.cuda.max_memory_allocated()
        clear_gradients(self.model, self.x)
        return peak - self.base

    def gradients(self, way: Way) -> list[Tensor]:
        """What a step gives."""
        self.step(way)
        found = gradients(self.model, self.x)
        clear_gradients(self.model, self.x)
        return found

    def _wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    # --- ways -------------------------------------------------------------------------------------

    def peers(self) -> Iterator[Way]:
        """What others do."""
        for name, mode in PEERS.items():
            yield self._peer(name, lambda blocks, x, mode=mode: run_blocks(MODES[mode], blocks, x))
        if importlib.util.find_spec("torch_remat"):
            yield self._peer("torch_remat, every block", _remat)

    def _peer(self, name: str, run: Callable[[nn.ModuleList, Tensor], Tensor]) -> Way:
        @contextmanager
        def around() -> Iterator[None]:
            self.model.run = run
            try:
                yield
            finally:
                self.model.run = _plain

        return Way(name, around, self.model)

    def compiled(self, budget: float) -> Way:
        """torch.compile, with the share of activations that it may save."""
        from torch._functorch import config  # noqa: PLC0415 - slow to import

        with config.patch(activation_memory_budget=budget):
            torch._dynamo.reset()
            model = torch.compile(self.model)
            way = Way(f"torch.compile, budget {budget}", nullcontext, model)
            self.step(way)  # compiles
        return way

    def frontier(self) -> recollect.Frontier:
        """Every trade-off of the plans for the eager model."""
        clear_gradients(self.model, self.x)
        return recollect.frontier(self.model, self.x, loss=loss_of)

    def compiled_plans(self, part: str) -> Iterator[Way]:
        """Our plans for the compiled model. Each compiles, so none is made before its turn."""
        offload = COMPILED_PLANS[part]
        clear_gradients(self.model, self.x)
        torch._dynamo.reset()
        model = torch.compile(self.model)
        frontier = recollect.frontier(model, self.x, loss=loss_of, offload=offload)
        name = "compiled plan" if offload else "no offload, compiled plan"
        yield from self.plans(frontier, model, name)

    def plans(
        self, frontier: recollect.Frontier, model: nn.Module, name: str = "plan"
    ) -> Iterator[Way]:
        """The plans for the budgets, or for five between the least and plain's peak."""
        if self.config.budgets:
            totals = [int(budget * GIB) + self.base for budget in self.config.budgets]
        else:
            low, high = frontier.least, frontier.plain_peak
            totals = [low + (high - low) * n // 5 for n in range(4, -1, -1)]
        for total in totals:
            yield self._plan_for(frontier, model, total, name)

    def _plan_for(
        self, frontier: recollect.Frontier, model: nn.Module, total: int, name: str
    ) -> Way:
        clear_gradients(self.model, self.x)  # a plan counts those that are there
        plan = frontier.plan_for(total)
        over = total - (self.base if self.on_cuda else _static(self.model))
        if (traffic := plan.report.traffic) is not None:
            print(
                f"{name}, {_size(over)}: offloads {_size(traffic.bytes)}, predicted "
                f"{plan.predicted_time / plan.plain_time:.3f} x its plain step, "
                f"waits {traffic.waits:.4f} s",
                file=sys.stderr,
            )
        return Way(f"{name}, {_size(over)}", lambda: plan.applied(model), model, over)


def _static(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.2f} MiB"


@dataclass(frozen=True)
class Result:
    """What a way came to: its peak over the base, seconds relative to plain, right gradients."""

    way: Way
    peak: int
    seconds: float
    ratio: float
    is_right: bool | None


def measure(bench: Bench, ways: Iterable[Way], rounds: int) -> Iterator[Result]:
    """Run every way in turn, each round beside plain, so that a slow machine slows both."""
    reference = None if bench.on_cuda else bench.gradients(bench.plain)
    for way in ways:
        with way.around():
            bench.step(way)
            peak = max(bench.peak(way) for _ in range(2))
            right = None if reference is None else bitwise_equal(bench.gradients(way), reference)
        pairs = []
        for _ in range(rounds):
            plain = bench.seconds(bench.plain)
            with way.around():
                bench.step(way)  # what a change of ways costs is not measured
                pairs.append((plain, bench.seconds(way)))
        ratio = statistics.median(ours / plain for plain, ours in pairs)
        yield Result(way, peak, statistics.median(p[1] for p in pairs), ratio, right)


def row(result: Result) -> list[str]:
    """A line of the table."""
    budget = result.way.budget
    obeys = "" if budget is None else ("yes" if result.peak <= budget else "NO")
    right = {None: "", True: "bitwise", False: "differ"}[result.is_right]
    return [result.way.name, _size(result.peak), obeys, f"{result.ratio:.3f}", right]


def write(path: Path, bench: Bench, result: Result) -> None:
    """Add what was measured to the figures, for the picture."""
    device = torch.cuda.get_device_name() if bench.on_cuda else "CPU"
    config = {**vars(bench.config), "dtype": str(bench.config.dtype)}
    del config["budgets"], config["rounds"]
    version, _, _ = torch.__version__.partition("+")
    figures = {"device": device, "torch": version, "config": config, "rows": []}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if all(before[key] == figures[key] for key in ("device", "torch", "config")):
            figures = before
    row = {
        "name": result.way.name,
        "peak": result.peak,
        "ratio": round(result.ratio, 3),
        "budget": result.way.budget,
    }
    rows = {each["name"]: each for each in figures["rows"]} | {row["name"]: row}
    path.write_text(json.dumps(figures | {"rows": [*rows.values()]}, indent=1), encoding="utf-8")


def draw(path: Path, frontier: recollect.Frontier, results: list[Result], base: int) -> None:
    """Write the page: the frontier with what was measured."""
    report = frontier.report
    points = [point for point in report.points if point.kind in ("plan", "plain")]
    for result in results:
        kind = "chosen" if result.way.budget is not None else "baseline"
        seconds = result.ratio * report.plain_time
        points.append(Point(result.way.name, result.peak + base, seconds, kind))
    path.write_text(page(replace(report, points=tuple(points))), encoding="utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--html", type=Path, default=Path("frontier.html"))
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1])
    parser.add_argument("--budgets", type=float, nargs="*", help="GiB over what is there before")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LARGE if device == "cuda" else SMALL
    config = replace(config, budgets=tuple(options.budgets or config.budgets))
    config = replace(config, rounds=options.rounds or config.rounds)
    bench = Bench(config, device)
    print(f"{config}, {device}; parameters and input, {_size(bench.base)}, come on top\n")
    frontier = bench.frontier() if "plans" in options.parts else None
    results = []
    for result in every_result(bench, frontier, options.parts):
        results.append(result)
        print(*row(result), sep="  ", file=sys.stderr, flush=True)
        if options.json:  # after each: a run that is cut short has measured something
            write(options.json, bench, result)
    print(table(["", "peak", "in budget", "x plain", "gradients"], [*map(row, results)]))
    if frontier is not None:
        base = bench.base if bench.on_cuda else _static(bench.model)
        draw(options.html, frontier, results, base)
        print(f"\nwrote {options.html}")


def every_result(
    bench: Bench, frontier: recollect.Frontier | None, parts: Sequence[str]
) -> Iterator[Result]:
    """Plain, the peers, the plans of ``frontier``; the same compiled."""
    rounds = bench.config.rounds
    peers = bench.peers() if "peers" in parts else ()
    plans = bench.plans(frontier, bench.model) if frontier is not None else ()
    yield from measure(bench, chain([bench.plain], peers, plans), rounds)
    theirs = map(bench.compiled, COMPILE_BUDGETS) if "torch-compile" in parts else ()
    ours = [bench.compiled_plans(part) for part in COMPILED_PLANS if part in parts]
    for ways in (theirs, *ours):
        yield from _compiled(bench, ways)


def _compiled(bench: Bench, ways: Iterable[Way]) -> Iterator[Result]:
    """What compiled ways come to, as far as they work."""
    try:
        for result in measure(bench, ways, bench.config.rounds):
            yield replace(result, is_right=None)
    except recollect.InfeasibleBudget as error:  # the budgets go down
        print(f"{error}\n")
    except (RuntimeError, ImportError) as error:
        print(f"torch.compile does not work here: {str(error).splitlines()[0]}\n")


if __name__ == "__main__":
    main()
