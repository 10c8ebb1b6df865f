"""What is released: one version everywhere, workflows that call what exists, links that work."""

import importlib.util
import re
from pathlib import Path

import pytest

import recollect

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


@pytest.fixture(scope="module")
def package():
    pytest.importorskip("packaging")
    pytest.importorskip("trove_classifiers")
    spec = importlib.util.spec_from_file_location("package", ROOT / ".ci" / "package.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_stands_in_one_place_and_is_told_of():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert 'path = "src/recollect/_version.py"' in project
    assert f"\nversion: {recollect.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {recollect.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_there_are(path):
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    commands = [step.get("run", "") for job in jobs for step in job.get("steps", ())]
    called = set(re.findall(r"\bmake ([\w-]+)", "\n".join(commands)))
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert called <= made


def test_continuous_integration_is_what_the_hosts_run():
    called = re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    hosted = "".join(path.read_text() for path in WORKFLOWS)
    assert called
    assert [target for target in called if f"make {target}" not in hosted] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")), ids=str)
def test_issue_templates_are_forms(path):
    form = pytest.importorskip("yaml").safe_load(path.read_text())
    if path.name != "config.yml":
        assert {"name", "description", "body"} <= set(form)
        assert all(each["attributes"]["label"] for each in form["body"])


def test_links_of_the_readme_are_absolute_on_a_package_index(package):
    text = (
        "[guide](docs/guide/plan.md#times) [web](https://example.org) [here](#install)\n"
        '![picture](docs/picture.svg) <img src="docs/picture.svg"> <source srcset="a.svg">'
    )
    url = "https://host/owner/recollect"
    assert package.with_absolute_links(text, url) == (
        f"[guide]({url}/blob/HEAD/docs/guide/plan.md#times) [web](https://example.org) "
        f"[here](#install)\n![picture]({url}/raw/HEAD/docs/picture.svg) "
        f'<img src="{url}/raw/HEAD/docs/picture.svg"> <source srcset="{url}/raw/HEAD/a.svg">'
    )
    readme = package.with_absolute_links((ROOT / "README.md").read_text(), url)
    assert not package.RELATIVE_LINK.search(readme)
