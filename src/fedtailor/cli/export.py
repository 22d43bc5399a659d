"""The commands export and predict."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Column, Table

from fedtailor.cli import output
from fedtailor.cli.own_code import AllowCode, OwnData, OwnMethod, OwnNetwork
from fedtailor.errors import ConfigError
from fedtailor.runs.files import safe_file_name
from fedtailor.runs.run import method_label

if TYPE_CHECKING:
    from fedtailor.export.prediction import Predictions

_MAX_ROWS = 50  # predictions shown in the terminal

_Client = Annotated[int | None, typer.Option(help="the client's number in the run")]
_Moment = Annotated[str, typer.Option(help="trained, or received (after the last aggregation)")]


def export(
    run: Annotated[Path, typer.Argument(help="a run folder, a deployed client's folder, or a safetensors model file")],
    client: _Client = None,
    all_clients: Annotated[bool, typer.Option("--all", help="export all clients' models into a folder")] = False,
    format: Annotated[str | None, typer.Option(help="safetensors, onnx, or pt2; default: the suffix of --out")] = None,
    moment: _Moment = "trained",
    inputs: Annotated[str | None, typer.Option(help="the dtype of the inputs, such as uint8, if not the run's")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the file to write; with --all, a new folder")] = None,
    method: OwnMethod = None,
    network: OwnNetwork = None,
    allow_code: AllowCode = False,
) -> None:
    """Export a client's personal model as safetensors (a state_dict), ONNX, or a PyTorch exported program.

    The written file is read back, and its outputs must match those of the model.
    If the method or the network is your own code, name it again or pass
    --allow-code.
    """
    from fedtailor.export.personal_model import load_all_personal, load_personal
    from fedtailor.export.writers import client_file_name, export_model, export_models, require_personal

    if all_clients and client is not None:
        raise ConfigError("export takes either --client or --all, not both.")
    suffix = "" if out is None or all_clients else out.suffix.removeprefix(".")
    format = format or suffix or "safetensors"
    moment_suffix = "" if moment == "trained" else f"-{moment}"
    own: dict[str, Any] = {"method": method, "model": network, "allow_code": allow_code}
    if all_clients:
        folder = out or Path(f"{run.resolve().name}-models{moment_suffix}")
        export_models(load_all_personal(run, moment, **own), folder, format, input_dtype=inputs)
        count = len([*folder.iterdir()])
        typer.echo(f"Saved the models of all {count} clients in {folder}; their outputs match the run.")
        return
    model = load_personal(run, client, moment, **own)
    info = require_personal(model).info
    path = out or Path(f"{safe_file_name(info.run)}-client-{client_file_name(info)}{moment_suffix}.{format}")
    export_model(model, path, format, input_dtype=inputs)
    owner = f"client {info.client} ({method_label(info.method)}, {info.moment})"
    typer.echo(f"Saved the model of {owner} to {path}; its outputs match the run.")


def predict(
    run: Annotated[Path, typer.Argument(help="a run folder, a deployed client's folder, or an exported model")],
    file: Annotated[
        Path | None,
        typer.Argument(
            help="the samples: .csv, .parquet, .npz, .npy, an image, or a folder of images; with --all optional"
        ),
    ] = None,
    client: _Client = None,
    all_clients: Annotated[
        bool, typer.Option("--all", help="all clients, each on its own test samples unless there is a file of samples")
    ] = False,
    moment: _Moment = "trained",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="save all predictions as .csv or .npz; with --all: .csv, .parquet"),
    ] = None,
    decimal: Annotated[
        str | None, typer.Option(help="decimal separator of a table; default: found in the file")
    ] = None,
    date_format: Annotated[
        str | None, typer.Option(help="format of a table's dates, such as %d/%m/%Y; default: found in the file")
    ] = None,
    method: OwnMethod = None,
    network: OwnNetwork = None,
    data: OwnData = None,
    allow_code: AllowCode = False,
) -> None:
    """Make predictions for the samples in a file with a client's personal model.

    With --all, save the predictions of all clients' personal models in one file.
    If the method, the network, or the data are your own code, name them again
    or pass --allow-code.
    """
    from fedtailor.export.personal_model import load_personal
    from fedtailor.export.prediction import predict as predict_file

    if out is not None and file is not None and out.exists() and out.samefile(file):
        raise ConfigError(f"'{out}' contains the samples. Choose another file with --out.")
    writing = {"decimal": decimal, "date_format": date_format}
    if all_clients:
        own: dict[str, Any] = {"method": method, "model": network, "fed": data, "allow_code": allow_code}
        return _predict_all(run, file, client, moment, out, own | writing)
    if file is None:
        raise ConfigError("predict needs a file of samples, or --all for all clients and their test samples.")
    model = load_personal(run, client, moment, method=method, model=network, allow_code=allow_code)
    predictions = predict_file(model, file, **writing)
    if out is not None:
        predictions.save(out)
    output.out.print(_predictions_table(predictions))
    count = len(predictions.samples)
    if out is not None:
        output.print_line(f"Saved {count:,} predictions to {out}" if count > 1 else f"Saved the prediction to {out}")
    elif count > _MAX_ROWS:
        output.print_line(f"{count - _MAX_ROWS:,} more predictions are not shown; --out saves all of them.")
    return None


def _predict_all(
    run: Path, file: Path | None, client: int | None, moment: str, out: Path | None, own: Mapping[str, Any]
) -> None:
    from fedtailor.export.client_predictions import predict_clients, save_predictions

    if client is not None:
        raise ConfigError("predict takes either --client or --all, not both.")
    if out is None:
        raise ConfigError("predict --all saves its predictions in a file; add --out predictions.csv, or .parquet.")
    count = save_predictions(predict_clients(run, file, moment, **own), out)
    samples = "their test samples" if file is None else f"the samples in {file}"
    output.print_line(f"Saved {count:,} predictions of all clients for {samples} to {out}")


def _predictions_table(predictions: "Predictions") -> Table:
    heads, rows = predictions.rows()
    first, *others = (head.replace("_", " ") for head in heads)
    table = Table(first, *(Column(head, justify="right") for head in others), box=box.SIMPLE)
    for row in rows[:_MAX_ROWS]:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else escape(str(value)) for value in row))
    return table
