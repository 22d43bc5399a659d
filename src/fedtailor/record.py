"""A run on disk: a folder that readers understand without this library.

experiment.toml         what was asked for
run.json                where it ran, who the clients are
rounds.jsonl            one line a round
arrays/0007.safetensors ...   what is too large for a line of it: a monitor's arrays of round 7
personal/trained/000.safetensors ...   every client's own model, an ordinary state_dict; also personal/received/
state.safetensors       the server and what every client keeps; written last: a run that has it is finished
"""

import json
import math
import tomllib
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedtailor.errors import Refused
from fedtailor.lines import Record
from fedtailor.run import MOMENTS, Run
from fedtailor.trees import Params, flatten, unflatten

_STATE = "state.safetensors"


class RunWriter:
    """Writes a run into a folder of its own, round by round."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder = folder
        experiment, info = to_toml(run.experiment), json.dumps(run.info, indent=1) + "\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            taken = any(folder.iterdir())
        except OSError as error:
            raise Refused(f"The folder '{folder}' cannot be written: {error.strerror}.") from error
        if taken:
            raise Refused(f"The folder '{folder}' is not empty; runs never overwrite each other, name a new one.")
        with (folder / "experiment.toml").open("x") as file:  # "x": of two at once, one fails
            file.write(experiment)
        (folder / "run.json").write_text(info)
        (folder / "rounds.jsonl").touch()

    def add(self, record: Record) -> Record:
        """Append a round; its large arrays go to a file, and the record that is returned names that."""
        large = {name: value for name, value in record["monitor"].items() if isinstance(value, Tensor)}
        if large:
            file = f"arrays/{record['round']:04d}.safetensors"
            (self._folder / "arrays").mkdir(exist_ok=True)
            _save(large, self._folder / file)
            named = {name: {"file": file, "shape": list(value.shape)} for name, value in large.items()}
            record = record | {"monitor": record["monitor"] | named}
        with (self._folder / "rounds.jsonl").open("a") as lines:
            lines.write(json.dumps(_without_nan(record), allow_nan=False) + "\n")
        return record

    def finish(self, run: Run) -> None:
        """Keep the models and the state."""
        for moment in MOMENTS:
            folder = self._folder / "personal" / moment
            folder.mkdir(parents=True)
            for client in range(run.num_clients):
                _save(run.personal(client, moment), folder / f"{client:03d}.safetensors")
        clients = {str(client): run.client(client) for client in range(run.num_clients)}
        _save(flatten({"server": run.server, "clients": clients}), self._folder / _STATE)


def open_run(path: str | Path) -> Run:
    """A finished run from its folder.

    >>> open_run("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no run in 'nowhere'.
    """
    folder = Path(path)
    if not (folder / "experiment.toml").is_file():
        raise Refused(f"There is no run in '{folder}'.")
    if not is_finished(folder):
        raise Refused(f"The run in '{folder}' is not finished.")
    try:
        experiment = tomllib.loads((folder / "experiment.toml").read_text())
        info = json.loads((folder / "run.json").read_text())
        records = [_with_numbers(json.loads(line)) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        tree = unflatten(load_file(folder / _STATE))
    except (OSError, ValueError, SafetensorError) as error:
        raise Refused(f"The run in '{folder}' cannot be read: {error}.") from error
    clients = tree.get("clients", {})
    return Run(
        experiment,
        info,
        records,
        server=tree.get("server", {}),
        get_client=lambda client: clients.get(str(client), {}),
        get_personal=lambda client, moment: load_tensors(folder / "personal" / moment / f"{client:03d}.safetensors"),
        folder=folder,
    )


def is_finished(folder: Path) -> bool:
    """Whether a run's folder holds all it should."""
    return (folder / _STATE).is_file()


def free_folder(parent: Path, name: str) -> Path:
    """A path of that name that is not there yet: a number is added where it is."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(parent / free for free in names if not (parent / free).exists())


def to_toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML, tables last; None is left out.

    >>> print(to_toml({"rounds": 2, "schedule": None, "method": {"name": "fedavg", "lr": 0.1}}), end="")
    rounds = 2
    <BLANKLINE>
    [method]
    name = "fedavg"
    lr = 0.1
    """
    return "\n".join(_toml_lines(settings, "")) + "\n"


def _toml_lines(table: Mapping[str, Any], path: str) -> list[str]:
    given = {name: value for name, value in table.items() if value is not None}
    lines = [f"{name} = {_toml_value(value)}" for name, value in given.items() if not isinstance(value, Mapping)]
    for name, value in given.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{path}{name}]", *_toml_lines(value, f"{path}{name}.")]
    return lines


def _toml_value(value: Any) -> str:
    """JSON writes numbers, texts and lists as TOML does; what is neither (a function, say) is named."""
    return json.dumps(value, ensure_ascii=False, default=lambda odd: odd.item() if hasattr(odd, "item") else str(odd))


def _save(tensors: Params, path: Path) -> None:
    """Written beside and renamed, so that a file that is there is whole."""
    beside = path.with_suffix(".writing")
    save_file({name: leaf.detach().cpu().contiguous().clone() for name, leaf in tensors.items()}, beside)
    beside.replace(path)


def load_tensors(path: Path) -> Params:
    """The tensors in a file of a run."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Refused(f"The tensors in '{path}' cannot be read: {error}.") from error


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: a number that is none becomes null."""
    if isinstance(value, dict):
        return {name: _without_nan(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_without_nan(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_numbers(record: Record) -> Record:
    """JSON turned the clients' numbers into text and what is no number into null: turn them back."""
    for group in ("missed", "failed"):
        record[group] = {int(client): why for client, why in record.get(group, {}).items()}
    for group in ("per_client", "last_trained"):
        for name, values in record.get(group, {}).items():
            numbers = {int(client): math.nan if value is None else value for client, value in values.items()}
            record[group][name] = numbers
    record["monitor"] = _with_nan(record.get("monitor", {}))
    return record


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_nan(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_with_nan(child) for child in value]
    return math.nan if value is None else value
