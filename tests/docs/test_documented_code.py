"""Code blocks of the documentation: each is run, or says why not, and then its commands are checked."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedtailor.experiments.experiment import make_experiment
from fedtailor.experiments.own_code import CodeConsent
from support.documented_code import LANGUAGES, Block, check_command, expand, make_script, pages, read_blocks

ROOT = Path(__file__).parents[2]
PAGES = {str(page.relative_to(ROOT)): page for page in pages(ROOT)}
FAST = ("README.md", "CONTRIBUTING.md")
EXPERIMENT = '[method]\nname = "fedapm"\n'


def is_run(page: str) -> bool:
    """Return whether a page has a block that is run."""
    return any(not block.reason and block.language in ("python", "bash") for block in read_blocks(PAGES[page]))


@pytest.mark.parametrize(
    "page", [page if page in FAST else pytest.param(page, marks=pytest.mark.slow) for page in PAGES if is_run(page)]
)
def test_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(make_script(PAGES[page]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.parametrize("page", PAGES)
def test_block_that_is_not_run_says_why_and_has_valid_commands(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = read_blocks(PAGES[page])
    assert all(block.language in LANGUAGES for block in blocks)
    assert all(block.reason for block in blocks if block.language in ("yaml", "ini"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    own_code = read_blocks(ROOT / "docs" / "own_code.md")
    (tmp_path / "my_module.py").write_text(next(block.code for block in own_code if block.file == "my_module.py"))
    for block in blocks:
        if block.language == "toml":
            make_experiment(tomllib.loads(block.code), CodeConsent(everything=True))
    shell = [block for block in blocks if block.language == "bash"]
    for block, commands in zip(shell, expand(shell, tmp_path), strict=True):
        for program, *words in commands:
            if block.reason and program == "fedtailor":
                check_command(words, monkeypatch)
    sys.modules.pop("my_module", None)


def test_expand_joins_lines_and_replaces_variables(tmp_path: Path) -> None:
    block = Block("bash", 'A="--rounds 3"\nfedtailor run $A \\\n  --data heart  # comment\nsrun fedtailor env', "")
    commands = [["fedtailor", "run", "--rounds", "3", "--data", "heart"], ["srun", "fedtailor", "env"]]
    assert expand([block], tmp_path) == [commands]


@pytest.mark.parametrize(
    "command", ["run --method fedavgg", "run --roundss 3", "compare fedavg --method.lr -1", "show X --formatt csv"]
)
def test_check_of_an_invalid_command_fails(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=r"fedavgg|roundss|must be|No such option"):
        check_command(command.split(), monkeypatch)
