"""`fedtailor deploy renew`: new certificates and keys."""

from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.output import print_line
from fedtailor.deploy.keys import renew_client_key, renew_server_certificate
from fedtailor.errors import DeployError


def renew(
    folder: Annotated[Path, typer.Argument(help="the operator's folder")],
    client: Annotated[str | None, typer.Option(help="give this client a new key instead")] = None,
    now: Annotated[
        bool, typer.Option("--now", help="end the client's old key at once, not when the new one is first used")
    ] = False,
) -> None:
    """Renew the server's certificate, or the key of a client. A running server notices both within seconds."""
    if client is not None:
        bundle = renew_client_key(folder, client, now)
        print_line(f"Send '{bundle}' to its client over a secure channel, because it contains a key.")
        end = "The old key is no longer valid." if now else "The old key is valid until the new one is first used."
        print_line(end)
        return
    if now:
        raise DeployError("--now applies to the key of a client; pass --client NAME.")
    changed = renew_server_certificate(folder)
    print_line("The server has a new certificate; a running server uses it within seconds.")
    for path in changed:
        print_line(f"Send '{path}' to its client over a secure channel, because it contains a key.")
