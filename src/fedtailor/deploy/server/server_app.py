"""The ServerApp that Flower starts on the server's machine for a run."""

import logging
import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedtailor.deploy.server.coordinator import coordinate
from fedtailor.deploy.server.mailbox import Mailbox

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation in the folder FEDTAILOR_DEPLOYMENT; only the process that starts the server sets it."""
    logging.basicConfig(level=logging.INFO)
    folder = Path(os.environ["FEDTAILOR_DEPLOYMENT"])
    coordinate(folder, Mailbox(grid, folder))
