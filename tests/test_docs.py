"""Every example in the documentation runs and prints what it says; every link leads somewhere."""

import inspect
import os
import pkgutil
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

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

FENCE = re.compile(
    r'^```python\n(.*?)^```$(?:\n+```text title="Output"\n(.*?)^```$)?', re.MULTILINE | re.DOTALL
)
#: A script that runs by itself, and what it prints.
SCRIPT = re.compile(
    r'^```python title="train.py"\n(.*?)^```$.*^```text title="Output"\n(.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
OPTIONAL = ("transformers", "peft")
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def blocks(page):
    """Line number and source of each Python example, and what the page says that it prints."""
    text = page.read_text()
    return [(text[: each.start(1)].count("\n"), *each.groups()) for each in FENCE.finditer(text)]


def assert_prints(printed, expected):
    """Exactly what the page says, but for figures after a tilde, which differ by machine."""
    figure = r"[-+]?[\\d.]+"
    pattern = re.sub(r"\\~[-+\\]*[\d.\\]*\d", figure, re.escape(expected))
    assert re.fullmatch(pattern, printed), (
        f"the page says\n{expected}\nand this was printed\n{printed}"
    )


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
def test_examples_run(page, monkeypatch, capsys):
    for package in OPTIONAL:
        if re.search(rf"^from {package} ", "".join(each[1] for each in blocks(page)), re.MULTILINE):
            pytest.importorskip(package)
    # The examples of a page build on each other, as a reader types them. The compiler looks their
    # module up.
    module = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)
    namespace = vars(module)
    for line, source, expected in blocks(page):
        capsys.readouterr()
        # Empty lines in front make the line numbers of a traceback those of the page.
        code = compile("\n" * (line + 1) + source, str(page), "exec")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".torch.jit.script_method. is deprecated")
            exec(code, namespace)
        if expected is not None:
            assert_prints(capsys.readouterr().out, expected)


def test_a_wrong_output_is_found():
    assert_prints("peak 4.81 MiB: +5%\n", "peak ~9.0 MiB: ~+12%\n")
    with pytest.raises(AssertionError, match="the page says"):
        assert_prints("peak 4.81 MiB, False\n", "peak ~9.0 MiB, True\n")
    with pytest.raises(AssertionError, match="the page says"):
        assert_prints("loss 2.17\n", "loss 2.16\n")


def test_the_script_on_two_ranks_prints_what_the_page_says(tmp_path):
    source, expected = SCRIPT.search((ROOT / "docs/tutorials/fsdp2.md").read_text()).groups()
    (tmp_path / "train.py").write_text(source)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launch],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=alone,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "PlanWarning" not in done.stderr
    assert_prints(done.stdout, expected)


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
