"""Every example in the documentation runs, and every link leads somewhere."""

import inspect
import pkgutil
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint

import recollect
from recollect.planning.solving import solve

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if page.name != "CHANGELOG.md"
)

#: What stands for the checkout in ids.
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def blocks(page):
    """Line number and source of each Python example."""
    text = page.read_text()
    return [(text[: match.start(1)].count("\n"), match[1]) for match in FENCE.finditer(text)]


def anchors(page):
    """The anchors that the headings of a page make."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.fixture
def clean_slate(monkeypatch):
    monkeypatch.setattr(solve, "_WORK", 10_000)  # how good plans are does not matter here
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    recollect.uninstall()
    torch._dynamo.reset()


EXAMPLES = [(page, name) for page, name in zip(PAGES, NAMES, strict=True) if blocks(page)]


@pytest.mark.parametrize("page", [e[0] for e in EXAMPLES], ids=[e[1] for e in EXAMPLES])
@pytest.mark.usefixtures("clean_slate")
def test_examples_run(page):
    # The examples of a page build on each other, as a reader types them.
    namespace = {"__name__": "example"}
    for line, source in blocks(page):
        # Empty lines in front make the line numbers of a traceback those of the page.
        code = compile("\n" * (line + 1) + source, str(page), "exec")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".torch.jit.script_method. is deprecated")
            exec(code, namespace)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors(found), f"{target} has no such heading"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")]
    assert [page for page in pages if page not in navigation] == []


def test_every_public_name_is_documented():
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in recollect.__all__ if name not in text] == []


REFERENCE = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", REFERENCE)
def test_the_reference_is_to_what_there_is(path):
    if ".integrations." in path:
        pytest.importorskip(path.split(".")[2])
    assert pkgutil.resolve_name(path).__doc__


def test_the_reference_has_every_name_that_torch_does_not_have():
    listed = {path.rpartition(".")[2] for path in REFERENCE} | {"Policy", "store"}
    listed |= set(re.findall(r"\w+", (ROOT / "docs" / "reference.md").read_text()))
    ours = set(recollect.__all__) - set(torch.utils.checkpoint.__all__)
    assert sorted(ours - listed) == []


def test_every_option_is_documented():
    parameters = inspect.signature(recollect.checkpoint).parameters.values()
    text = (ROOT / "docs" / "guide" / "checkpoint.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert rows == {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
