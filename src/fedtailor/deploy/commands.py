"""The command `fedtailor deploy`: for the operator of a federation, and for its clients."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedtailor.deploy import app as flower_app
from fedtailor.deploy import link, node
from fedtailor.deploy.example import Sent, preview
from fedtailor.deploy.folder import check_name, enrolled, leave_for_good, read_status, write_status
from fedtailor.deploy.keys import make_keys, open_bundle, renew_server
from fedtailor.deploy.settings import SIMULATED, Deployment, Inputs, make_deployment, read_deployment
from fedtailor.deploy.site import Site
from fedtailor.deploy.trial import trial as try_out
from fedtailor.errors import Refused
from fedtailor.experiment import field_notes
from fedtailor.files import write
from fedtailor.flags import read_flags
from fedtailor.record import holds_run, is_finished
from fedtailor.untrusted import read_text

deploy = typer.Typer(help="Real federations on Flower.", no_args_is_help=True)
out = Console()
_FREE = {"allow_extra_args": True, "ignore_unknown_options": True}
_LOOK = 1.0  # seconds between looks at a run that is followed
_CHECK = 30.0  # seconds between questions to Flower whether it still runs; each starts a process
_ACTIVE = ("starting", "running", "waiting")
Folder = Annotated[Path, typer.Argument(help="the operator's folder")]


def _flag_help() -> str:
    lines = ["Flags are the fields of a deployment:", ""]
    for prefix, kind in [("", Deployment), ("inputs.", Inputs)]:
        for name, (default, note) in field_notes(kind).items():
            if note and name not in (*SIMULATED, "device"):
                shown = f" ({default})" if default not in ("", "None") else ""
                lines += [f"--{prefix}{name.replace('_', '-')}{shown}  {note}", ""]
    lines += ["--method NAME, --method.FIELD, --network NAME, --network.FIELD: see fedtailor list methods|networks"]
    return "\n".join(lines)


@deploy.command(context_settings=_FREE, epilog=_flag_help())
def init(ctx: typer.Context, folder: Folder) -> None:
    """Make a folder for a federation: fedtailor deploy init DIR --method fedapa --network lenet5 --inputs.shape 1,28,28
    --inputs.classes 10 --address fl.example.org:9092 --rounds 50."""
    flags = read_flags(ctx.args)
    if flags.words:
        raise Refused(f"init takes one folder and flags, not '{flags.words[0]}'.")
    deployment = make_deployment(flags.over({}))
    flower_app.begin(folder, deployment)
    _show_what_crosses(deployment)
    _say(f"'{folder / 'README.md'}' says how to go on.")


@deploy.command()
def keys(
    folder: Folder,
    clients: Annotated[str, typer.Option(help="names of clients to enrol, such as a,b,c")] = "",
    renew: Annotated[bool, typer.Option("--renew", help="a new certificate for the server")] = False,
) -> None:
    """Make the authority, the server's certificate and the clients' keys; later, enrol more clients."""
    names = [check_name(name.strip()) for name in clients.split(",") if name.strip()]
    if not names and not renew:
        raise Refused("Say whom to enrol, --clients a,b,c, or --renew.")
    written = renew_server(folder) if renew else []
    if renew:
        _say("The server has a new certificate; start it again.")
    for path in (*written, *(make_keys(folder, names) if names else [])):
        _say(f"Give '{path}' to its client, over a safe way: it holds a key.")


@deploy.command()
def leave(folder: Folder, name: Annotated[str, typer.Argument(help="a client's name")]) -> None:
    """Let a client leave for good: it is not asked any more, and its key opens nothing. What it gave stays given."""
    leave_for_good(folder, name)
    _say(f"{name} has left; a name is never used again.")


@deploy.command()
def server(folder: Folder) -> None:
    """Serve a federation, in the foreground."""
    link.serve(folder, _say)


@deploy.command()
def start(
    folder: Folder, follow: Annotated[bool, typer.Option("--follow", help="and tell how it goes")] = False
) -> None:
    """Start the run; it begins when enough clients are there."""
    if holds_run(folder / "run"):
        done = "finished; begin another in a new folder" if is_finished(folder / "run") else "begun; resume it"
        raise Refused(f"The run in '{folder}' is {done}.")
    _submit(folder, follow)


@deploy.command()
def resume(
    folder: Folder, follow: Annotated[bool, typer.Option("--follow", help="and tell how it goes")] = False
) -> None:
    """Go on with a run that stopped, after its last complete round."""
    if is_finished(folder / "run"):
        raise Refused(f"The run in '{folder}' is finished.")
    _submit(folder, follow)


@deploy.command()
def stop(folder: Folder) -> None:
    """Stop the run; `resume` goes on with it."""
    run = _run_number(folder)
    if run is None or not _is_active(folder):
        raise Refused(f"No run of '{folder}' is going on.")
    link.stop(folder, run)
    _say(f"Stopped; go on with: fedtailor deploy resume {folder}")


@deploy.command()
def status(folder: Folder) -> None:
    """Say how the run goes and who is there."""
    try:
        told, there = _told(folder), link.nodes(folder)
    except Refused as refusal:  # the server is not there, but what it left is
        told, there = {"state": "not started"} | read_status(folder), {}
        if told["state"] in _ACTIVE:
            told |= {"state": "stopped", "why": "its server is not there"}
        _say(str(refusal))
    _say(_sentence(told))
    table = Table()
    for column in ("client", "connection", "in the run", "last round"):
        table.add_column(column)
    for name in enrolled(folder):
        member = "yes" if name in told.get("members", []) else told.get("refused", {}).get(name, "not yet")
        row = (name, there.get(name, "unknown"), member, told.get("last_round", {}).get(name, ""))
        table.add_row(*map(escape, row))
    out.print(table)


@deploy.command()
def client(
    name: Annotated[str, typer.Option(help="as it is enrolled")],
    bundle: Annotated[Path, typer.Option(help="the file that the operator gave")],
    data: Annotated[Path, typer.Option(help="this client's .npz: x_train, y_train, x_test, y_test; or x, y")],
    folder: Annotated[Path | None, typer.Option(help="where to keep state and models (the client's name)")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    yes: Annotated[bool, typer.Option("--yes", help="do not ask before joining")] = False,
) -> None:
    """Take part in a federation, in the foreground, until it is stopped; a restart goes on where it was."""
    site = Path(check_name(name)) if folder is None else folder
    with node.alone_in(site):  # one that is at work reads its folder with every message
        open_bundle(bundle, site / "bundle", name)
        here = Site.begin(site, data, device)
        count = ", ".join(f"{count} {part}" for part, count in here.sizes.items())
        _say(f"{name} has {count} samples; they stay here.")
        _show_what_crosses(here.deployment)
        _say("Besides, the server learns how many samples there are, and the loss and scores of this client's models.")
        if not yes and sys.stdin.isatty() and not typer.confirm("Join?"):
            raise typer.Exit(1)
        node.keep_connected(site, _say)


@deploy.command()
def trial(
    clients: Annotated[int, typer.Option(help="how many")] = 3,
    rounds: Annotated[int, typer.Option(help="how many")] = 3,
    method: Annotated[str, typer.Option(help="any method")] = "fedapa",
    folder: Annotated[Path | None, typer.Option(help="where to keep it all; else it is removed")] = None,
) -> None:
    """Try a federation on this machine: real processes, TLS and keys, and the same models as a simulation to the last
    bit."""
    found = try_out(clients, rounds, method, folder, _say)
    table = Table(title=f"{method} on digits, {clients} clients, {rounds} rounds, {found.seconds:.0f} s in all")
    for column in ("client", "accuracy, federation", "accuracy, simulation", "models"):
        table.add_column(column)
    for row in found.rows:
        table.add_row(row.name, f"{row.deployed:.1%}", f"{row.simulated:.1%}", "equal" if row.equal else "DIFFERENT")
    out.print(table)
    if not all(row.equal for row in found.rows):
        raise Refused("The federation's models are not the simulation's; keep the folder (--folder) and look.")
    _say("Every personal model is the simulation's, bit for bit.")


def _submit(folder: Path, follow: bool) -> None:
    read_deployment(folder)
    if not enrolled(folder):
        raise Refused(f"Nobody is enrolled; make keys first: fedtailor deploy keys {folder} --clients a,b,c.")
    if _is_active(folder):
        raise Refused(f"The run in '{folder}' is going on; see fedtailor deploy status {folder}.")
    before = read_status(folder)
    write_status(folder, before | {"state": "starting", "why": "", "at": time.time()})  # it says more when it runs
    try:
        run = link.submit(folder)
    except Refused:
        write_status(folder, before)
        raise
    write(folder / "home" / "run", str(run).encode())
    _say(f"Started; fedtailor deploy status {folder} says how it goes.")
    if follow:
        _follow(folder)


def _follow(folder: Path) -> None:
    """Tell how the run goes until it ends."""
    said, checked = "", time.monotonic()
    while True:
        told = read_status(folder)
        if time.monotonic() > checked + _CHECK:
            told, checked = _told(folder), time.monotonic()
        if (sentence := _sentence(told)) != said:
            _say(said := sentence)
        if told["state"] in ("finished", "stopped"):
            raise typer.Exit(0 if told["state"] == "finished" else 1)
        time.sleep(_LOOK)


def _run_number(folder: Path) -> int | None:
    path = folder / "home" / "run"
    return int(read_text(path, "The run's number", 100)) if path.is_file() else None


def _is_active(folder: Path) -> bool:
    run = _run_number(folder)
    try:
        return run is not None and not link.run_state(folder, run).startswith("finished")
    except Refused as refusal:
        if "Run ID not found" in str(refusal):  # Flower's database is another by now
            return False
        raise


def _told(folder: Path) -> dict[str, Any]:
    """What the run last said; one that ended without a word was killed."""
    told = {"state": "not started"} | read_status(folder)
    if told["state"] in _ACTIVE and not _is_active(folder):
        return read_status(folder) | {"state": "stopped", "why": f"its process ended; fedtailor deploy resume {folder}"}
    return told


def _sentence(told: dict[str, Any]) -> str:
    where = f", {told['round']} of {told['rounds']} rounds done" if "rounds" in told else ""
    why = f": {told['why']}" if told.get("why") else ""
    return f"{str(told['state']).capitalize()}{where}{why}"


def _show_what_crosses(deployment: Deployment) -> None:
    few, more = (preview(deployment, clients, own_size=100) for clients in (2, 3))
    for way, words in (("down", "The server sends to a client"), ("up", "A client sends to the server")):
        grows = few[way] != more[way]
        total = sum(sent.bytes for sent in few[way])
        _say(f"{words}, every round: {total:,} bytes")
        table = Table()
        for column in ("name", "numbers", "shape", "bytes"):
            table.add_column(column, justify="right" if column == "bytes" else "left")
        for sent in few[way]:
            table.add_row(*_row(sent))
        out.print(table)
        if grows:
            _say("With two clients; it grows with their number.")


def _row(sent: Sent) -> tuple[str, str, str, str]:
    return sent.name, sent.kind, "×".join(map(str, sent.shape)) or "one number", f"{sent.bytes:,}"


def _say(sentence: str) -> None:
    out.print(sentence, markup=False, highlight=False, soft_wrap=True)
