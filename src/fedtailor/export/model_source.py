"""Finds a client's personal model in a run folder, in a deployed client's folder, or in an exported file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedtailor.core.client_models import BY_CLIENT
from fedtailor.core.trees import Params
from fedtailor.core.untrusted_input import check_settings, parse_json, read_text
from fedtailor.data.datasets import DATASETS
from fedtailor.data.input_spec import SINGLE_INPUT, InputSpec
from fedtailor.errors import RunError
from fedtailor.experiments.parsing import build_dataclass, build_named
from fedtailor.runs.reader import (
    FLOWER_ENGINE,
    is_finished,
    is_run_folder,
    model_file,
    raise_remote_client,
    read_info,
    read_model,
    read_settings,
)
from fedtailor.runs.run import MOMENTS, all_clients, architecture_of, resume_hint
from fedtailor.runs.serialization import load_tensors

METADATA_KEY = "fedtailor"  # of the `ModelInfo` in an exported file's metadata


@dataclass(frozen=True)
class ModelInfo:
    """The origin of a personal model, and everything that is needed to build it."""

    run: str  # name of the run folder
    client: str  # number, or the name of a deployed client
    moment: str
    method: Mapping[str, Any]
    network: Mapping[str, Any]
    inputs: InputSpec
    dtype: str  # of the weights: float32 or float64

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float64") or self.moment not in MOMENTS:
            raise RunError(f"The metadata of a model has an invalid moment '{self.moment}' or dtype '{self.dtype}'.")
        for part in (self.method, self.network):
            if not isinstance(part.get("name"), str):
                raise RunError("The metadata of a model has no name of its method or network.")

    def to_json(self) -> str:
        """Return the metadata as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ModelInfo":
        """Parse the metadata of an untrusted file.

        >>> ModelInfo.from_json("{}")
        Traceback (most recent call last):
        fedtailor.errors.RunError: The metadata of a model is incomplete or invalid.
        """
        try:
            values = parse_json(text)
        except ValueError as error:
            raise RunError("The metadata of a model is not valid JSON.") from error
        check_settings(values, "The metadata of a model")
        try:
            method, network, inputs = (dict(values[name]) for name in ("method", "network", "inputs"))
            run, client, moment, dtype = (str(values[name]) for name in ("run", "client", "moment", "dtype"))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError("The metadata of a model is incomplete or invalid.") from error
        return cls(run, client, moment, method, network, _parse_input_spec(inputs), dtype)


def find_model(path: Path, client: int | None, moment: str, inputs: InputSpec | None) -> tuple[ModelInfo, Params]:
    """Return the metadata and the tensors of the model at a path; `inputs` overrides the input format there."""
    if path.is_dir() and is_run_folder(path):
        if client is None:
            raise RunError(f"'{path}' contains the models of several clients; choose one: client=3, or --client 3.")
        return _from_run(path, client, moment, inputs)
    above = [*path.resolve().parents, *[path] * 4]  # padded, because a path may be short
    if path.is_file() and above[1].name == "personal" and is_run_folder(above[2]) and path.stem.isdecimal():
        return _from_run(above[2], int(path.stem), above[0].name, inputs)
    if path.is_file() and above[0].name == "models" and _is_client_folder(above[3]):
        return _from_client_folder(above[3], above[1], path.stem, inputs)
    if path.is_dir() and _is_client_folder(path):
        return _from_client_folder(path, _only_run(path), moment, inputs)
    if path.is_dir() and _is_client_folder(above[1]):
        return _from_client_folder(above[1], path, moment, inputs)
    if path.is_file():
        return load_exported(path, inputs)
    raise RunError(f"There is no model in '{path}'; give a run folder, a client folder, or an exported file.")


def _from_run(folder: Path, client: int, moment: str, inputs: InputSpec | None) -> tuple[ModelInfo, Params]:
    settings, info = read_settings(folder), read_info(folder)
    if not 0 <= client < (total := len(all_clients(info))):
        raise RunError(f"There is no client {client}; the run has clients 0 to {total - 1}.")
    if info["engine"] == FLOWER_ENGINE:
        raise_remote_client(client)
    if not is_finished(folder):
        raise RunError(f"The run in '{folder}' is not finished; {resume_hint(folder)}.")
    described = model_info(folder.resolve().name, settings, info, client, moment, inputs)
    return described, read_model(folder, model_file(client, moment))


def model_info(
    run: str, settings: Mapping[str, Any], info: Mapping[str, Any], client: int, moment: str, inputs: InputSpec | None
) -> ModelInfo:
    """Return the metadata of a client's model from the settings and the info of its run."""
    return ModelInfo(
        run=run,
        client=str(client),
        moment=moment,
        method=settings["method"],
        network=_network_of(settings["network"], info, client),
        inputs=_inputs_of_client(inputs or _inputs_of_run(settings["data"], info), info, client),
        dtype=str(settings.get("dtype")),
    )


def _network_of(network: Mapping[str, Any], info: Mapping[str, Any], client: int) -> Mapping[str, Any]:
    """Return the settings of a client's network, which may be one of several."""
    if network["name"] != BY_CLIENT:
        return network
    try:
        found = network["networks"][architecture_of(info, client)]
        return {"name": found} if isinstance(found, str) else dict(found)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RunError(f"The run does not describe the network of client {client}.") from error


def _inputs_of_run(data: Mapping[str, Any], info: Mapping[str, Any]) -> InputSpec:
    """Return the input format that a run recorded, or else that of its data."""
    if isinstance(inputs := info.get("inputs"), dict):
        return _parse_input_spec(inputs)
    if data["name"] not in DATASETS:
        raise RunError("The run did not record its input format; pass its data: ft.load_personal(path, fed=...).")
    return InputSpec.from_federation(build_named("data", data, DATASETS, None).load())


def _inputs_of_client(inputs: InputSpec, info: Mapping[str, Any], client: int) -> InputSpec:
    """Return the input format with the statistics of a client's own table, if each site fitted its own."""
    if inputs.table is None:
        return inputs
    return replace(inputs, table=inputs.table.of_site(str(all_clients(info)[client]["name"])))


def _parse_input_spec(values: Mapping[str, Any]) -> InputSpec:
    input_spec: InputSpec = build_dataclass(
        InputSpec, {"parts": {}, "classes": None} | dict(values), "a model's inputs", "inputs"
    )
    return input_spec


def _is_client_folder(folder: Path) -> bool:
    """Return whether a folder belongs to a deployed client."""
    return (folder / "bundle" / "deployment.toml").is_file()


def _only_run(client_folder: Path) -> Path:
    runs = sorted(path.parent for path in (client_folder / "runs").glob("*/models"))
    if len(runs) != 1:
        several = f"several runs ({', '.join(run.name for run in runs[:5])}); give the folder of one run"
        raise RunError(f"The client folder '{client_folder}' has {several if runs else 'no model yet'}.")
    return runs[0]


def _from_client_folder(
    client_folder: Path, run: Path, moment: str, inputs: InputSpec | None
) -> tuple[ModelInfo, Params]:
    from fedtailor.experiments import deployment as deployments  # does not need Flower

    settings = client_folder / "client.json"
    own = dict(parse_json(read_text(settings, "The client's settings", 2**16))) if settings.is_file() else {}
    deployment = deployments.read_outline(client_folder / "bundle")
    if "network" in own:
        deployment = replace(deployment, network=deployments.client_network(own["network"]))
    spec, described = deployment.inputs, deployment.describe()
    code = deployments.read_own_parts(client_folder / "bundle")  # named, not imported
    described |= {part: settings for part, settings in code.items() if part == "method" or "network" not in own}
    dtype = "int64" if deployment.takes_tokens else "float32"
    inputs = inputs or InputSpec(
        {SINGLE_INPUT: (dtype, tuple(spec.shape))}, spec.classes or None, spec.targets, spec.mean, spec.std,
        class_names=spec.class_names, survival=spec.survival, dtype_is_assumed=not deployment.takes_tokens,
    )  # fmt: skip
    if (client_folder / deployments.TABLE_FILE).is_file():
        table = dict(parse_json(read_text(client_folder / deployments.TABLE_FILE, "The client's table", 2**24)))
        inputs = _parse_input_spec({**inputs.to_json(), **table})
    path = run / "models" / f"{moment}.safetensors"
    if not path.is_file():
        raise RunError(f"The client folder '{client_folder}' has no '{moment}' model of the run {run.name} yet.")
    client, parts = client_folder.resolve().name, (described["method"], described["network"])
    return ModelInfo(run.name, client, moment, *parts, inputs, deployment.dtype), load_tensors(path)


def load_exported(path: Path, inputs: InputSpec | None = None) -> tuple[ModelInfo, Params]:
    """Load an exported safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA_KEY)
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"'{path}' is not a safetensors file; export one: fedtailor export RUN --client 3.") from error
    if text is None:
        hint = "load it from its run folder, or export it: fedtailor export RUN --client 3"
        raise RunError(f"'{path}' has no metadata about its method and network; {hint}.")
    info = ModelInfo.from_json(text)
    return (info if inputs is None else replace(info, inputs=inputs)), load_tensors(path)
