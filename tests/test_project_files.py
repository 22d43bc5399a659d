"""Tests of the files around the package: workflows and pages call targets that the Makefile has."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")]
WORKFLOWS = [*(ROOT / ".github" / "workflows").glob("*.yml"), *(ROOT / ".ci").iterdir()]
CODE = re.compile(r"^ *```bash\n(.*?)```|`(make [^`]+)`", re.DOTALL | re.MULTILINE)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_every_make_target_that_is_called_exists() -> None:
    """Their names are in code blocks and between backquotes of pages, and in commands of workflows."""
    targets = {name for names in make_targets() for name in names.split()}
    code = {path: " ".join(map("\n".join, CODE.findall(path.read_text()))) for path in PAGES}
    code |= {path: path.read_text() for path in WORKFLOWS}
    called = {
        path: re.findall(r"(?:^|run: |`)\s*make ([a-z][a-z-]*)", text, re.MULTILINE) for path, text in code.items()
    }
    assert {"test", "docs", "dist"} <= {name for path in WORKFLOWS for name in called[path]}
    assert {path.name: names for path, names in called.items() if not targets.issuperset(names)} == {}


def test_every_target_without_a_file_is_phony() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {name for names in make_targets() for name in names.split()}
    assert set(phony.split()) == targets


def test_links_of_the_project_s_pages_exist() -> None:
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name}: {target}"
