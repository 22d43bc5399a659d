"""Where a client's own model comes from: a run's folder, a real client's folder, or an exported file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedtailor.data.datasets import DATASETS, Data
from fedtailor.errors import Refused
from fedtailor.experiment import build
from fedtailor.intake import ONE, Intake
from fedtailor.record import FEDERATED, elsewhere, holds_run, is_finished, load_tensors, read_info, read_settings
from fedtailor.run import MOMENTS, go_on_with
from fedtailor.trees import Params
from fedtailor.untrusted import LARGEST, check_plain, parse_json, read_text

ABOUT = "fedtailor"  # the name under which an exported file says what it is


@dataclass(frozen=True)
class About:
    """Whose model it is, and all that is needed to build it again."""

    run: str  # the name of the run's folder
    client: str  # its number, or the name of a real one
    moment: str
    method: Mapping[str, Any]
    network: Mapping[str, Any]
    inputs: Intake
    dtype: str  # of the weights: float32 or float64

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float64") or self.moment not in MOMENTS:
            raise Refused(f"A model of the moment '{self.moment}' in '{self.dtype}' is none of FedTailor's.")
        for part in (self.method, self.network):
            if not isinstance(part.get("name"), str):
                raise Refused("What is said of a model names no method or no network.")

    def text(self) -> str:
        """As JSON, for a file's metadata."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "About":
        """What `text` wrote, from whoever's file.

        >>> About.read("{}")
        Traceback (most recent call last):
        fedtailor.errors.Refused: What a file says of its model is not all that is needed to build it.
        """
        try:
            said = parse_json(text)
        except ValueError as error:
            raise Refused("What a file says of its model is not JSON.") from error
        check_plain(said, "What a file says of its model")
        try:
            method, network, inputs = (dict(said[name]) for name in ("method", "network", "inputs"))
            run, client, moment, dtype = (str(said[name]) for name in ("run", "client", "moment", "dtype"))
        except (KeyError, TypeError, ValueError) as error:
            raise Refused("What a file says of its model is not all that is needed to build it.") from error
        return cls(run, client, moment, method, network, _intake(inputs), dtype)


def find(path: Path, client: int | None, moment: str, inputs: Intake | None) -> tuple[About, Params]:
    """What is known of the model at a path, and its tensors; `inputs` stand for what it says of them."""
    if path.is_dir() and holds_run(path):
        if client is None:
            raise Refused(f"'{path}' holds the models of several clients; say whose: client=3, or --client 3.")
        return _of_run(path, client, moment, inputs)
    above = [*path.resolve().parents, *[path] * 4]  # a path may be short
    if path.is_file() and above[1].name == "personal" and holds_run(above[2]) and path.stem.isdecimal():
        return _of_run(above[2], int(path.stem), above[0].name, inputs)
    if path.is_file() and above[0].name == "models" and _is_site(above[3]):
        return _of_site(above[3], above[1], path.stem, inputs)
    if path.is_dir() and _is_site(path):
        return _of_site(path, _only_run(path), moment, inputs)
    if path.is_dir() and _is_site(above[1]):
        return _of_site(above[1], path, moment, inputs)
    if path.is_file():
        return of_file(path, inputs)
    raise Refused(f"There is no model in '{path}': it is no run, no client's folder and no exported file.")


def _of_run(folder: Path, client: int, moment: str, inputs: Intake | None) -> tuple[About, Params]:
    settings, info = read_settings(folder), read_info(folder)
    if not 0 <= client < len(info["clients"]):
        raise Refused(f"There is no client {client}; there are 0 to {len(info['clients']) - 1}.")
    if info["engine"] == FEDERATED:
        elsewhere(client)
    if not is_finished(folder):
        raise Refused(f"The run in '{folder}' is not finished; {go_on_with(folder)}.")
    name = f"{moment}/{client:03d}.safetensors"
    try:
        seal = parse_json(read_text(folder / "personal" / "models.json", "The list of models", LARGEST)).get(name)
    except (ValueError, AttributeError) as error:
        raise Refused(f"The list of models in '{folder}' cannot be read; {go_on_with(folder)}.") from error
    if not isinstance(seal, str):
        raise Refused(f"The run in '{folder}' has no model personal/{name}.")
    about = About(
        run=folder.resolve().name,
        client=str(client),
        moment=moment,
        method=settings["method"],
        network=settings["network"],
        inputs=inputs or _inputs_of_run(settings["data"], info),
        dtype=str(settings.get("dtype")),
    )
    try:
        return about, load_tensors(folder / "personal" / name, seal)
    except Refused as why:
        raise Refused(f"{str(why).rstrip('.')}; mend the run, {go_on_with(folder)}.") from why


def _inputs_of_run(data: Mapping[str, Any], info: Mapping[str, Any]) -> Intake:
    """As the run says; for a run that is older than this saying the data are looked at."""
    if isinstance(said := info.get("inputs"), dict):
        return _intake(said)
    if data["name"] not in (*DATASETS, "folder"):
        raise Refused("The run does not say what its samples are like; give its data: ft.load_personal(path, fed=...).")
    settings: Data = build(Data, data, data["name"], "data")
    return Intake.of(settings.load())


def _intake(said: Mapping[str, Any]) -> Intake:
    intake: Intake = build(Intake, {"parts": {}, "classes": None} | dict(said), "a model's inputs", "inputs")
    return intake


def _is_site(folder: Path) -> bool:
    """Whether a folder is a real client's own."""
    return (folder / "bundle" / "deployment.toml").is_file()


def _only_run(site: Path) -> Path:
    runs = sorted(path.parent for path in (site / "runs").glob("*/models"))
    if len(runs) != 1:
        several = f"several runs, {', '.join(run.name for run in runs[:5])}; name the folder of one"
        raise Refused(f"The client's folder '{site}' has {several if runs else 'no model yet'}.")
    return runs[0]


def _of_site(site: Path, run: Path, moment: str, inputs: Intake | None) -> tuple[About, Params]:
    """Of a real client's own folder. It does not say whether samples are bytes: that is seen when they come."""
    from fedtailor.deploy.settings import read_deployment  # which needs nothing of Flower

    trained = read_deployment(site / "bundle")
    own, said = trained.inputs, trained.describe()
    parts = {ONE: ("float32", tuple(own.shape))}
    inputs = inputs or Intake(parts, own.classes or None, own.targets, own.mean, own.deviation, guessed=True)
    if not (run / "models" / f"{moment}.safetensors").is_file():
        raise Refused(f"The client's folder '{site}' has no model '{moment}' of the run {run.name} yet.")
    about = About(run.name, site.resolve().name, moment, said["method"], said["network"], inputs, trained.dtype)
    return about, load_tensors(run / "models" / f"{moment}.safetensors")


def of_file(path: Path, inputs: Intake | None = None) -> tuple[About, Params]:
    """Of an exported file."""
    try:
        with safe_open(path, framework="pt") as file:
            said = (file.metadata() or {}).get(ABOUT)
    except (SafetensorError, OSError, ValueError) as error:
        raise Refused(f"'{path}' holds no tensors; export a model: fedtailor export RUN --client 3.") from error
    if said is None:
        hint = "leave it in its run's folder, or export it: fedtailor export RUN --client 3"
        raise Refused(f"'{path}' does not say of which network and method it is; {hint}.")
    about = About.read(said)
    return (about if inputs is None else replace(about, inputs=inputs)), load_tensors(path)
