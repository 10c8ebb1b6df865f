"""The page of a plan in a real browser: drawn right, readable everywhere, and without requests.

``make test-browser`` installs Chromium and selenium where they are missing, and names the browser
in ``RECOLLECT_BROWSER``. With that set, whatever is missing is an error and not skipped.
"""

import json
import os
import re
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest

from recollect.report.compare import Comparison
from recollect.report.explanation import Explanation
from recollect.report.page import page
from recollect.report.rows import RegionCall, Row
from recollect.report.units import bytes_text, parse_bytes, percent_text, seconds_text
from tests.report._pictures import GIB, MIB, frontier_only, marks, realistic, with_stacks

BROWSER = os.environ.get("RECOLLECT_BROWSER", "")

pytestmark = pytest.mark.browser

if BROWSER:
    from selenium import webdriver
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait
else:
    pytest.skip("needs Chromium: run it with `make test-browser`", allow_module_level=True)

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A small /dev/shm, as containers have it, is no reason to crash.
    "--disable-dev-shm-usage",
]

PICTURE = with_stacks(realistic(alike=False))
MARKED = replace(PICTURE, before_marks=marks(12, 1.0), after_marks=marks(12, 1.081))
FATES = ("kept", "recomputed", "offloaded")
EXPLAINED = ("kept", "input", "recomputed", "offloaded")
TIMES, NOTHING = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
UNITS = {"s": 1, "ms": 1e-3, "µs": 1e-6}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in [*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # None: selenium fetches the driver that the browser needs.
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


class Opened:
    """A page in the browser."""

    def __init__(self, driver, path):
        self.driver, self.url = driver, path.as_uri()
        driver.get_log("performance"), driver.get_log("browser")  # those of pages before
        driver.get(self.url)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        return [element.text for element in self.all(selector)]

    def boxes(self, selector):
        """Where elements are, relative to the window: dicts of left, top, width and so on."""
        script = (
            "return [...document.querySelectorAll(arguments[0])]"
            ".map(e => e.getBoundingClientRect().toJSON())"
        )
        return self.run(script, selector)

    def until(self, condition):
        return WebDriverWait(self.driver, 10).until(lambda _: condition())

    def press(self, element, *keys):
        # Keys as a keyboard sends them, to what has the focus.
        self.run("arguments[0].focus()", element)
        ActionChains(self.driver).send_keys(*keys).perform()

    def hover(self, selector, x, y):
        """Move the mouse to (x, y) from the upper left corner of the element."""
        element = self.one(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        width, height = element.size["width"], element.size["height"]
        moves = ActionChains(self.driver)
        moves.move_to_element_with_offset(element, round(x - width / 2), round(y - height / 2))
        moves.perform()

    def tip(self, chart):
        return self.one(f"{chart} .tip").text.split("\n")

    def set_filter(self, text):
        before = self.one("#matches").text
        element = self.one("#filter")
        element.clear()
        element.send_keys(text or " ")
        self.until(lambda: self.one("#matches").text != before)

    def errors(self):
        return self.driver.get_log("browser")

    def requests(self):
        entries = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [e for e in entries if e["method"] == "Network.requestWillBeSent"]
        return [entry["params"]["request"]["url"] for entry in sent]


@pytest.fixture
def show(chromium, tmp_path):
    """Open the page of a picture, in a window of some width, light or dark."""

    def shown(picture, width=1280, scheme="light"):
        path = tmp_path / "plan.html"
        text = picture if isinstance(picture, str) else page(picture)
        path.write_text(text, encoding="utf-8")
        window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        return Opened(chromium, path)

    return shown


def seconds_of(text):
    number, unit = text.split()
    return float(number) * UNITS[unit]


def line_through(pixels, values):
    """From values to pixels, by the outermost ticks of an axis."""
    slope = (pixels[-1] - pixels[0]) / (values[-1] - values[0])
    return lambda value: pixels[0] + (value - values[0]) * slope


def axis(opened, chart, which, value_of):
    """From values to pixels, as somebody reads it from the labels and the lines beside them."""
    labels = opened.texts(f"{chart} .tick.{which}")
    lines = opened.boxes(f"{chart} .grid.{which}")
    edge = "left" if which == "x" else "top"
    pixels = [line[edge] + line["width" if which == "x" else "height"] / 2 for line in lines]
    values = [value_of(label) for label in labels]
    to_pixel = line_through(pixels, values)
    for pixel, value in zip(pixels, values, strict=True):
        assert to_pixel(value) == pytest.approx(pixel, abs=1), "the axis is not linear"
    return to_pixel


def centre(box):
    return box["left"] + box["width"] / 2, box["top"] + box["height"] / 2


OTHER = realistic(10)
COMPARED = Comparison(PICTURE, OTHER, ("8 GiB", "ten layers"))
HELD = Explanation(
    (
        Row("layers.0.attn", "aten.mm", "recomputed", 64 * MIB, 0.0, "no policy", (4096, 4096)),
        Row("layers.1.attn", "aten.mm", "recomputed", 64 * MIB, 0.0, "no policy", (4096, 4096)),
        Row("layers.1", "aten.add", "input", 16 * MIB, 0.0, "input of layers.1", (4096, 1024)),
        Row("head", "aten.mm", "kept", 500 * MIB, 0.0, "autograd", (4096, 32000)),
        Row("head", "aten.view", "not held", 0, 0.0, "", (4096, 32000)),
    ),
    (RegionCall("layers.0", "rerun", ()), RegionCall("layers.1", "rerun", ())),
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_two_plans_are_shown_side_by_side(show, width, scheme):
    opened = show(COMPARED._page(), width, scheme)
    assert opened.errors() == []
    assert len(opened.all("#memory .curve")) == 2
    assert opened.one("h1").text == "LlamaForCausalLM on NVIDIA H200"
    first, second = opened.run(
        "return [...document.querySelectorAll('#memory .curve')]"
        ".map(e => getComputedStyle(e).stroke)"
    )
    assert first != second
    assert opened.texts("table.words tbody th")[0].startswith("layers.")
    assert not_wider_than_the_window(opened, width)


def test_on_a_phone_no_word_is_broken_and_no_amount_is_torn_from_its_unit(show):
    opened = show(COMPARED._page(), 390)
    lines = (
        "return [...document.querySelectorAll(arguments[0])].map(e => {"
        "const range = document.createRange(); range.selectNodeContents(e);"
        "return [e.textContent, range.getClientRects().length]; })"
    )
    names = dict(opened.run(lines, "[aria-labelledby=compared-title] tbody th"))
    assert names["recomputed"] == 1
    assert {count for _, count in opened.run(lines, "table.words tbody td")} == {1}
    opened = show(HELD._page(), 390)
    total = "#modules tr.total td.sum"
    assert opened.run(
        "return [...document.querySelectorAll(arguments[0])]"
        ".every(e => e.scrollWidth <= e.clientWidth)",
        total,
    )


def test_the_label_of_the_higher_peak_is_above(show):
    low = replace(PICTURE, after=tuple((time, nbytes * 9 // 10) for time, nbytes in PICTURE.after))
    opened = show(Comparison(low, PICTURE, ("less", "more"))._page(), 390)
    below, above = (opened.boxes(f"#memory text.halo.{kind}")[0] for kind in ("first", "second"))
    assert above["bottom"] <= below["top"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_what_a_forward_holds_is_shown(show, width, scheme):
    opened = show(HELD._page(), width, scheme)
    assert opened.errors() == []
    assert opened.one("h1").text == "516.00 MiB held after forward"
    assert opened.texts(".tree thead th") == ["module", "in all", *EXPLAINED]
    (total,) = opened.all(".tree tr.total")
    for text in ("500.00 MiB", "16.00 MiB", "128.00 MiB"):
        assert text in total.text
    assert not opened.all(".tree .time")  # nothing was timed
    assert not_wider_than_the_window(opened, width)


@pytest.mark.parametrize("width", [390, 1280])
def test_the_largest_tensors_are_listed_once_for_equal_layers(show, width):
    opened = show(realistic(), width)
    rows = opened.texts("table.largest tbody tr")
    assert len(rows) == 5
    assert rows[0].split("\n")[0].startswith("lm_head aten::_log_softmax")
    assert "1000.00 MiB" in rows[0]
    assert "10 times, 1.56 GiB in all" in rows[2]
    assert not_wider_than_the_window(opened, width)


def test_the_largest_tensors_have_their_lines(show):
    line = "/home/me/model.py:31"
    row = Row("blocks.0.mlp", "aten::mm", "kept", 2 * GIB, 0.001, source=line)
    opened = show(replace(PICTURE, rows=(row, *PICTURE.rows)))
    cell = opened.one("table.largest td.source")
    assert cell.text == "model.py:31"
    assert cell.get_attribute("title") == line


# --- memory by module -----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [390, 1280])
def test_bands_are_stacked_up_to_the_sum(show, width):
    opened = show(MARKED, width)
    stack = MARKED.after_stack
    assert len(opened.all("#stack .band")) == 2 + len(stack.bands)
    names = opened.texts("#stack-key li")
    assert names == ["parameters, optimizer state", "gradients, loss, workspace"] + [
        band.name for band in stack.bands
    ]
    boxes = opened.boxes("#stack .band")
    floor = opened.boxes("#stack .grid")[-1]["top"]
    highest = max(
        stack.base + fixed + sum(band.bytes[n] for band in stack.bands)
        for n, fixed in enumerate(stack.fixed)
    )
    per_byte = boxes[0]["height"] / stack.base
    top = min(box["top"] for box in boxes if box["height"])
    assert floor - top == pytest.approx(highest * per_byte, abs=2.5)
    assert not_wider_than_the_window(opened, width)
    assert opened.errors() == []


def test_the_stack_switches_between_plain_and_the_plan(show):
    opened = show(MARKED)
    planned, plain = (opened.one(f"#stack-switch button:nth-child({n})") for n in (2, 1))
    assert planned.get_attribute("aria-pressed") == "true"
    before = min(box["top"] for box in opened.boxes("#stack .band") if box["height"])
    assert len(opened.all("#stack rect.link")) == 2  # to the host, and back
    plain.click()
    assert plain.get_attribute("aria-pressed") == "true"
    assert planned.get_attribute("aria-pressed") == "false"
    after = min(box["top"] for box in opened.boxes("#stack .band") if box["height"])
    assert after < before
    assert opened.all("#stack rect.link") == []


def test_the_pointer_names_the_modules_that_hold_most(show):
    opened = show(MARKED)
    box = opened.boxes("#stack")[0]
    opened.hover("#stack", box["width"] * 0.4, box["height"] * 0.8)
    title, *pairs = opened.tip("#stack")
    assert title.endswith("GiB")
    found = dict(zip(pairs[::2], pairs[1::2], strict=True))
    assert found["parameters, optimizer state"] == "2.00 GiB"
    assert any(name.startswith("layers.") for name in found)


def test_equal_layers_are_one_row_with_the_sums_of_all(show):
    opened = show(realistic())
    opened.one("#expand").click()
    names = [text.split("\n")[0] for text in opened.texts(".tree tr.module th")]
    assert [name for name in names if name[0].isdigit()] == ["0-1", "2-9", "10-11"]
    assert "8 equal" in next(t for t in opened.texts(".tree tr.module th") if t.startswith("2-9"))
    kept = sum(row.bytes for row in PICTURE.rows if row.fate == "kept")
    total = opened.one(".tree tr.total td.sum.kept .bytes").text
    assert parse_bytes(total) == pytest.approx(kept, rel=1e-3)


def not_wider_than_the_window(opened, width):
    return opened.run("return document.documentElement.scrollWidth") <= width


# --- the whole page -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "picture",
    [PICTURE, frontier_only(PICTURE), replace(PICTURE, before=(), after=(), points=())],
    ids=["plan", "frontier", "no charts"],
)
def test_no_errors_and_no_request_leaves_the_page(show, picture):
    opened = show(picture)
    for chart in opened.all(".chart"):
        ActionChains(opened.driver).move_to_element(chart).perform()
    assert opened.errors() == []
    assert {url for url in opened.requests() if not url.startswith("data:")} == {opened.url}


def test_names_of_users_are_shown_and_not_run(show):
    # A dot parts modules, as it does in torch, which refuses it in a name.
    evil = "</script ></script><img src=x onerror='window&pwned=1'>"
    evil += "<script>window['pwned']=1</script>"
    rows = (Row(f"net.{evil}", evil, "kept", MIB, 1e-3, evil),)
    points = tuple(replace(point, name=evil) for point in PICTURE.points)
    opened = show(
        replace(PICTURE, title=evil, device=evil, rows=rows, points=points, notes=(evil,))
    )
    opened.one("#expand").click()
    opened.hover("#frontier", 400, 150)
    assert opened.run("return window.pwned") is None
    assert opened.all("img") == []
    assert evil in opened.one("h1").text
    assert opened.texts(".tree .name") == ["net", evil]
    assert opened.one("#frontier .tip .title").text == evil
    assert opened.errors() == []


def test_numbers_are_written_as_in_python(show):
    opened = show(PICTURE)
    # Among them ties, such as 1.125 MiB, which Python rounds to even.
    counts = [0, 1, 1023, 1024, 2**20 - 1, 2**20 * 9 // 8, 2**30 * 27 // 8, 10**12, 2**53]
    counts += [int(1.37**n) for n in range(110)] + [2**20 + n * 2**17 for n in range(64)]
    times = [0, 0.412, 0.9999, 0.99949, 45e-6, 2e-9, 1e-12, 99.96] + [1.3**-n for n in range(80)]
    shares = [0, 1e-5, 0.007, 0.5, 1, 1.0625]
    for name, python, values in [
        ("bytesText", bytes_text, counts),
        ("secondsText", seconds_text, times),
        ("percentText", percent_text, shares),
    ]:
        script = f"return arguments[0].map({name})"
        assert opened.run(script, values) == [python(value) for value in values]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_readable_in_light_and_dark(show, scheme):
    opened = show(PICTURE, scheme=scheme)
    backs = [luminance(opened, s, "backgroundColor") for s in ("body", ".card", ".tile")]
    assert (max(backs) < 0.05) if scheme == "dark" else (min(backs) > 0.9)
    texts = ["h1", ".lede", ".device", ".tile .value", ".tile .remark", ".card > p", ".legend li"]
    texts += [".tree .name", ".tree .bytes", ".tree .time", ".tree .count", ".notes li"]
    marks = ["#memory .tick", "#memory .halo.after", "#memory .halo.before", "#memory .halo.budget"]
    marks += ["#frontier .halo.baseline", "#frontier .halo.plain", "#frontier .halo.chosen"]
    inks = {s: luminance(opened, s, "color") for s in texts}
    inks |= {s: luminance(opened, s, "fill") for s in marks}
    poor = {s: contrast(ink, back) for s, ink in inks.items() for back in backs}
    # What WCAG asks for of text.
    assert {s: ratio for s, ratio in poor.items() if ratio < 4.5} == {}


def luminance(opened, selector, style):
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    channels = [int(c) / 255 for c in re.findall(r"\d+", opened.run(script, selector, style))[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = max(one, other), min(one, other)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_the_page_does_not_scroll_sideways(show, width):
    long = Row("a_very_long_name_of_a_module." * 5 + "end", "aten::" + "x" * 60, "kept", 1, 1.0)
    opened = show(replace(PICTURE, rows=(long, *PICTURE.rows), title="Model" * 12), width)
    opened.one("#expand").click()
    script = "const e = document.scrollingElement; return [e.scrollWidth, e.clientWidth]"
    wide, seen = opened.run(script)
    assert wide == seen <= width
    texts = opened.boxes(".chart text, .tile, .tree th, .tree td")
    assert max(box["right"] for box in texts) <= width
    assert min(box["left"] for box in texts if box["width"]) >= 0
    assert opened.errors() == []


def test_charts_follow_the_width_of_the_window(show):
    opened = show(PICTURE)
    window = {"width": 600, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    opened.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
    opened.until(lambda: opened.boxes("#memory svg")[0]["right"] < 600)
    assert len(opened.all("#memory .curve")) == 2


# --- memory over the step -------------------------------------------------------------------------


@pytest.mark.parametrize("width", [390, 1280])
def test_curves_peaks_and_budget_are_at_their_values(show, width):
    opened = show(PICTURE, width)
    x = axis(opened, "#memory", "x", seconds_of)
    y = axis(opened, "#memory", "y", parse_bytes)
    assert len(opened.all("#memory .curve")) == 2
    (budget,) = opened.boxes("#memory .budget-line")
    assert centre(budget)[1] == pytest.approx(y(8 * GIB), abs=1)
    for kind, points in (("before", PICTURE.before), ("after", PICTURE.after)):
        (curve,) = opened.boxes(f"#memory .curve.{kind}")
        heights = [nbytes for _, nbytes in points]
        assert curve["left"] == pytest.approx(x(0), abs=2)
        assert curve["right"] == pytest.approx(x(points[-1][0]), abs=2)
        assert curve["top"] == pytest.approx(y(max(heights)), abs=2)
        assert curve["bottom"] == pytest.approx(y(min(heights)), abs=2)
        (mark,) = opened.boxes(f"#memory .peak.{kind}")
        time, peak = max(points, key=lambda point: point[1])
        assert centre(mark) == pytest.approx((x(time), y(peak)), abs=1)
    labels = opened.texts("#memory .halo")
    assert labels == ["budget 8.00 GiB", "peak 13.66 GiB", "peak 7.28 GiB"]


STAIRS = replace(
    PICTURE,
    before=((0.0, GIB), (0.1, 9 * GIB), (0.3, 2 * GIB), (0.4, GIB)),
    after=((0.0, GIB), (0.2, 5 * GIB), (0.3, 3 * GIB), (0.5, GIB)),
)


@pytest.mark.parametrize(
    ("time", "plain", "plan"),
    [
        (0.05, "1.00 GiB", "1.00 GiB"),
        (0.15, "9.00 GiB", "1.00 GiB"),
        (0.25, "9.00 GiB", "5.00 GiB"),
        (0.35, "2.00 GiB", "3.00 GiB"),
        (0.45, "step is over", "3.00 GiB"),
    ],
)
def test_the_mouse_shows_time_and_bytes(show, time, plain, plan):
    opened = show(STAIRS)
    x = axis(opened, "#memory", "x", seconds_of)
    left = opened.boxes("#memory")[0]["left"]
    opened.hover("#memory", x(time) - left, 150)
    title, *pairs = opened.tip("#memory")
    assert seconds_of(title) == pytest.approx(time, abs=0.001)
    assert pairs == ["plain", plain, "with the plan", plan]


def test_near_the_peak_the_mouse_shows_the_peak(show):
    opened = show(PICTURE)
    (mark,) = opened.boxes("#memory .peak.after")
    left = opened.boxes("#memory")[0]["left"]
    opened.hover("#memory", centre(mark)[0] - left + 2, 100)
    assert opened.tip("#memory")[-1] == bytes_text(PICTURE.predicted_peak)


def test_arrow_keys_move_through_the_step_and_are_spoken(show):
    opened = show(STAIRS)
    chart = opened.one("#memory")
    opened.press(chart, Keys.HOME)
    assert chart.get_attribute("aria-valuetext") == "0 s: plain 1.00 GiB, with the plan 1.00 GiB"
    opened.press(chart, Keys.END)
    words = chart.get_attribute("aria-valuetext")
    assert words == "500 ms: plain step is over, with the plan 1.00 GiB"
    opened.press(chart, Keys.ARROW_LEFT)
    assert chart.get_attribute("aria-valuetext").endswith("with the plan 3.00 GiB")
    opened.press(chart, Keys.ESCAPE)
    assert not opened.one("#memory .tip").is_displayed()


def test_a_hundred_thousand_points_keep_their_peak(show):
    flat = [(n * 1e-5, GIB) for n in range(100_000)]
    flat[41_234] = (0.41234, 7 * GIB)
    opened = show(replace(PICTURE, after=tuple(flat), budget=8 * GIB))
    y = axis(opened, "#memory", "y", parse_bytes)
    (curve,) = opened.boxes("#memory .curve.after")
    assert curve["top"] == pytest.approx(y(7 * GIB), abs=2)


def test_one_curve_without_a_budget(show):
    opened = show(replace(PICTURE, before=(), budget=None))
    assert len(opened.all("#memory .curve")) == 1
    assert opened.all("#memory .budget-line") == []


@pytest.mark.parametrize("width", [390, 1280])
def test_forward_and_backward_are_divided_and_what_runs_is_named(show, width):
    opened = show(MARKED, width)
    x = axis(opened, "#memory", "x", seconds_of)
    (turn,) = opened.boxes("#memory .turn")
    after = next(mark.seconds for mark in MARKED.after_marks if mark.is_backward)
    assert centre(turn)[0] == pytest.approx(x(after), abs=1.5)
    forward, backward = opened.boxes("#memory .phase")
    assert opened.texts("#memory .phase") == ["forward", "backward"]
    assert forward["right"] < turn["left"] < backward["left"]
    frame = opened.boxes("#memory")[0]
    for mark in (MARKED.after_marks[3], MARKED.after_marks[-3]):
        opened.hover("#memory", x(mark.seconds) - frame["left"] + 3, 100)
        tip = opened.tip("#memory")
        which = "backward of" if mark.is_backward else "forward of"
        assert tip[tip.index(which) + 1] == mark.path
        assert tip[tip.index("op") + 1] == mark.op
        frame = opened.boxes("#memory")[0]


# --- peaks against times --------------------------------------------------------------------------


@pytest.mark.parametrize("width", [390, 1280])
def test_points_are_at_their_values_and_ours_are_a_line(show, width):
    opened = show(PICTURE, width)
    x = axis(opened, "#frontier", "x", parse_bytes)
    y = axis(opened, "#frontier", "y", lambda text: float(text.removesuffix(TIMES)))
    assert len(opened.all("#frontier .curve")) == 1
    ours = [point for point in PICTURE.points if point.kind in ("plan", "chosen")]
    ours.sort(key=lambda point: (point.peak, point.seconds))
    frame = opened.boxes("#frontier svg")[0]
    path = opened.one("#frontier .curve").get_attribute("d")
    drawn = [
        (float(px) + frame["left"], float(py) + frame["top"])
        for px, py in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)
    ]
    wanted = [(x(point.peak), y(point.seconds / PICTURE.plain_time)) for point in ours]
    assert [pytest.approx(place, abs=1.5) for place in wanted] == drawn
    assert opened.all("#frontier .point.plan") == []  # hundreds of dots would hide the line
    for kind in ("chosen", "plain", "baseline"):
        points = [point for point in PICTURE.points if point.kind == kind]
        points.sort(key=lambda point: point.peak)
        found = sorted(map(centre, opened.boxes(f"#frontier .point.{kind}")))
        wanted = [(x(point.peak), y(point.seconds / PICTURE.plain_time)) for point in points]
        assert [pytest.approx(place, abs=1.5) for place in wanted] == found
    (budget,) = opened.boxes("#frontier .budget-line")
    assert centre(budget)[0] == pytest.approx(x(8 * GIB), abs=1)


def test_labels_name_the_points_and_do_not_cover_each_other(show):
    names = {point.name for point in PICTURE.points if point.kind != "plan"}
    opened = show(PICTURE)
    assert set(opened.texts("#frontier .halo")) == names | {"budget"}
    assert not opened.one("#frontier-key").is_displayed()
    assert apart(opened.boxes("#frontier .halo"))
    opened = show(PICTURE, 390)
    assert set(opened.texts("#frontier .halo")) == {"A", "B", "C", "this plan", "plain", "budget"}
    assert opened.texts("#frontier-key li")[0] == "A torch: checkpoint every layer"
    assert apart(opened.boxes("#frontier .halo"))


def apart(boxes):
    return all(
        one["right"] <= other["left"]
        or other["right"] <= one["left"]
        or one["bottom"] <= other["top"]
        or other["bottom"] <= one["top"]
        for n, one in enumerate(boxes)
        for other in boxes[:n]
    )


def test_the_mouse_shows_the_nearest_point(show):
    opened = show(PICTURE)
    frame = opened.boxes("#frontier")[0]
    for kind in ("chosen", "plain"):
        (point,) = [point for point in PICTURE.points if point.kind == kind]
        x, y = centre(opened.boxes(f"#frontier .point.{kind}")[0])
        opened.hover("#frontier", x - frame["left"] + 3, y - frame["top"] + 3)
        # Two plans are close together: what is shown is the nearer.
        ratio = f"{point.seconds / PICTURE.plain_time:.3f}{TIMES}"
        values = [bytes_text(point.peak), seconds_text(point.seconds), ratio]
        assert opened.tip("#frontier")[:7:2] == [point.name, *values]
        frame = opened.boxes("#frontier")[0]


def test_a_click_gives_the_code_for_the_plan_and_what_memory_buys(show):
    opened = show(PICTURE)
    use = opened.one("#frontier-use")
    assert not use.is_displayed()
    plans = sorted(p.peak for p in PICTURE.points if p.kind in ("plan", "chosen"))
    opened.press(opened.one("#frontier"), Keys.HOME, Keys.ENTER)
    code, trade = opened.texts("#frontier-use > *")
    budget = re.fullmatch(r'model = recollect.fit\(model, budget="(.*)"\)', code)[1]
    # Rounded up, so that the plan fits; and by less than to the next.
    assert plans[0] <= parse_bytes(budget) < plans[1]
    # 6.1 GiB takes 1.174 of plain, 5.2 GiB 1.312: a GiB more saves a tenth of the time.
    assert trade == "+1 GiB: \N{MINUS SIGN}10.5% time"
    frame = opened.boxes("#frontier")[0]
    x, y = centre(opened.boxes("#frontier .point.chosen")[0])
    opened.hover("#frontier", x - frame["left"], y - frame["top"])
    ActionChains(opened.driver).click().perform()
    clicked = opened.one("#frontier-use code").text
    assert clicked == 'model = recollect.fit(model, budget="7.29GiB")'
    opened.press(opened.one("#frontier"), Keys.END, Keys.ENTER)
    assert not use.is_displayed()  # plain is no plan


def test_arrow_keys_go_from_point_to_point(show):
    opened = show(PICTURE)
    chart = opened.one("#frontier")
    seen = []
    opened.press(chart, Keys.HOME)
    for _ in PICTURE.points:
        seen.append(chart.get_attribute("aria-valuetext").split(": peak")[0])
        opened.press(chart, Keys.ARROW_RIGHT)
    by_peak = sorted(PICTURE.points, key=lambda point: (point.peak, point.seconds))
    assert seen == [point.name for point in by_peak]


def test_the_same_is_there_as_a_table(show):
    opened = show(PICTURE)
    opened.one("details summary").click()
    rows = opened.texts("details tbody tr")
    assert len(rows) == len(PICTURE.points)
    assert rows[0] == "plan for 5.20 GiB 5.20 GiB 38.1% 472 ms +31.2%"


# --- the modules ----------------------------------------------------------------------------------


def tree_rows(opened):
    """What is to be seen of the tree: depth, class, name and the cells, by row."""
    script = """
        return [...document.querySelectorAll(".tree tbody tr")].map(row => [
            Number(row.style.getPropertyValue("--depth")), row.className,
            row.querySelector(".name, .op, .label span")?.textContent ?? "",
            [...row.querySelectorAll("td.sum")].map(
                cell => [...cell.children].map(part => part.textContent)),
        ])"""
    return opened.run(script)


def cells(rows):
    """What the cells of a line for ``rows`` are to say."""
    found = []
    for choice in FATES:
        chosen = [row for row in rows if row.fate == choice]
        nbytes, seconds = sum(r.bytes for r in chosen), sum(r.seconds for r in chosen)
        texts = [bytes_text(nbytes), seconds_text(seconds)] if nbytes or seconds else [NOTHING]
        found.append(texts)
    return found


def open_all(opened):
    """Expand everything, and scroll until every row was made."""
    opened.one("#expand").click()
    while marks := opened.all(".tree .more"):
        before = len(opened.all(".tree tbody tr"))
        opened.run("arguments[0].scrollIntoView()", marks[0])
        opened.until(lambda count=before: len(opened.all(".tree tbody tr")) != count)


def below(path):
    return [r for r in PICTURE.rows if r.path == path or r.path.startswith(f"{path}.")]


def test_sums_are_right_on_every_level(show):
    opened = show(PICTURE)
    open_all(opened)
    total, *lines = tree_rows(opened)
    assert total[3] == cells(PICTURE.rows)
    path, modules, ops = [], [], []
    for depth, kind, name, texts in lines:
        del path[depth:]
        if kind == "module":
            path.append(name)
            modules.append(".".join(path))
            assert texts == cells(below(modules[-1])), modules[-1]
        else:
            ops.append((".".join(path), name, texts))
    parts = [row.path.split(".") for row in PICTURE.rows if row.path]
    assert set(modules) == {".".join(p[: n + 1]) for p in parts for n in range(len(p))}
    assert len(modules) == len(set(modules))
    wanted = [
        (r.path, r.op + (f" {r.reason}" if r.reason else ""), cells([r])) for r in PICTURE.rows
    ]
    assert sorted(ops) == sorted(wanted)


def test_bars_are_as_long_as_their_bytes(show):
    opened = show(PICTURE)
    bar = opened.run(
        "return [...document.querySelectorAll('.tree tr.total .bar i')]"
        ".map(e => [e.className, e.getBoundingClientRect().width / e.parentNode.clientWidth])",
    )
    whole = sum(row.bytes for row in PICTURE.rows)
    wanted = {c: sum(r.bytes for r in PICTURE.rows if r.fate == c) / whole for c in FATES}
    assert dict(bar) == pytest.approx(wanted, abs=0.01)


def test_a_click_opens_and_closes_a_module(show):
    opened = show(PICTURE)
    names = [line[2] for line in tree_rows(opened)]
    assert names[:5] == ["All modules", "aten::embedding the input of the step", "layers", "0", "1"]
    toggle = opened.one(".tree [aria-label='layers.0']")
    assert toggle.get_attribute("aria-expanded") == "false"
    toggle.click()
    assert toggle.get_attribute("aria-expanded") == "true"
    inside = ["attn", "aten::add", "mlp", "aten::add", "1"]
    assert [line[2] for line in tree_rows(opened)][4:9] == inside
    toggle.click()
    assert [line[2] for line in tree_rows(opened)] == names


def test_the_keyboard_opens_closes_and_moves(show):
    opened = show(PICTURE)
    toggle = opened.one(".tree [aria-label='layers.0']")
    opened.press(toggle, Keys.ARROW_RIGHT)
    assert toggle.get_attribute("aria-expanded") == "true"
    opened.press(toggle, Keys.ARROW_DOWN)
    focus = "return document.activeElement.getAttribute('aria-label')"
    assert opened.run(focus) == "layers.0.attn"
    opened.press(toggle, Keys.ARROW_LEFT)
    assert opened.all(".tree [aria-label='layers.0.attn']") == []
    opened.press(toggle, Keys.ENTER)
    assert toggle.get_attribute("aria-expanded") == "true"


def test_a_filter_leaves_what_matches_with_its_sums(show):
    opened = show(PICTURE)
    before = tree_rows(opened)
    opened.set_filter("ATTN.drop recomp")
    rows = [r for r in PICTURE.rows if ".attn.drop" in r.path and r.fate == "recomputed"]
    nbytes = sum(row.bytes for row in rows)
    status = f"{len(rows)} of {len(PICTURE.rows)} ops, {bytes_text(nbytes)}"
    assert opened.one("#matches").text == status
    lines = tree_rows(opened)
    assert lines[0][3] == cells(rows)
    assert len([line for line in lines if line[1] == "leaf"]) == len(rows), "all are open"
    opened.set_filter("no such module")
    assert opened.texts(".tree tbody tr") == ["Nothing matches."]
    opened.set_filter("")
    assert tree_rows(opened) == before


def test_columns_sort_siblings(show):
    opened = show(PICTURE)
    natural = tree_rows(opened)

    def layers():
        return [line for line in tree_rows(opened) if line[1] == "module" and line[0] == 1]

    head = opened.one(".tree th[data-by=kept]")
    head.find_element(By.TAG_NAME, "button").click()
    assert head.get_attribute("aria-sort") == "descending"
    sizes = [parse_bytes(line[3][0][0]) for line in layers()]
    assert sizes == sorted(sizes, reverse=True)
    head.find_element(By.TAG_NAME, "button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert all(a <= b for a, b in pairwise(parse_bytes(line[3][0][0]) for line in layers()))
    opened.one(".tree th[data-by=order] button").click()
    assert tree_rows(opened) == natural


def test_thousands_of_rows_are_made_a_few_hundred_at_a_time(show):
    big = realistic(layers=100, ops=40, steps=500, alike=False)
    opened = show(big)
    assert len(big.rows) == 4003
    opened.one("#expand").click()
    shown = len(opened.all(".tree tbody tr"))
    assert shown < 1000
    opened.run("document.querySelector('.tree .more').scrollIntoView()")
    opened.until(lambda: len(opened.all(".tree tbody tr")) > shown)
    # Closing the module that holds nearly all of them leaves the few others, and no mark.
    toggle = opened.one(".tree [aria-label='layers']")
    opened.run("arguments[0].click()", toggle)
    names = [line[2] for line in tree_rows(opened)]
    assert names[2:] == ["layers", "lm_head", "aten::mm", "aten::_log_softmax"]
    opened.run("arguments[0].click()", toggle)
    assert shown // 2 < len(opened.all(".tree tbody tr")) < 1000
    assert opened.errors() == []
