"""The Flower app of a run, which consists of a few lines: Flower sends it to all clients.

The server executes it. Clients never do: they compare its hash with that of the app of their own installation, and
reject a run with another one.
"""

from functools import cache
from hashlib import sha256

from fedtailor.errors import DeployError
from fedtailor.version import VERSION

_PROJECT = f"""\
[project]
name = "federation"
version = "{VERSION}"
description = "A FedTailor federation"
license = "Apache-2.0"
dependencies = []  # all machines have FedTailor installed, so nothing is downloaded when a run starts

[tool.flwr.app]
publisher = "fedtailor"

[tool.flwr.app.components]
serverapp = "federation.server_app:app"
clientapp = "federation.client_app:app"

[tool.flwr.app.config]
"""

_SERVER_APP = """\
from fedtailor.deploy.server.server_app import app

__all__ = ["app"]
"""

# Flower requires a ClientApp. It works only with `fedtailor deploy client`, which does not execute it.
_CLIENT_APP = """\
raise ImportError("Start this client with: fedtailor deploy client")
"""


@cache
def build_app() -> bytes:
    """Return the app as Flower sends it; its bytes depend on the versions of FedTailor and Flower only."""
    from flwr.cli.build import build_fab_from_files  # imports for a second

    files = {"__init__.py": "", "server_app.py": _SERVER_APP, "client_app.py": _CLIENT_APP}
    package = {f"federation/{name}": text.encode() for name, text in files.items()}
    app: bytes = build_fab_from_files({"pyproject.toml": _PROJECT.encode(), **package})[0]
    return app


def check_app(found: str) -> None:
    """Raise an error unless the SHA-256 is that of the app of this installation.

    >>> check_app("0" * 64)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The server's app (SHA-256 000000000000) is not that of FedTailor ...
    """
    own = sha256(build_app()).hexdigest()
    if found != own:
        fix = "nothing of it was executed; install the same versions of FedTailor and Flower on both sides"
        raise DeployError(
            f"The server's app (SHA-256 {found[:12]}) is not that of FedTailor {VERSION} ({own[:12]}); {fix}."
        )
