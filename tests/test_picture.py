"""The picture of the README: every way of the figures is in it, where it belongs."""

import importlib.util
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIGURES = json.loads((ROOT / "benchmarks" / "frontier.json").read_text())
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawing():
    path = ROOT / "benchmarks" / "picture.py"
    spec = importlib.util.spec_from_file_location("picture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_in_the_docs_is_that_of_the_figures(drawing):
    assert drawing.picture(FIGURES) == (ROOT / "docs" / "frontier.svg").read_text()


def test_less_memory_is_further_left_and_less_time_further_down(drawing):
    root = ET.fromstring(drawing.picture(FIGURES))
    rects = root.findall(f".//{SVG}g/{SVG}rect")
    lines = ("plan,", "compiled plan", "torch.compile")
    ways = [row for row in FIGURES["rows"] if not row["name"].startswith(lines)]
    assert len(rects) == len(ways)
    places = sorted((float(each.get("x")), -float(each.get("y"))) for each in rects)
    wanted = sorted((row["peak"], row["ratio"]) for row in ways)
    for axis in (0, 1):
        by_place = sorted(range(len(places)), key=lambda n: places[n][axis])
        by_value = sorted(range(len(wanted)), key=lambda n: wanted[n][axis])
        assert by_place == by_value


def test_names_are_text_and_inside_of_the_picture(drawing):
    rows = [
        {"name": "<b>", "peak": 2**30, "ratio": 1.2},
        {"name": "compiled plan, 1 GiB", "peak": 2**30, "ratio": 0.9},
        {"name": "plain", "peak": 2**31, "ratio": 1.0},
    ]
    root = ET.fromstring(drawing.picture({**FIGURES, "rows": rows}))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert {"<b>", "plain", "recollect on torch.compile"} <= set(texts)
    assert "recollect" not in texts  # there is no such line
    for each in root.iter(f"{SVG}text"):
        assert 0 <= float(each.get("x")) <= drawing.WIDTH
        assert 0 <= float(each.get("y")) <= drawing.HEIGHT
