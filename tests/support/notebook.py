"""A notebook's kernel in this process."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


class Kernel(InteractiveShell):
    """A shell that looks like that of a notebook: it has a kernel, and keeps what its cells show."""

    kernel = object()

    @property
    def outputs(self) -> list[Any]:
        """What the cells show: one entry per output or update."""
        assert isinstance(self.display_pub, CapturingDisplayPublisher)
        return list(self.display_pub.outputs)

    def format(self, shown: object) -> dict[str, Any]:
        """Return what a cell shows for an object, by MIME type."""
        assert self.display_formatter is not None
        return dict(self.display_formatter.format(shown)[0])


@contextmanager
def notebook() -> Iterator[Kernel]:
    """Start a kernel, and remove everything that it changes in this process."""
    names = ("displayhook", "excepthook", "ps1", "ps2", "ps3")
    before = {name: getattr(sys, name) for name in names if hasattr(sys, name)}
    main = sys.modules["__main__"]
    with tempfile.TemporaryDirectory() as folder:
        shell = Kernel.instance(ipython_dir=folder, config=Config({"HistoryManager": {"enabled": False}}))
        shell.display_pub = CapturingDisplayPublisher()
        try:
            yield shell
        finally:
            Kernel.clear_instance()
            sys.modules["__main__"] = main
            for name in names:
                if name in before:
                    setattr(sys, name, before[name])
                elif hasattr(sys, name):
                    delattr(sys, name)
