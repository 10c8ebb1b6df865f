"""Build the wheel and the sdist, check them, and use the wheel in an environment with torch alone.

Nothing is downloaded. The environment is new and empty; torch and what it requires are linked into
it from the one that runs this script. So a base install that needs more than torch fails here.

    python .ci/package.py [--url https://host/owner/recollect]

With ``--url``, as in a release, the package names that repository, and the links of its README
lead there: a package index cannot follow relative ones.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from trove_classifiers import classifiers

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
#: Everything outside of src/recollect that a package is built from.
FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
RELATIVE_LINK = re.compile(r"(\]\(|src=\"|srcset=\")(?!https?://|#)")

#: `doctor` plans a small model, runs it under the plan, and compares gradients.
USE = """
import importlib.util, sys, warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
assert not importlib.util.find_spec("numpy"), "the environment is not empty"
import recollect.cli
assert recollect.__file__.startswith(sys.prefix), recollect.__file__
sys.exit(recollect.cli.main(["doctor"]))
"""


def main() -> None:
    """Build, check, install and use."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="the repository that the package should name")
    url = parser.parse_args().url
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder) / "tree", url)
        wheel, sdist = build(tree, DIST, "wheel"), build(tree, DIST, "sdist")
        check_metadata(wheel, url)
        check_files(wheel, sdist)
        check_wheel_of_sdist(wheel, sdist, Path(folder))
        use(wheel, Path(folder) / "environment")
    for built in (wheel, sdist):
        print(f"{built.relative_to(ROOT)}  {built.stat().st_size / 1024:.0f} KiB")


# --- build ----------------------------------------------------------------------------------------


def copy_of_the_tree(tree: Path, url: str | None) -> Path:
    """What a package is built from, with the address of its repository if there is one."""
    shutil.copytree(
        ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.py[cod]")
    )
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    if url:
        with (tree / "pyproject.toml").open("a") as project:
            project.write(
                f'\n[project.urls]\nSource = "{url}"\nIssues = "{url}/issues"\n'
                f'Changelog = "{url}/blob/HEAD/CHANGELOG.md"\n'
            )
        readme = tree / "README.md"
        readme.write_text(with_absolute_links(readme.read_text(), url))
    return tree


def with_absolute_links(text: str, url: str) -> str:
    """Links into ``url``; pictures to the file itself, not to a page about it."""
    text = re.sub(r"(?<=!)\[([^\]]*)\]\((?!https?://)", rf"[\1]({url}/raw/HEAD/", text)
    text = re.sub(r'(src|srcset)="(?!https?://)', rf'\1="{url}/raw/HEAD/', text)
    return re.sub(r"\]\((?!https?://|#)", f"]({url}/blob/HEAD/", text)


def build(tree: Path, into: Path, kind: str) -> Path:
    """Have the pinned hatchling build ``kind``; returns the file."""
    before = set(into.glob("*"))
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into), cwd=tree)
    (built,) = set(into.glob("*")) - before
    return built


# --- check ----------------------------------------------------------------------------------------


def check_metadata(wheel: Path, url: str | None) -> None:
    """The metadata are valid, and what an index shows is there."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Metadata.from_email(archive.read(name), validate=True)
    assert metadata.description_content_type == "text/markdown"
    assert metadata.license_expression == "BSD-3-Clause"
    assert not set(metadata.classifiers or ()) - classifiers, "unknown classifiers"
    base = [r.name for r in metadata.requires_dist or () if not r.marker]
    assert base == ["torch"], f"the base install needs torch alone, not {base}"
    if url:
        assert not RELATIVE_LINK.search(metadata.description or ""), "README has a relative link"


def check_files(wheel: Path, sdist: Path) -> None:
    """Both hold the whole package, and no tests."""
    wanted = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "recollect").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"recollect/py.typed", "recollect/report/assets/page.html"} <= wanted
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == wanted, f"the wheel differs from src: {sorted(found ^ wanted)}"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in wanted} <= names
    others = {name for name in names if not name.startswith("src/")} - {"", "src"}
    assert others == {*FILES, "PKG-INFO"}, f"the sdist has {sorted(others)}"


def check_wheel_of_sdist(wheel: Path, sdist: Path, folder: Path) -> None:
    """The sdist builds to the same wheel."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (tree,) = (folder / "sdist").iterdir()
    again = build(tree, folder / "again", "wheel")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert set(one.namelist()) == set(other.namelist())
        for name in one.namelist():
            same = one.read(name) == other.read(name)
            assert same, f"{name} differs in the wheel that the sdist builds to"


# --- use ------------------------------------------------------------------------------------------


def use(wheel: Path, folder: Path) -> None:
    """Install the wheel beside torch and nothing else, and run the library and its command."""
    venv.create(folder, symlinks=os.name != "nt")
    (site,) = folder.glob("lib/python*/site-packages")
    link("torch", site, set())
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel))
    run(*pip, "check")
    version = run(str(folder / "bin" / "recollect"), "--version", cwd=folder)
    assert version.strip() == f"recollect {wheel.name.split('-')[1]}", version
    run(python, "-c", USE, cwd=folder)


def link(name: str, site: Path, seen: set[str]) -> None:
    """Link a distribution of this environment, and all that it requires, into ``site``."""
    if name in seen:
        return
    seen.add(name)
    found: Distribution = distribution(name)
    for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    for text in found.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            link(requirement.name, site, seen)


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a command without the variables that would lead it to this checkout."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ... failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
