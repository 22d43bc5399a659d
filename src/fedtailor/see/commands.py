"""Commands that read runs: report, live, export, predict, track. They read flags, ask the library, and print."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="runs, or folders of runs as compare and sweep leave them")],
    out: Annotated[Path, typer.Option("--out", "-o", help="the file to write")] = Path("report.html"),
) -> None:
    """Write a report one looks at: which method is best and how sure that is, who gains over training alone, who learns
    from whom, what it cost. One file that needs no network."""
    from fedtailor.see.report import write_report

    typer.echo(write_report(runs, out))
    typer.echo(f"The report lies in {out} ({out.stat().st_size / 1e6:.1f} MB)")


def track(
    runs: Annotated[list[Path], typer.Argument(help="runs, or folders of runs as compare and sweep leave them")],
    tensorboard: Annotated[Path | None, typer.Option(help="a folder that TensorBoard shows", metavar="FOLDER")] = None,
    mlflow: Annotated[str | None, typer.Option(help="an MLflow store: sqlite:///mlflow.db, http://...")] = None,
    experiment: Annotated[str | None, typer.Option(help="its name in MLflow (fedtailor)")] = None,
    artifacts: Annotated[bool, typer.Option("--artifacts", help="finished runs' files too, to MLflow")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="go on while runs are written; Ctrl-C ends it")] = False,
) -> None:
    """Send runs to TensorBoard or MLflow; called again, it adds what is new."""
    from fedtailor.tracking.track import track as send

    try:
        send(
            runs,
            tensorboard=tensorboard,
            mlflow=mlflow,
            experiment=experiment,
            artifacts=artifacts,
            follow=follow,
            say=typer.echo,
        )
    except KeyboardInterrupt:
        typer.echo("Stopped; the same command goes on.")


def export(
    run: Annotated[Path, typer.Argument(help="a run's folder, a real client's, or a safetensors file of a model")],
    client: Annotated[int | None, typer.Option(help="the client's number in the run")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="every client's model, into a folder")] = False,
    format: Annotated[str | None, typer.Option(help="safetensors, onnx or pt2; else as --out ends")] = None,
    moment: Annotated[str, typer.Option(help="trained, or received: after the last averaging")] = "trained",
    inputs: Annotated[str | None, typer.Option(help="the samples' dtype, uint8 say, if not the run's")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the file to write; with --all, a new folder")] = None,
) -> None:
    """Write a client's own model for other programs: a state_dict, ONNX or torch's exported program. What is written is
    read back, and must answer as the model does."""
    from fedtailor.personal.export import export_command

    typer.echo(export_command(run, client, everyone, format, moment, inputs, out))


def predict(
    run: Annotated[Path, typer.Argument(help="a run's folder, a real client's, or an exported model")],
    file: Annotated[Path, typer.Argument(help="samples: .npz, .npy, a picture, or a folder of pictures")],
    client: Annotated[int | None, typer.Option(help="the client's number in the run")] = None,
    moment: Annotated[str, typer.Option(help="trained, or received: after the last averaging")] = "trained",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="all of it, as .csv or .npz")] = None,
) -> None:
    """Say what a client's own model makes of samples in a file."""
    from fedtailor.personal.module import load_personal
    from fedtailor.personal.prediction import predict_command

    predict_command(load_personal(run, client, moment), file, out)


def live(
    folder: Annotated[Path, typer.Argument(help="the folder that runs lie in, itself or in folders of it")] = Path(
        "runs"
    ),
    port: Annotated[int | None, typer.Option(help="by default 8317, or a free one", min=0, max=65535)] = None,
    host: Annotated[
        str, typer.Option(help="another address than loopback lets others in who have the token")
    ] = "127.0.0.1",
    show: Annotated[bool, typer.Option("--open", help="open it in the browser, if there is one")] = False,
) -> None:
    """Serve a page on this machine that follows running experiments, compares runs, shows their clients, and starts and
    stops experiments. Ctrl-C ends the page, not the experiments."""
    from fedtailor.see.live import serve

    serve(folder, host, port, show, typer.echo)


def add_to(app: typer.Typer) -> None:
    """Make the commands part of `fedtailor`."""
    commands: list[Callable[..., None]] = [report, track, export, predict, live]
    for command in commands:
        app.command()(command)
