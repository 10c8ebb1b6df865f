"""Reports such as a plan makes them, without making a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from recollect.report.plan_report import Band, Mark, PlanReport, Point, Stack, Traffic
from recollect.report.rows import Row

MIB = 2**20
GIB = 2**30

#: Of a layer: module, op, MiB and microseconds.
OPS = [
    ("attn.norm", "aten::native_layer_norm", 16, 90),
    ("attn.q", "aten::mm", 16, 410),
    ("attn.k", "aten::mm", 16, 410),
    ("attn.v", "aten::mm", 16, 410),
    ("attn", "aten::transpose", 0, 2),
    ("attn", "aten::mul", 16, 60),
    ("attn", "aten::bmm", 128, 700),
    ("attn", "aten::_softmax", 128, 380),
    ("attn.drop", "aten::native_dropout", 160, 420),
    ("attn", "aten::bmm", 16, 690),
    ("attn.out", "aten::mm", 16, 420),
    ("", "aten::add", 16, 70),
    ("mlp.norm", "aten::native_layer_norm", 16, 90),
    ("mlp.up", "aten::mm", 42, 1200),
    ("mlp.gate", "aten::mm", 42, 1200),
    ("mlp.act", "aten::silu", 42, 150),
    ("mlp", "aten::mul", 42, 160),
    ("mlp.down", "aten::mm", 16, 1180),
    ("mlp.drop", "aten::native_dropout", 20, 80),
    ("", "aten::add", 16, 70),
]


def choice_of(layer: int, module: str, op: str) -> str:
    """The last layers keep most; the first give what they can to the host."""
    if op in {"aten::mm", "aten::native_layer_norm"}:
        return "offloaded" if layer < 2 and op == "aten::mm" else "kept"
    return "recomputed" if layer < 10 else "kept"


def layer_rows(
    layer: int, ops: int = 20, choice: Callable[..., str] = choice_of, *, alike: bool = True
) -> list[Row]:
    """The rows of a layer, which is a byte larger than the one before unless they are ``alike``."""
    rows = []
    for n in range(ops):
        module, op, mib, micros = OPS[n % len(OPS)]
        path = ".".join(filter(None, ["layers", str(layer), module]))
        nbytes = mib * MIB + (0 if alike or not mib else layer)
        row = Row(path, op, choice(layer, module, op), nbytes, micros * 1e-6 * (1 + layer / 999))
        rows.append(row)
    return rows


def curve(
    layers: int, per_layer: int, bump: int, pace: float, steps: int
) -> tuple[tuple[float, int], ...]:
    """Memory that grows in forward and shrinks in backward, with a bump in each layer of that."""
    base, points, time = 3 * GIB, [], 0.0
    for n in range(layers * steps):
        points.append((time, base + (n + 1) * per_layer // steps))
        time += 0.010 * pace / steps
    for n in reversed(range(layers * steps)):
        height = bump * (n % steps) // steps
        points.append((time, base + (n + 1) * per_layer // steps + height))
        time += 0.020 * pace / steps
    return (*points, (time, base))


def marks(layers: int, pace: float) -> tuple[Mark, ...]:
    """What runs under such a curve: a product in each layer, forward and then backward."""
    forward = [
        Mark(0.010 * pace * n, f"layers.{n}.mlp.up", "aten::mm", False) for n in range(layers)
    ]
    turn = 0.010 * pace * layers
    backward = [
        Mark(turn + 0.020 * pace * n, f"layers.{layers - 1 - n}.attn", "aten::bmm", True)
        for n in range(layers)
    ]
    return (*forward, *backward)


def realistic(
    layers: int = 12, ops: int = 20, steps: int = 20, *, alike: bool = True
) -> PlanReport:
    """Of a transformer, under a plan that fits 8 GiB."""
    head = [
        Row("", "aten::embedding", "kept", 16 * MIB, 45e-6, "the input of the step"),
        Row("lm_head", "aten::mm", "kept", 500 * MIB, 0.0021),
        Row("lm_head", "aten::_log_softmax", "recomputed", 1000 * MIB, 0.0009),
    ]
    rows = [
        head[0],
        *(row for n in range(layers) for row in layer_rows(n, ops, alike=alike)),
        *head[1:],
    ]
    before = curve(layers, 900 * MIB, 120 * MIB, 1.0, steps)
    after = curve(layers, 310 * MIB, 700 * MIB, 1.081, steps)
    plain, chosen = max(b for _, b in before), max(b for _, b in after)
    total = before[-1][0]
    frontier = [
        Point(f"plan for {peak:.2f} GiB", int(peak * GIB), total * time)
        for peak, time in [
            (5.2, 1.312),
            (5.6, 1.236),
            (6.1, 1.174),
            (6.6, 1.131),
            (7.7, 1.075),
            (8.4, 1.062),
            (9.3, 1.045),
            (10.4, 1.029),
            (11.6, 1.014),
            (12.8, 1.005),
        ]
    ]
    return PlanReport(
        title="LlamaForCausalLM",
        device="NVIDIA H200",
        budget=8 * GIB,
        predicted_peak=chosen,
        predicted_time=after[-1][0],
        plain_peak=plain,
        plain_time=total,
        bound_time=after[-1][0] / 1.007,
        gap=0.007,
        before=before,
        after=after,
        rows=tuple(rows),
        points=(
            *frontier,
            Point("this plan", chosen, after[-1][0], "chosen"),
            Point("plain", plain, total, "plain"),
            Point("torch: checkpoint every layer", int(5.9 * GIB), total * 1.334, "baseline"),
            Point("torch: selective, keep matmuls", int(8.9 * GIB), total * 1.142, "baseline"),
            Point("torch.compile, budget 0.5", int(9.8 * GIB), total * 1.083, "baseline"),
        ),
        parts=(
            ("parameters", 1200 * MIB),
            ("gradients", 1200 * MIB),
            ("optimizer state", 600 * MIB),
            ("kept results", 3100 * MIB),
            ("working set of a recomputation", 640 * MIB),
            ("loss", 500 * MIB),
        ),
        notes=("Times were measured on this device; a step on another one may differ.",),
    )


def with_stacks(picture: PlanReport, layers: int = 12) -> PlanReport:
    """``picture`` with its memory by module, and copies to the host."""
    names = ["embed", *(f"layers.{n}" for n in range(layers)), "lm_head"]
    found = []
    for curve, share in ((picture.before, 1.0), (picture.after, 0.4)):
        end = curve[-1][0]
        times = tuple(end * n / 60 for n in range(60))
        bands = tuple(
            Band(name, tuple(int(share * 800 * MIB) * (place <= n < 60 - place) for n in range(60)))
            for place, name in enumerate(names)
        )
        fixed = tuple(40 * MIB * (n > 20) for n in range(60))
        found.append(Stack(times, fixed, bands, base=2 * GIB))
    third = found[1].seconds[20]
    after = found[1]._replace(out=((0.0, third / 2),), back=((third, third * 1.5),))
    traffic = Traffic(2 * GIB, 0.4, 0.21, 0.0021)
    return replace(picture, before_stack=found[0], after_stack=after, traffic=traffic)


def frontier_only(picture: PlanReport) -> PlanReport:
    """What a frontier has of ``picture``: no budget, no curves and no rows."""
    return PlanReport(
        title=picture.title,
        device=picture.device,
        budget=None,
        predicted_peak=min(point.peak for point in picture.points),
        predicted_time=picture.points[0].seconds,
        plain_peak=picture.plain_peak,
        plain_time=picture.plain_time,
        bound_time=0.0,
        gap=0.0,
        before=(),
        after=(),
        rows=(),
        points=tuple(point for point in picture.points if point.kind != "chosen"),
    )
