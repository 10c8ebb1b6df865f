"""The page, without a browser; what it does in one is in tests/browser."""

import base64
import hashlib
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from recollect.report.page import page
from recollect.report.page_data import thinned
from recollect.report.plan_report import Point, summary
from recollect.report.rows import Row
from tests.report._pictures import GIB, curve, frontier_only, realistic

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
given = hypothesis.given

PICTURE = realistic()
EVIL = '</script><script>alert("1")</script><img src=x onerror=alert(2)>&amp;'


class Elements(HTMLParser):
    """All start tags with their attributes, the texts of scripts, and tags that do not match."""

    VOID = frozenset({"meta", "link", "input", "col", "br", "img"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.scripts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    def ids(self):
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]


def data_of(text):
    return json.loads(Elements(text).scripts[0])


def test_it_is_well_formed_and_ids_are_unique():
    found = Elements(page(PICTURE))
    assert found.open == []
    assert len(found.ids()) == len(set(found.ids()))
    labels = [attrs["aria-labelledby"] for _, attrs in found.tags if "aria-labelledby" in attrs]
    assert set(labels) <= set(found.ids())


def test_it_needs_nothing_but_itself():
    text = page(PICTURE)
    for tag, attrs in Elements(text).tags:
        assert "src" not in attrs
        assert attrs.get("href", "data:,") == "data:,", tag
        assert not [name for name in attrs if name.startswith("on")], "scripts in attributes"
    assert "@import" not in text
    assert "url(" not in text
    # The names of two XML namespaces are no addresses to be fetched.
    assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_only_its_own_script_may_run():
    found = Elements(page(PICTURE))
    (policy,) = [a["content"] for _, a in found.tags if a.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_names_of_users_are_text():
    evil = replace(
        PICTURE,
        title=EVIL,
        device=EVIL,
        rows=(Row(EVIL, EVIL, "kept", 1, 1.0, EVIL), *PICTURE.rows),
        points=tuple(replace(point, name=EVIL) for point in PICTURE.points),
        parts=((EVIL, 1),),
        notes=(EVIL,),
    )
    text = page(evil)
    assert [tag for tag, _ in Elements(text).tags if tag == "img"] == []
    assert text.count("<script") == 2
    assert text.count("</script") == 2
    assert EVIL in data_of(text)["texts"]
    assert data_of(text)["points"][0]["name"] == EVIL


def test_figures_are_readable_without_a_script():
    text = page(PICTURE)
    for figure in ("8.00 GiB", "7.28 GiB", "13.66 GiB", "+8.1%", "389 ms", "0.7%", "91.0%"):
        assert figure in text
    assert summary(PICTURE) in text
    assert "<noscript><pre>Plan for LlamaForCausalLM on NVIDIA H200" in text
    assert PICTURE.notes[0] in text


def test_the_sentence_says_it_in_plain_words():
    assert summary(PICTURE) == (
        "With a budget of 8.00 GiB the step is predicted to need at most 7.28 GiB, 53.3% of the "
        "13.66 GiB of the plain step, and takes 8.1% longer. No plan that fits can take less than "
        "386 ms: this one is predicted to be within 0.7% of that."
    )
    assert summary(frontier_only(PICTURE)) == (
        "A step can run in as little as 5.20 GiB, 38.1% of the 13.66 GiB of the plain step, and "
        "then takes 31.2% longer."
    )
    close = replace(PICTURE, gap=0.0004)
    assert summary(close).endswith("8.1% longer. No plan that fits is faster by more than 0.1%.")
    least = replace(PICTURE, predicted_time=PICTURE.plain_time, gap=0.0)
    assert summary(least).endswith("and takes the same time. No plan that fits is faster.")


def test_data_are_those_of_the_picture():
    data = data_of(page(PICTURE))
    before, after = data["curves"]
    assert before["peak"][1] == max(nbytes for _, nbytes in PICTURE.before)
    assert after["bytes"] == [nbytes for _, nbytes in PICTURE.after]
    assert after["times"] == pytest.approx([time for time, _ in PICTURE.after])
    assert sum(row[3] for row in data["rows"]) == sum(row.bytes for row in PICTURE.rows)
    assert len(data["points"]) == len(PICTURE.points)
    assert data["budget"] == 8 * GIB


SECTIONS = ("memory", "frontier", "parts-title", "modules", "notes-title")


@pytest.mark.parametrize(
    ("picture", "shown"),
    [
        (PICTURE, set(SECTIONS)),
        (frontier_only(PICTURE), {"frontier"}),
        (replace(PICTURE, before=()), set(SECTIONS)),
        (replace(PICTURE, before=(), after=()), set(SECTIONS) - {"memory"}),
        (replace(PICTURE, points=(), parts=(), notes=()), {"memory", "modules"}),
        (replace(PICTURE, points=PICTURE.points[:1]), set(SECTIONS) - {"frontier"}),
    ],
    ids=["all", "frontier", "after only", "no curves", "little", "one point"],
)
def test_what_does_not_apply_is_left_out(picture, shown):
    assert {name for name in SECTIONS if name in Elements(page(picture)).ids()} == shown


def test_a_frontier_has_no_budget():
    found = page(frontier_only(PICTURE))
    assert "<dt>budget</dt>" not in found
    assert data_of(found)["budget"] is None


def test_a_plan_that_another_beats_is_not_on_the_line():
    beaten = Point("plan", PICTURE.points[0].peak + 1, PICTURE.points[0].seconds * 1.1)
    data = data_of(page(replace(PICTURE, points=(beaten, *PICTURE.points))))
    assert len(data["points"]) == len(PICTURE.points)


def test_points_whose_time_is_unknown_are_left_out():
    lost = replace(PICTURE.points[0], seconds=float("inf"))
    data = data_of(page(replace(PICTURE, points=(lost, *PICTURE.points[1:]), gap=float("nan"))))
    assert len(data["points"]) == len(PICTURE.points) - 1


def test_a_large_model_makes_a_page_of_moderate_size():
    big = realistic(layers=100, ops=40, steps=500)
    assert len(big.before) > 100_000
    text = page(big)
    assert len(text.encode()) < 1_500_000
    assert len(data_of(text)["rows"]) == 4003
    peaks = [curve["peak"][1] for curve in data_of(text)["curves"]]
    assert peaks == [max(b for _, b in big.before), max(b for _, b in big.after)]


def test_it_is_the_same_each_time():
    assert page(realistic()) == page(
        replace(PICTURE, before=curve(12, 900 * 2**20, 120 * 2**20, 1.0, 20))
    )


# --- a thinned curve looks as the whole one ------------------------------------------------------


def test_a_short_curve_stays_as_it_is():
    curve = [(0.0, 1), (0.5, 9), (1.0, 2)]
    assert thinned(curve, 100) == curve
    assert thinned([], 100) == []


def test_many_points_become_few_and_keep_the_extremes_of_every_bucket():
    chance = random.Random(0)
    curve = [(n / 100_000, chance.randrange(10**9)) for n in range(100_000)]
    thin = thinned(curve, 200)
    assert len(thin) <= 800
    for start in range(0, 100_000, 500):
        part = curve[start : start + 500]
        times = {time for time, _ in part}
        left = [nbytes for time, nbytes in thin if time in times]
        assert max(left) == max(nbytes for _, nbytes in part)
        assert min(left) == min(nbytes for _, nbytes in part)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=300), st.integers(1, 20))
def test_ends_peak_and_order_are_kept(heights, buckets):
    # Several changes at the same moment are usual: an op frees what it replaces.
    curve = [(n // 3 / 10, height) for n, height in enumerate(heights)]
    thin = thinned(curve, buckets)
    whole = iter(curve)
    assert all(point in whole for point in thin), "in order"
    assert (thin[0], thin[-1]) == (curve[0], curve[-1])
    assert max(thin, key=lambda p: p[1]) == max(curve, key=lambda p: p[1])
    assert len(thin) <= 4 * buckets


def test_a_curve_without_duration_is_thinned_too():
    assert thinned([(1.0, n) for n in range(50)], 5) == [(1.0, 0), (1.0, 49)]
