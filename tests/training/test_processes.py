"""Tests in new processes: same bits for the same seed, and no dependencies except torch and numpy."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import MEASURED

TRAIN = """
import sys
import fedtailor as ft
fed = ft.load("digits", clients=4, seed=1)
ft.simulate(ft.methods.Ditto(), ft.network("mlp", fed), fed, rounds=3, participation=(0.4, 1.0),
            validation=0.2, seed=5, engine="sequential", folder=sys.argv[1], checkpoint_every=2)
"""
MINIMAL = """
import sys
class BlockedImports:
    def find_spec(self, name, path=None, target=None):
        blocked = {"safetensors", "pydantic", "typer", "rich", "sklearn", "PIL", "click", "pandas", "dp_accounting"}
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, BlockedImports())
import numpy as np
import fedtailor as ft
x, y = np.random.default_rng(0).normal(size=(20, 6)), np.arange(20) % 2
fed = ft.Federation.from_arrays([(x, y, x, y)] * 3)
run = ft.simulate(ft.methods.Ditto(), ft.network("mlp", fed), fed, rounds=2, progress=True)
assert all("<div>" in shown._repr_html_() for shown in (fed, ft.methods.Ditto(), ft.network("mlp", fed)))
print(len(run.records), run.personal(0)["head.weight"].shape[0])
"""


def file_digests(folder: Path) -> dict[str, str]:
    """Return a digest of every file of a run, without the seconds and without the checksums in checkpoints."""
    digests = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "checkpoint.json"):
        text = path.read_bytes()
        if path.name == "rounds.jsonl":
            lines = [json.loads(line) for line in text.splitlines()]
            lines = [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines]
            text = json.dumps(lines).encode()
        digests[str(path.relative_to(folder))] = hashlib.sha256(text).hexdigest()
    return digests


def test_two_processes_give_same_bits(tmp_path: Path) -> None:
    for hash_seed in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path / hash_seed)], check=True, env=environment)
    first, second = file_digests(tmp_path / "0"), file_digests(tmp_path / "1")
    assert first == second
    checkpoints = [name for name in first if name.startswith("checkpoints/")]
    assert sorted({Path(name).parent.name for name in checkpoints}) == ["000002", "000003"]
    # experiment, run, start, rounds, lock, checksums of the models, and two moments of four clients
    assert len(first) == 6 + 2 * 4 + len(checkpoints)


def test_simulate_needs_only_torch_and_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", MINIMAL], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "2"], done.stderr
