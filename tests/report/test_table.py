"""The table for the terminal."""

import re
from dataclasses import replace

import pytest

from recollect.report.plan_report import Point
from recollect.report.rows import Row
from recollect.report.table import frontier_table, table
from tests.report._pictures import GIB, MIB, frontier_only, realistic

PICTURE = realistic()


def words(line):
    return " ".join(line.split())


def test_head_says_what_was_asked_for_and_what_comes_of_it():
    assert table(PICTURE).splitlines()[:7] == [
        "Plan for LlamaForCausalLM on NVIDIA H200",
        "",
        "  budget             8.00 GiB",
        "  predicted peak     7.28 GiB  91.0% of the budget",
        "  plain peak        13.66 GiB  the plan saves 6.38 GiB",
        "  predicted time        +8.1%  389 ms, plain 360 ms",
        "  gap to the bound       0.7%  no plan that fits is below 386 ms",
    ]


def test_parts_of_the_peak_and_modules_are_aligned():
    small = replace(
        PICTURE,
        rows=(
            *(Row(f"layers.{n}.mlp", "aten::mm", "kept", 3 * MIB, 1e-3) for n in range(4)),
            *(Row(f"layers.{n}.mlp", "aten::mul", "recomputed", MIB, 2e-4) for n in range(4)),
            Row("head", "aten::mm", "kept", GIB, 0.25),
        ),
        parts=(("parameters", 3 * GIB), ("kept results", GIB)),
        notes=("A remark.",),
    )
    assert table(small).split("\n\n", 2)[2] == (
        "at the peak     memory  share\n"
        "------------  --------  -----\n"
        "parameters    3.00 GiB  75.0%\n"
        "kept results  1.00 GiB  25.0%\n"
        "\n"
        "module               kept     time  recomputed    time\n"
        "--------------  ---------  -------  ----------  ------\n"
        "layers.0-3.mlp  12.00 MiB  4.00 ms    4.00 MiB  800 µs\n"
        "head             1.00 GiB   250 ms           -       -\n"
        "in all           1.01 GiB   254 ms    4.00 MiB  800 µs\n"
        "\n"
        "A remark."
    )


@pytest.mark.parametrize("layers", [12, 100])
def test_no_line_is_longer_than_a_hundred_columns(layers):
    deep = ".".join(f"a_rather_long_name_{n}" for n in range(9))
    rows = [Row(deep, "aten::mm", c, 1023 * GIB, 9.99) for c in ("kept", "recomputed", "offloaded")]
    picture = realistic(layers)
    wide = replace(
        picture, rows=(*picture.rows, *rows), parts=((deep, 10**15),), notes=("word " * 99,)
    )
    text = table(wide)
    assert max(map(len, text.splitlines())) <= 100
    assert "a_rather_long_n...her_long_name_8" in text
    assert max(map(len, frontier_table(picture).splitlines())) <= 100


def test_numbers_of_layers_are_shown_as_far_as_there_is_room():
    def names(count, last="post_attention_layernorm"):
        rows = [
            Row(f"model.layers.{n}.{last}", "aten::mm", fate, MIB, 1e-3)
            for n in range(count)
            for fate in [("kept", "recomputed")[n % 3 == 1]]
        ]
        lines = table(replace(PICTURE, rows=tuple(rows), parts=(), notes=())).splitlines()
        return [line.split()[0] for line in lines if line.startswith("model")]

    assert names(6) == [
        "model.layers.0,2-3,5.post_attention_layernorm",
        "model.layers.1,4.post_attention_layernorm",
    ]
    first, second = names(90)
    assert re.fullmatch(r"model\.layers\.0,2-3,[-0-9,]+,\.\.\.,89\.post_attention_layernorm", first)
    assert re.fullmatch(r"model\.layers\.1,4,7,[0-9,]+,\.\.\.,88\.post_attention_layernorm", second)
    assert all("..." in name and len(name) < 70 for name in names(90, "norm" * 20))


def test_few_lines_and_right_sums_whatever_the_number_of_modules():
    rows = [Row(f"net.m{n}", "aten::mm", "kept", n * MIB, 1e-3) for n in range(1, 101)]
    lines = table(replace(PICTURE, rows=tuple(rows), notes=())).splitlines()
    assert words(lines[-2]) == "60 smaller lines 1.79 GiB 60.0 ms - -"
    assert words(lines[-1]) == "in all 4.93 GiB 100 ms - -"
    assert [line.split()[0] for line in lines[-42:-2]] == [f"net.m{n}" for n in range(61, 101)]


def test_ops_outside_of_any_module_have_a_name():
    assert "\n(no module)  " in table(PICTURE)


def test_a_frontier_has_a_row_for_each_point_and_no_budget():
    picture = frontier_only(PICTURE)
    head, rows = frontier_table(picture).split("\n\n", 2)[1:]
    assert "budget" not in head
    assert "least peak" in head
    lines = rows.splitlines()
    assert len(lines) == 2 + len(picture.points)
    assert words(lines[2]) == "plan for 5.20 GiB 5.20 GiB 38.1% 472 ms +31.2%"
    assert words(lines[-1]) == "plain 13.66 GiB 100.0% 360 ms 0% no plan"


def test_plans_that_are_close_to_each_other_are_not_listed_in_a_terminal():
    few = frontier_only(PICTURE)
    plans = tuple(Point("plan", 6 * GIB + n * MIB, 0.4 - n * 1e-4) for n in range(300))
    points = (*plans, *few.points)
    _, _, rows, note = frontier_table(replace(few, points=points)).split("\n\n")
    _, _, *shown = rows.splitlines()
    assert sum(row.startswith("plan ") for row in shown) <= 24
    assert note == f"{len(points) - len(shown)} more plans lie between these. The page shows all."
    others = [point.name for point in points if point.kind != "plan"]
    assert all(any(row.startswith(name) for row in shown) for name in others)


def test_what_is_not_known_is_left_out():
    picture = replace(
        PICTURE, plain_time=0.0, bound_time=0.0, gap=float("nan"), rows=(), parts=(), notes=()
    )
    text = table(picture)
    assert "time" not in text
    assert "gap" not in text
    assert text == text.strip()
    assert "There is no plan." in frontier_table(replace(picture, points=()))
