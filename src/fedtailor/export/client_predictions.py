"""Predictions of all clients of a run in one table: each client's personal model on its own test samples, or on a file.

| column | content |
|---|---|
| client, name | the client's number and name |
| sample | the sample's index in the federation (`fed.x[sample]`), or its name in the file |
| target | the true class or number; absent for a file |
| prediction | the predicted class or number |
| probability, probability_CLASS | the probability of the predicted class and of every class; absent for regression |

Classes are numbers, or names if the data has them. Several numbers per sample have columns target_0 and so on.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtailor.analysis.table_formats import escape_formula
from fedtailor.core.batch import take_samples
from fedtailor.core.client_models import AnyModelLike
from fedtailor.core.code_reference import is_reference
from fedtailor.core.method import Method
from fedtailor.data.datasets import DATASETS
from fedtailor.data.federation import Federation
from fedtailor.data.input_spec import InputSpec
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.experiment import make_experiment
from fedtailor.experiments.own_code import CodeConsent, rename_part
from fedtailor.export.model_source import model_info
from fedtailor.export.personal_model import HOW_TO_CONSENT, PersonalModel, build_personal_model, own_network
from fedtailor.export.prediction import Predictions, predict_samples, read_samples
from fedtailor.runs.files import atomic_file, write_errors
from fedtailor.runs.reader import load_run
from fedtailor.runs.run import Run, all_clients
from fedtailor.training.fingerprint import data_fingerprint
from fedtailor.training.held_out import split_clients

_GROUP_ROWS = 10_000  # rows of a .parquet file that are written together
Table = dict[str, list[Any]]  # column -> values


@dataclass(frozen=True)
class ClientPredictions:
    """The predictions of one client's personal model."""

    client: int
    name: str
    predictions: Predictions
    targets: Tensor | None = None  # None: the samples are from a file

    def columns(self) -> Table:
        """Return the columns of the table; the module describes them.

        >>> import torch
        >>> outputs = Predictions([7], torch.tensor([[0.0, 0.0]]), classify=True, class_names=["cat", "dog"])
        >>> ClientPredictions(3, "ann", outputs, torch.tensor([1])).columns()["target"]
        ['dog']
        """
        found = self.predictions
        count = len(found.samples)
        table: Table = {"client": [self.client] * count, "name": [self.name] * count, "sample": list(found.samples)}
        if not found.classify:
            return table | _number_columns("target", self.targets) | _number_columns("prediction", found.outputs)
        if self.targets is not None:
            table["target"] = [found.labels[label] for label in self.targets.tolist()]
        best = found.probabilities.max(1)
        table["prediction"] = [found.labels[label] for label in best.indices.tolist()]
        table["probability"] = best.values.tolist()
        columns = found.probabilities.T.tolist()
        return table | {f"probability_{label}": values for label, values in zip(found.labels, columns, strict=True)}


def _number_columns(name: str, values: Tensor | None) -> Table:
    if values is None:
        return {}
    columns = values.reshape(len(values), -1).T.tolist()
    return {name: columns[0]} if len(columns) == 1 else {f"{name}_{i}": column for i, column in enumerate(columns)}


def predict_clients(
    run: str | Path | Run,
    file: str | Path | None = None,
    moment: str = "trained",
    *,
    method: Method | str | None = None,
    model: AnyModelLike | str | None = None,
    fed: Federation | str | None = None,
    allow_code: bool = False,
    decimal: str | None = None,
    date_format: str | None = None,
) -> Iterator[ClientPredictions]:
    """Return the predictions of every client's personal model, computed one client at a time.

    Each model predicts the client's own test samples or, if `file` is given, the samples in it. `run` is a run or its
    folder. Data that the run names, such as digits or a folder, is loaded again and must be unchanged; pass your own
    arrays as `fed`, and your own code as in `ft.resume`: objects, names such as "my_module:load", or `allow_code`.
    `decimal` and `date_format` are those of a file with a table.

    >>> import fedtailor as ft
    >>> fed = ft.load("digits", clients=4)
    >>> run = ft.simulate(ft.methods.FedAvg(), ft.network("logistic", fed), fed, rounds=1)
    >>> [one.client for one in predict_clients(run, fed=fed)]
    [0, 1, 2, 3]
    """
    run = run if isinstance(run, Run) else load_run(run)
    if file is not None:
        given = fed if isinstance(fed, Federation) else None
        models = _models(run, moment, method, model, given, allow_code)
        return _predict_file(models, run, Path(file), decimal=decimal, date_format=date_format)
    fed = fed if isinstance(fed, Federation) else _load_data(run, fed, allow_code)
    training, held_out = split_clients(fed, run.experiment.get("held_out_clients"), run.experiment["seed"])
    _check_data(run, training, held_out)
    groups = [training] if held_out is None else [training, held_out]  # in this order, the run numbers its clients
    names, test = ([value for group in groups for value in getattr(group, part)] for part in ("names", "test"))
    return _predict_test_data(_models(run, moment, method, model, fed, allow_code), fed, names, test)


def save_predictions(predictions: Iterable[ClientPredictions], path: str | Path) -> int:
    """Write predictions to one .csv or .parquet file, and return their number.

    >>> save_predictions([], "predictions.txt")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: 'predictions.txt' must end with .csv or .parquet.
    """
    path = Path(path)
    writers = {".csv": _write_csv, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise ConfigError(f"'{path.name}' must end with .csv or .parquet.")
    tables = (one.columns() for one in predictions if len(one.predictions.samples))
    with write_errors(f"'{path}' cannot be written"), atomic_file(path) as temporary:
        count = writers[path.suffix](temporary, tables)
        if not count:
            raise RunError("No client has test samples, so there are no predictions.")
        return count


def _models(
    run: Run,
    moment: str,
    method: Method | str | None,
    model: AnyModelLike | str | None,
    fed: Federation | None,
    allow_code: bool,
) -> Iterator[PersonalModel]:
    inputs = None if fed is None else InputSpec.from_federation(fed)
    name = "run" if run.folder is None else run.folder.resolve().name
    for client in range(len(all_clients(run.info))):
        state = {path: leaf.cpu() for path, leaf in run.personal(client, moment).items()}
        info = model_info(name, run.experiment, run.info, client, moment, inputs)
        own = own_network(model, run.info, client)
        yield build_personal_model(info, state, method, own, f"The model of client {client}", allow_code)


def _predict_test_data(
    models: Iterator[PersonalModel], fed: Federation, names: Sequence[str], test: Sequence[Tensor]
) -> Iterator[ClientPredictions]:
    for client, (model, name, own) in enumerate(zip(models, names, test, strict=True)):
        if len(own):
            found = predict_samples(model, model.info, own.tolist(), take_samples(fed.x, own))
            yield ClientPredictions(client, name, found, fed.y[own])


def _predict_file(
    models: Iterator[PersonalModel], run: Run, path: Path, **writing: str | None
) -> Iterator[ClientPredictions]:
    samples, inputs = None, None
    for client, model in enumerate(models):
        if samples is None or inputs != model.info.inputs:  # tables may be standardized by each client's own rows
            samples, inputs = read_samples(path, model.info.inputs, **writing), model.info.inputs
        found = predict_samples(model, model.info, *samples)
        yield ClientPredictions(client, str(all_clients(run.info)[client]["name"]), found)


def _load_data(run: Run, loader: str | None, allow_code: bool) -> Federation:
    """Load the run's data again; `loader` is the name of the user's own code, if the user named it again."""
    data = run.experiment["data"] if loader is None else rename_part("data", run.experiment["data"], loader)
    if data["name"] not in DATASETS and not is_reference(data["name"]):
        raise RunError(f"The run's data '{data['name']}' is not built in; pass it: predict_clients(path, fed=...).")
    consent = CodeConsent(frozenset() if loader is None else frozenset({loader}), allow_code, HOW_TO_CONSENT)
    return make_experiment({"data": data, "seed": run.experiment["seed"]}, consent).load()


def _check_data(run: Run, fed: Federation, held_out: Federation | None) -> None:
    """Raise an error unless these are the training clients and the held-out clients of the run."""
    if run.info["fingerprint"].get("data") != data_fingerprint(fed, held_out):
        raise RunError("The data differs from the data of the run, so it would not give the run's test samples.")


def _write_csv(path: Path, tables: Iterable[Table]) -> int:
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for table in tables:
            if not count:
                writer.writerow(table)
            writer.writerows([escape_formula(value) for value in row] for row in zip(*table.values(), strict=True))
            count += len(table["client"])
    return count


def _write_parquet(path: Path, tables: Iterable[Table]) -> int:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("A .parquet file needs: pip install 'fedtailor[parquet]'; or save as .csv.") from error
    writer, count = None, 0
    try:
        for table in _joined(tables):
            rows = pa.table(table) if writer is None else pa.table(table, schema=writer.schema)
            writer = parquet.ParquetWriter(path, rows.schema) if writer is None else writer
            writer.write_table(rows)
            count += len(rows)
    finally:
        if writer is not None:
            writer.close()
    return count


def _joined(tables: Iterable[Table]) -> Iterator[Table]:
    """Join the tables of successive clients, because many small groups of rows make a .parquet file large and slow."""
    joined: Table = {}
    for table in tables:
        for name, values in table.items():
            joined.setdefault(name, []).extend(values)
        if len(joined["client"]) >= _GROUP_ROWS:
            yield joined
            joined = {}
    if joined:
        yield joined
