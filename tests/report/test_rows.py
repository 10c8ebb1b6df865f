"""Modules of which the same becomes are one line."""

import pytest

from recollect.report.rows import FATES, Row, Sum, grouped, sums_of


def rows(paths, choice="kept", nbytes=10):
    return [Row(path, "aten::mm", choice, nbytes, 0.5) for path in paths]


def paths(found):
    return [group.path for group in grouped(found)]


def test_alike_layers_are_a_range_with_the_sums_of_all():
    (group,) = grouped(rows(f"layers.{n}.mlp" for n in range(12)))
    assert (group.path, len(group.rows)) == ("layers.0-11.mlp", 12)
    assert sums_of(group.rows) == {**dict.fromkeys(FATES, Sum()), "kept": Sum(120, 6.0)}


def test_others_are_ranges_in_the_order_of_their_first():
    kept = rows(f"layers.{n}" for n in (0, 1, 2, 5, 8, 9))
    again = rows((f"layers.{n}" for n in (3, 4, 6, 7, 10)), "recomputed")
    assert paths(kept + again) == ["layers.0-2,5,8-9", "layers.3-4,6-7,10"]


def test_experts_of_alike_layers_are_two_ranges():
    found = rows(f"layers.{n}.experts.{m}.up" for n in range(3) for m in range(8))
    assert paths(found) == ["layers.0-2.experts.0-7.up"]


def test_a_layer_with_one_unlike_expert_stands_apart():
    found = rows(f"layers.{n}.experts.{m}" for n in range(3) for m in range(4))
    found[5] = Row("layers.1.experts.1", "aten::mm", "offloaded", 10, 0.5)
    assert paths(found) == [
        "layers.0,2.experts.0-3",
        "layers.1.experts.0,2-3",
        "layers.1.experts.1",
    ]


@pytest.mark.parametrize(
    "other",
    [
        Row("layers.1", "aten::bmm", "kept", 10, 0.5),
        Row("layers.1", "aten::mm", "kept", 11, 0.5),
        Row("layers.1", "aten::mm", "offloaded", 10, 0.5),
        Row("blocks.1", "aten::mm", "kept", 10, 0.5),
    ],
    ids=["op", "bytes", "choice", "path"],
)
def test_unlike_modules_stay_apart(other):
    assert len(grouped([*rows(["layers.0"]), other])) == 2


def test_times_may_differ():
    other = Row("layers.1", "aten::mm", "kept", 10, 0.25)
    assert paths([*rows(["layers.0"]), other]) == ["layers.0-1"]


def test_no_module_and_no_rows():
    assert paths(rows([""])) == [""]
    assert grouped([]) == []
