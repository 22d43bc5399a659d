"""The commands report, track, and live."""

from pathlib import Path
from typing import Annotated

import typer

_Runs = Annotated[list[Path], typer.Argument(help="run folders, or folders of runs as written by compare and sweep")]
_RunsOrResults = Annotated[
    list[Path],
    typer.Argument(help="run folders, folders of runs, or results of papers such as results/papers/fedapa.jsonl"),
]


def report(
    runs: _RunsOrResults,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the file to write (report.html)")] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="write the figures as image files for papers; the report only with --out", metavar="FOLDER"),
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="of --figures: svg, pdf, png")] = "svg,pdf,png",
) -> None:
    """Write an HTML report with figures, or the figures as image files.

    It shows which method scores highest, whether the difference is significant,
    which clients gain over local training, which clients learn from each other,
    and the costs. On results of papers, it shows the papers' values beside ours,
    and which claims hold. The report is one file that needs no network.
    """
    from fedtailor.reporting.figure_files import check_formats, save_figures
    from fedtailor.reporting.paper_report import build_paper_page, is_results_file
    from fedtailor.reporting.report import build_page, check_report_file, main_finding, save_report
    from fedtailor.runs.reader import load_runs

    if out is None and figures is None:
        out = Path("report.html")
    chosen = [name.strip().lower() for name in formats.split(",") if name.strip()]
    check_formats(chosen)
    if out is not None:
        check_report_file(out)
    page = build_paper_page(runs) if any(map(is_results_file, runs)) else build_page(*load_runs(runs))
    typer.echo(main_finding(page))
    if out is not None:
        save_report(page, out)
        typer.echo(f"Report saved to {out} ({out.stat().st_size / 1e6:.1f} MB)")
    if figures is not None:
        number = len({path.stem for path in save_figures(page, figures, chosen)})
        typer.echo(f"{number} figures saved in {figures} as {', '.join(chosen)}; captions.md contains their captions")


def track(
    runs: _Runs,
    tensorboard: Annotated[Path | None, typer.Option(help="a log folder for TensorBoard", metavar="FOLDER")] = None,
    mlflow: Annotated[str | None, typer.Option(help="an MLflow store: sqlite:///mlflow.db, http://...")] = None,
    experiment: Annotated[str | None, typer.Option(help="the experiment's name in MLflow (fedtailor)")] = None,
    artifacts: Annotated[bool, typer.Option("--artifacts", help="also send finished runs' files to MLflow")] = False,
    wandb: Annotated[str | None, typer.Option(help="a project of Weights & Biases", metavar="[ENTITY/]PROJECT")] = None,
    wandb_mode: Annotated[
        str | None, typer.Option(help="of W&B: online, or offline for 'wandb sync' (WANDB_MODE, or online)")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="keep sending new rounds until Ctrl-C")] = False,
) -> None:
    """Send runs to TensorBoard, MLflow, or W&B. Repeated calls send only what is new."""
    from fedtailor.reporting.trackers.track import track as send

    try:
        send(runs, tensorboard=tensorboard, mlflow=mlflow, experiment=experiment, artifacts=artifacts, wandb=wandb,
             wandb_mode=wandb_mode, follow=follow, echo=typer.echo)  # fmt: skip
    except KeyboardInterrupt:
        typer.echo("Stopped. Run the same command again to continue.")


def live(
    folder: Annotated[Path, typer.Argument(help="the folder with runs, at any depth")] = Path("runs"),
    port: Annotated[int | None, typer.Option(help="default: 8317, or a free port", min=0, max=65535)] = None,
    host: Annotated[
        str, typer.Option(help="the address to listen on; beyond loopback, others with the token have access")
    ] = "127.0.0.1",
    show: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
) -> None:
    """Serve a local page that follows runs and compares them.

    The page also shows single clients, and it starts and stops experiments.
    Ctrl-C stops the page, not the experiments.
    """
    from fedtailor.reporting.dashboard.server import serve

    serve(folder, host, port, show, typer.echo)
