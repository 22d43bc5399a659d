"""What Flower starts on the server's machine for a run."""

import logging
import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedtailor.deploy.conduct import conduct
from fedtailor.deploy.post import Post

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """The run of the folder in FEDTAILOR_DEPLOYMENT; nobody but who starts the server says which that is."""
    logging.basicConfig(level=logging.INFO)
    folder = Path(os.environ["FEDTAILOR_DEPLOYMENT"])
    conduct(folder, Post(grid, folder))
