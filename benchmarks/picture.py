"""Draw the figures of `frontier.py --json` as an SVG for the README: peak memory against time.

Needs nothing but Python. The picture has its own background and follows the reader's light or dark
scheme.

    python benchmarks/frontier.py --json benchmarks/frontier.json
    python benchmarks/picture.py benchmarks/frontier.json docs/frontier.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30
WIDTH, HEIGHT = 880, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 74, 52

STYLE = """
text { font: 14px system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; fill: #59626d; }
.card { fill: #ffffff; stroke: #e2e4e6; } .grid { stroke: #e8eaec; } .axis { stroke: #b6bcc3; }
.title { font-size: 17px; font-weight: 600; fill: #1c2127; }
.ours { --c: #0b7568; } .ours-compiled { --c: #2c6cb0; } .compile { --c: #b06a12; }
.peer { --c: #8a4f7d; } .plain { --c: #6b7480; }
.mark { fill: var(--c); stroke: #ffffff; stroke-width: 1.5; }
.line { fill: none; stroke: var(--c); stroke-width: 2.5; }
.name { fill: var(--c); font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #9ba5b0; } .card { fill: #14181d; stroke: #2f353c; }
  .grid { stroke: #262c33; } .axis { stroke: #59626d; }
  .title { fill: #e6e9ec; } .mark { stroke: #14181d; }
  .ours { --c: #45c3b0; } .ours-compiled { --c: #62a0e2; } .compile { --c: #e3a63f; }
  .peer { --c: #d79bc9; } .plain { --c: #9ba5b0; }
}
"""


class Way(NamedTuple):
    """One row of the figures."""

    name: str
    peak: float  #: in GiB, over what was there before the step
    ratio: float  #: the time as a multiple of plain's

    @property
    def kind(self) -> str:
        """What it is drawn as."""
        for start, kind in (
            ("plain", "plain"),
            ("plan", "ours"),
            ("compiled plan", "ours-compiled"),
            ("torch.compile", "compile"),
        ):
            if self.name.startswith(start):
                return kind
        return "peer"


#: The kinds that are lines, and what they are called.
LINES = {
    "ours": "recollect",
    "ours-compiled": "recollect on torch.compile",
    "compile": "torch.compile and its activation budget",
}


class Scale(NamedTuple):
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, wanted: int) -> Iterator[float]:
        """Round values in the range."""
        rough = (self.high - self.low) / wanted
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
        number = math.ceil(self.low / step)
        while number * step <= self.high:
            yield number * step
            number += 1


def picture(figures: dict[str, Any]) -> str:
    """The SVG."""
    ways = [Way(row["name"], row["peak"] / GIB, row["ratio"]) for row in figures["rows"]]
    x = Scale(0, max(way.peak for way in ways) * 1.06, LEFT, WIDTH - RIGHT)
    low, high = min(way.ratio for way in ways), max(way.ratio for way in ways)
    y = Scale(low - 0.05, high + 0.05, HEIGHT - BOTTOM, TOP)
    parts = [*_frame(figures), *_axes(x, y)]
    kinds = [kind for kind in LINES if any(way.kind == kind for way in ways)]
    for number, kind in enumerate(kinds):
        found = sorted((way for way in ways if way.kind == kind), key=lambda way: way.ratio)
        parts += _line(kind, found, x, y, number)
    for way in ways:
        if way.kind in ("peer", "plain"):
            parts += _point(way, x, y)
    body = "\n".join(parts)
    alt = "; ".join(f"{w.name}: {w.peak:.1f} GiB, {w.ratio:.2f} times plain" for w in ways)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Peak memory against step time">\n<desc>{escape(alt)}</desc>\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _frame(figures: dict[str, Any]) -> Iterator[str]:
    config = figures["config"]
    what = (
        f"{config['depth']} transformer blocks of width {config['width']:,}, "
        f"{config['batch']} x {config['tokens']:,} tokens, {figures['device']}"
    )
    yield f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>'
    yield '<text class="title" x="24" y="32">Peak memory against step time</text>'
    yield f'<text x="24" y="53">{escape(what)}</text>'


def _axes(x: Scale, y: Scale) -> Iterator[str]:
    for value in y.ticks(6):
        at = f"{y(value):.1f}"
        yield f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at}" y2="{at}"/>'
        text = f"{value:.1f}x"
        yield f'<text x="{x.start - 8}" y="{y(value) + 5:.1f}" text-anchor="end">{text}</text>'
    for value in x.ticks(8):
        yield f'<text x="{x(value):.1f}" y="{y.start + 20}" text-anchor="middle">{value:g}</text>'
    yield f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{y.start}" y2="{y.start}"/>'
    yield (
        f'<text x="{x.end}" y="{y.start + 40}" text-anchor="end">'
        "peak of the step in GiB, without parameters</text>"
    )
    yield f'<text x="{x.start + 8}" y="{y.end + 2}">step time, plain = 1</text>'


def _line(kind: str, ways: Sequence[Way], x: Scale, y: Scale, number: int) -> Iterator[str]:
    """A line with its points, and its name in the upper right corner."""
    path = "L".join(f"{x(way.peak):.1f} {y(way.ratio):.1f}" for way in ways)
    yield f'<g class="{kind}"><path class="line" d="M{path}"/>'
    for way in ways:
        yield f'<circle class="mark" cx="{x(way.peak):.1f}" cy="{y(way.ratio):.1f}" r="5"/>'
    top = TOP + 24 * number
    yield f'<circle class="mark" cx="{x.end - 10}" cy="{top}" r="5"/>'
    at = f'x="{x.end - 22}" y="{top + 5}" text-anchor="end"'
    yield f'<text class="name" {at}>{LINES[kind]}</text></g>'


def _point(way: Way, x: Scale, y: Scale) -> Iterator[str]:
    px, py = x(way.peak), y(way.ratio)
    start = min(px - 6, x.end - 8 * len(way.name))  # about as wide as the text is
    below = 24 if way.kind == "plain" else -11
    yield f'<g class="{way.kind}">'
    yield f'<rect class="mark" x="{px - 5.5:.1f}" y="{py - 5.5:.1f}" width="11" height="11"/>'
    yield (f'<text class="name" x="{start:.1f}" y="{py + below:.1f}">{escape(way.name)}</text></g>')


def main() -> None:
    """Read the figures and write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", type=Path, help="what frontier.py --json has written")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    options = parser.parse_args()
    figures = json.loads(options.figures.read_text(encoding="utf-8"))
    options.picture.write_text(picture(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
