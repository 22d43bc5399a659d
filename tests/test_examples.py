"""The examples run and say what they promise; the pages' own code blocks run too."""

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_method() -> None:
    shares = [float(share) for share in re.findall(r"([\d.]+)% as received", run("examples/own_method.py"))]
    assert len(shares) == 3
    assert min(shares[1:]) > shares[0]  # keeping a part of the own model beats FedAvg's one model for all here


def test_own_data() -> None:
    rows = run("examples/own_data.py").splitlines()
    assert [row.split()[0] for row in rows] == ["accuracy", "Local", "FedAvg", "FedPer", "Ditto"]
    assert all(len(row.split()) == 5 for row in rows)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_python_blocks_of_the_pages_run(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^ *```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n".join(dedent(block) for block in blocks))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
