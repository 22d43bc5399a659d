"""The command `fedtailor deploy`, for the operator of a federation and for its clients."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from fedtailor.cli import recovery
from fedtailor.cli.deploy_renew import renew
from fedtailor.cli.deploy_status import progress, status
from fedtailor.cli.deployed_code import (
    AllowPackages,
    confirm_code,
    deployment_from_words,
    freeze_code,
    show_code,
)
from fedtailor.cli.listing import ANY_FLAG, flags_help
from fedtailor.cli.output import out, print_line
from fedtailor.core.augmentation import Augmentation
from fedtailor.core.robust import Robust
from fedtailor.deploy.client import supernode
from fedtailor.deploy.client.client_folder import ClientFolder
from fedtailor.deploy.dummy_client import preview_payload
from fedtailor.deploy.keys import make_keys, open_bundle
from fedtailor.deploy.log_format import LogFormat, print_json, printer, use_log_format
from fedtailor.deploy.selftest import run_selftest
from fedtailor.deploy.server import flower_app, superlink
from fedtailor.deploy.server.operator_folder import (
    check_name,
    mark_as_left,
)
from fedtailor.deploy.server.run_control import RunSupervisor, start_run, stop_run
from fedtailor.deploy.server.state.state import read_state
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.experiments.deployed_code import named_code
from fedtailor.experiments.deployment import SIMULATION_SETTINGS, Deployment
from fedtailor.experiments.deployment_inputs import Inputs
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.runs.reader import is_finished, is_run_folder
from fedtailor.training.channel.channel import Channel

deploy = typer.Typer(help="Run real federations on Flower.", no_args_is_help=True)
_POLL_INTERVAL = 1.0  # seconds between reads of a run's status
_PARTS = {"": Deployment, "inputs": Inputs, "augmentation": Augmentation, "channel": Channel, "robust": Robust}
_FLAGS_HELP = flags_help("a deployment", _PARTS, hidden=(*SIMULATION_SETTINGS, "device", "code"))
Folder = Annotated[Path, typer.Argument(help="the operator's folder")]
LogFormatOption = Annotated[LogFormat, typer.Option(help="of all lines and logs: plain, or one JSON object per line")]
Follow = Annotated[bool, typer.Option("--follow", help="show the progress until the run ends")]


@deploy.callback()
def check_system() -> None:
    """Run real federations on Flower."""
    if sys.platform == "win32":
        why = "because Windows would not protect the folders with keys"
        raise DeployError(f"Federations are not available on Windows, {why}; use Linux, macOS, or WSL.")


@deploy.command(context_settings=ANY_FLAG, epilog=_FLAGS_HELP)
def init(ctx: typer.Context, folder: Folder) -> None:
    """Create the operator's folder of a federation: fedtailor deploy init DIR --method fedapa --network lenet5
    --inputs.shape 1,28,28 --inputs.classes 10 --address fl.example.org:9092 --rounds 50.

    Method, network, and data can be your own code in an installed package: --method my_pkg:MyMethod."""
    deployment = deployment_from_words(ctx.args)
    flower_app.create_operator_folder(folder, deployment)
    if deployment.code:
        show_code(folder, named_code(deployment.describe()))
        print_line("Every client needs the same packages, and must allow this code.")
    _show_payload(deployment)
    print_line(f"See '{folder / 'README.md'}' for the next steps.")


@deploy.command()
def keys(
    folder: Folder,
    clients: Annotated[str, typer.Option(help="names of the clients to enroll, such as a,b,c")] = "",
    allow_code: AllowPackages = None,
) -> None:
    """Create the certificate authority, the server's certificate, and the clients' keys, or enroll more clients."""
    names = [check_name(name.strip()) for name in clients.split(",") if name.strip()]
    if not names and not allow_code:
        raise DeployError("Pass the clients to enroll as --clients a,b,c.")
    if allow_code:
        freeze_code(folder, allow_code)
    for path in make_keys(folder, names) if names else []:
        print_line(f"Send '{path}' to its client over a secure channel, because it contains a key.")


@deploy.command()
def leave(folder: Folder, name: Annotated[str, typer.Argument(help="a client's name")]) -> None:
    """Remove a client permanently: it is no longer selected, and its key is revoked. Its past contributions remain."""
    mark_as_left(folder, name)
    print_line(f"{name} has left; its name cannot be used again.")


@deploy.command()
def server(
    folder: Folder,
    monitoring: Annotated[
        str | None, typer.Option(help="address of /metrics and /health, such as 127.0.0.1:9100")
    ] = None,
    log_format: LogFormatOption = "plain",
) -> None:
    """Serve a federation, in the foreground. After a crash, the next call resumes the run."""
    with log_output("server", log_format) as say:
        superlink.serve(folder, say, monitoring, RunSupervisor(folder, say).check)


@deploy.command()
def start(folder: Folder, follow: Follow = False) -> None:
    """Start the run; training starts when enough clients are online."""
    if is_run_folder(folder / "run"):
        finished = is_finished(folder / "run")
        state = "finished; start another one in a new folder" if finished else "already started; use resume"
        raise DeployError(f"The run in '{folder}' is {state}.")
    _submit(folder, follow)


@deploy.command()
def resume(folder: Folder, follow: Follow = False) -> None:
    """Resume a run that stopped, after its last complete round."""
    if is_finished(folder / "run"):
        raise DeployError(f"The run in '{folder}' is finished; start another one in a new folder.")
    _submit(folder, follow)


@deploy.command()
def stop(folder: Folder) -> None:
    """Stop the run; `resume` continues it."""
    stop_run(folder)
    print_line(f"Stopped. Resume with: fedtailor deploy resume {folder}")


deploy.command()(status)
deploy.command()(renew)


for command in (recovery.rollback, recovery.suspend, recovery.reinstate):
    deploy.command()(command)


@deploy.command()
def client(
    name: Annotated[str, typer.Option(help="the client's enrolled name")],
    bundle: Annotated[Path, typer.Option(help="the file that the operator sent")],
    data: Annotated[
        Path,
        typer.Option(
            help="this client's .npz: x_train, y_train, x_test, y_test; or x, y; a .csv or .parquet with --schema; "
            "a folder with one folder of images per class; a file of Federation.save; or what the deployment's own "
            "loader reads"
        ),
    ],
    folder: Annotated[
        Path | None, typer.Option(help="folder for state and models (default: the client's name)")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, or cuda")] = "auto",
    network: Annotated[
        str | None,
        typer.Option(help="this client's own network if the method allows it: a name, or JSON with name and fields"),
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="the schema of tables that the operator sent (fedtailor tables agree)")
    ] = None,
    allow_code: AllowPackages = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="join without confirmation; own code needs --allow-code, too")
    ] = False,
    log_format: LogFormatOption = "plain",
) -> None:
    """Join a federation and stay in the foreground until stopped. After a restart, the client continues."""
    path = Path(check_name(name)) if folder is None else folder
    # a running client reads its folder for every message
    with log_output("client", log_format) as say, supernode.lock_client_folder(path):
        open_bundle(bundle, path / "bundle", name)
        confirm_code(path, allow_code or [], may_ask=not yes and sys.stdin.isatty())
        own = None if network is None else parse_overrides([f"--network={network}"]).settings["network"]
        client_folder = ClientFolder.create(path, data, device, own, schema)
        sizes = ", ".join(f"{size} {part}" for part, size in client_folder.sizes.items())
        say(f"{name} has {sizes} samples. They stay on this machine.")
        _show_payload(client_folder.deployment, say, tables=log_format == "plain")
        say("The server also learns the numbers of samples, and the loss and scores of this client's models.")
        if not yes and sys.stdin.isatty() and not typer.confirm("Join?"):
            raise typer.Exit(1)
        supernode.keep_connected(path, say)


@deploy.command()
def trial(
    clients: Annotated[int, typer.Option(help="number of clients")] = 3,
    rounds: Annotated[int, typer.Option(help="number of rounds")] = 3,
    method: Annotated[str, typer.Option(help="any method, or an installed one of your own")] = "fedapa",
    folder: Annotated[Path | None, typer.Option(help="folder for all files (default: temporary)")] = None,
) -> None:
    """Test a federation on this machine with real processes, TLS, and keys, and compare it with a simulation."""
    result = run_selftest(clients, rounds, method, folder, print_line)
    title = f"{result.method_title} on digits, {clients} clients, {rounds} rounds, {result.seconds:.0f} s in total"
    table = Table("client", "accuracy, federation", "accuracy, simulation", "models", title=title)
    for row in result.clients:
        models = "equal" if row.equal else "DIFFERENT"
        table.add_row(row.name, f"{row.deployed_score:.1%}", f"{row.simulated_score:.1%}", models)
    out.print(table)
    if not all(row.equal for row in result.clients):
        raise DeployError(
            "The federation's models differ from the simulation's; use --folder to keep all files and compare them."
        )
    print_line("All personal models are bit-identical to the simulation's.")


@contextmanager
def log_output(process: str, log_format: LogFormat) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints sentences in a format; in JSON, errors are objects like other lines."""
    use_log_format(log_format)
    try:
        yield printer(process, print_line)
    except FedTailorError as error:
        if log_format == "plain":
            raise
        print_json(str(error), process, "error")
        raise typer.Exit(2) from error


def _submit(folder: Path, follow: bool) -> None:
    start_run(folder)
    print_line(f"Started. Show the progress with: fedtailor deploy status {folder}")
    if follow:
        _follow(folder)


def _follow(folder: Path) -> None:
    """Print the progress of the run until it ends."""
    printed = ""
    while True:
        state = read_state(folder)
        if (line := progress(state.run)) != printed:
            print_line(printed := line)
        if not (state.is_active or state.resumes):
            raise typer.Exit(0 if state.run["state"] == "finished" else 1)
        time.sleep(_POLL_INTERVAL)


def _show_payload(deployment: Deployment, say: Callable[[str], None] = print_line, tables: bool = True) -> None:
    two, three = (preview_payload(deployment, clients, num_samples=100) for clients in (2, 3))
    for direction, heading in (("down", "The server sends to a client"), ("up", "A client sends to the server")):
        total = sum(tensor.bytes for tensor in two[direction])
        say(f"{heading} in every round: {total:,} bytes")
        if not tables:
            continue
        table = Table("name", "dtype", "shape", Column("bytes", justify="right"))
        for tensor in two[direction]:
            shape = "×".join(map(str, tensor.shape)) or "scalar"
            table.add_row(tensor.name, tensor.dtype, shape, f"{tensor.bytes:,}")
        out.print(table)
        if two[direction] != three[direction]:
            print_line("These sizes are for two clients; they grow with the number of clients.")
