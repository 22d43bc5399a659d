"""Code blocks of the documentation: find them, run them, and check commands that cannot be run here.

A block is run unless a comment before it says why not, which readers of the page do not see:

<!-- not run: needs a GPU -->

Commands of such a block are still checked: their flags, names, and values are those that FedTailor accepts.
"""

import json
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from textwrap import dedent
from typing import Any

import click
import pytest
import typer

from fedtailor.cli.app import app
from fedtailor.cli.deploy import deploy
from fedtailor.cli.main import main
from fedtailor.experiments.own_parts import build_data

LANGUAGES = ("python", "bash", "toml", "yaml", "ini")
_BLOCK = re.compile(
    r"^(?:[ ]*<!-- not run: (?P<reason>[^>]+?) -->\n)?"
    r"(?P<indent>[ ]*)```(?P<language>\w+)\n(?P<code>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"# ([\w-]+\.(?:py|toml))\n")
_RECORD = 'command_not_found_handle() { printf "%s\\0" "$@" >&3; printf "\\n\\0" >&3; }; '
_CHECKED_BEFORE = (  # what the commands call after they have parsed and checked their arguments
    "fedtailor.cli.run.run_with_progress",
    "fedtailor.cli.compare.compare_methods",
    "fedtailor.cli.sweep.check_can_resume",
    "fedtailor.cli.paper.run_cells",
    "fedtailor.cli.deploy.flower_app.create_operator_folder",
)
_WITH_FLAGS = ("run", "compare", "sweep", "data get", "data convert", "paper run", "deploy init")


class _CheckedError(Exception):
    """The arguments of a command are valid."""


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    language: str
    code: str
    reason: str  # why it is not run; empty: it is run

    @property
    def file(self) -> str:
        """The name of the file that the block shows in its first line, if any."""
        named = _FILE.match(self.code)
        return named[1] if named else ""


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a Markdown page, or of the text of a notebook."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return [Block(m["language"], dedent(m["code"]), m["reason"] or "") for m in _BLOCK.finditer(text)]


def expand(blocks: Sequence[Block], folder: Path) -> list[list[list[str]]]:
    """Return the words of all commands of shell blocks that share their variables, as bash reads them.

    No program is found there, so that bash calls a function for each command, which only writes it down.
    """
    script = _RECORD + "".join(f"{block.code}\nwait; printf '\\f\\0' >&3; " for block in blocks)
    command = [which("bash") or "bash", "-c", f'exec 3>"$HOME/commands"; {script}']
    done = subprocess.run(command, env={"PATH": "/nonexistent", "HOME": str(folder)}, cwd=folder, capture_output=True)
    assert b"syntax error" not in done.stderr, done.stderr.decode()
    found: list[list[list[str]]] = [[]]
    words: list[str] = []
    for word in (folder / "commands").read_text().split("\0"):
        if word == "\n":
            found[-1].append(words)
            words = []
        elif word == "\f":
            found.append([])
        else:
            words.append(word)
    assert len(found) == len(blocks) + 1, "bash did not come to the end of a block"
    return found[:-1]


def make_script(page: Path) -> str:
    """Return a program that does what a reader of the page would do, from its first block to its last one."""
    lines = ["from support.documented_code import run_commands, write_file"]
    for block in read_blocks(page):
        if block.file:
            lines.append(f"write_file({block.file!r}, {block.code!r})")
        if block.reason or (block.file and block.language == "toml"):
            continue
        if block.language == "python":
            lines.append(block.code)
        elif block.language == "bash":
            lines.append(f"run_commands({block.code!r})")
    return "\n".join(lines)


def write_file(name: str, code: str) -> None:
    """Save a block that shows a file."""
    if multiprocessing.parent_process() is None:
        Path(name).write_text(code)


def run_commands(code: str) -> None:
    """Run the `fedtailor` commands of a shell block in this process, with few rounds."""
    if multiprocessing.parent_process() is not None:  # a process of a run imports the script again
        return
    home = Path("home")
    home.mkdir(exist_ok=True)
    [commands] = expand([Block("bash", code, "")], home.absolute())
    for program, *words in commands:
        assert program == "fedtailor", f"{program} is not run here; say why in a comment before the block"
        sys.argv = ["fedtailor", *shorten(words)]
        print("$", *sys.argv, flush=True)
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, f"{' '.join(sys.argv)} ended with {stop.code}"


def shorten(words: Sequence[str]) -> list[str]:
    """Return a command with few rounds and repeats.

    >>> shorten(["run", "--rounds", "200"])
    ['run', '--rounds', '2']
    >>> shorten(["compare", "fedavg"])
    ['compare', 'fedavg', '--rounds', '2']
    """
    short, few = list(words), {"--rounds": 2, "--repeats": 1 if "--folds" in words else 3}
    for position, word in enumerate(words[:-1]):
        if word in few:
            short[position + 1] = str(min(few[word], int(words[position + 1])))
    return short + (["--rounds", "2"] if words[0] in ("run", "compare", "sweep") and "--rounds" not in words else [])


def check_command(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the arguments of a `fedtailor` command without doing what it says."""
    command: click.Command = typer.main.get_command(deploy if words[0] == "deploy" else app)
    rest, names = list(words), [words[0]] if words[0] == "deploy" else []
    rest = rest[len(names) :]
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(click.Context(command), rest)
        assert found is not None and name is not None
        command, names = found, [*names, name]
    context = command.make_context(names[-1], rest)
    if " ".join(names) in _WITH_FLAGS and "--dry-run" not in words:
        for target in _CHECKED_BEFORE:
            monkeypatch.setattr(target, _stop)
        monkeypatch.setattr("fedtailor.cli.listing.build_data", lambda *given: _stop(build_data(*given)))
        with pytest.raises(_CheckedError):
            command.invoke(context)


def _stop(*_: Any, **__: Any) -> Any:
    raise _CheckedError


def pages(root: Path) -> Iterator[Path]:
    """Yield all pages of the documentation."""
    yield from (root / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md"))
    yield from sorted((root / "docs").rglob("*.md"))
    yield from sorted((root / "docs").rglob("*.ipynb"))
