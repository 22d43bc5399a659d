"""Options of the commands that import the user's own code, which a folder or a file names."""

from typing import Annotated

import typer

OwnMethod = Annotated[str | None, typer.Option("--method", help="the run's own method, module:class")]
OwnNetwork = Annotated[str | None, typer.Option("--network", help="the run's own network, module:class or function")]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="import all code that the folder or file names")]
OwnData = Annotated[str | None, typer.Option("--data", help="the run's own loader of data, module:function")]
