"""A federation of real processes: own code on all machines, and a server that sends another app."""

import os
from hashlib import sha256
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_files

from fedtailor.deploy import app_bundle
from fedtailor.deploy.server import superlink
from fedtailor.deploy.server.operator_folder import read_status
from fedtailor.experiments.deployed_code import InstalledCode, format_consent
from support.federation_processes import Federation, federation, schedule_of, wait_until
from support.own_package import CODE, NAME, installed

pytestmark = pytest.mark.slow
NAMES = ("ann", "bob")
_EVIL_APP = """\
from pathlib import Path
from flwr.clientapp import ClientApp

Path({marker!r}).write_text("executed")
app = ClientApp()
"""


def build_evil_app(marker: Path) -> bytes:
    """Return FedTailor's app with a ClientApp that writes a file when it is imported."""
    files = {
        "__init__.py": "",
        "server_app.py": app_bundle._SERVER_APP,
        "client_app.py": _EVIL_APP.format(marker=str(marker)),
    }
    package = {f"federation/{name}": text.encode() for name, text in files.items()}
    app: bytes = build_fab_from_files({"pyproject.toml": app_bundle._PROJECT.encode(), **package})[0]
    return app


def reasons(deployed: Federation) -> dict[str, str]:
    """Return why clients may not join."""
    return dict(read_status(deployed.operator).get("rejected", {}))


def test_own_code_gives_same_models_as_simulation_and_another_app_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader reads what `save_client_data` wrote, so that the test samples are those of the simulation."""
    marker, site = tmp_path / "executed", tmp_path / "site"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(site)])))
    with installed(site) as package:
        (package / "data.py").write_text(_LOADER)
        consent = InstalledCode(frozenset(CODE.values()))
        with federation(tmp_path / "run", NAMES, consent=consent, rounds=2, min_clients=2, **CODE) as deployed:
            deployed.start_server()
            for name in NAMES:
                deployed.start_client(name, more=("--allow-code", format_consent(NAME)))

            evil = build_evil_app(marker)
            monkeypatch.setattr(superlink, "build_app", lambda: evil)
            deployed.start_run()
            wait_until(lambda: reasons(deployed).keys() == set(NAMES), "the clients reject the app")
            text = f"it reported: The server's app (SHA-256 {sha256(evil).hexdigest()[:12]}) is not that of FedTailor"
            assert all(reason.startswith(text) for reason in reasons(deployed).values())
            deployed.run_command("stop")

            monkeypatch.setattr(superlink, "build_app", app_bundle.build_app)
            deployed.resume()
            run = deployed.wait_for_end()
            assert schedule_of(run) == [[0, 1]] * 2
            deployed.check_same_models(run)
            deployed.stop()
            homes = [deployed.client_folder(name) / "home" for name in NAMES]
    assert not marker.exists() and not any((home / "apps").exists() for home in homes)
    exec(compile(_EVIL_APP.format(marker=str(marker)), "client_app.py", "exec"), {})
    assert marker.exists(), "the app would have been noticed"


_LOADER = """
import numpy as np

def load(path):
    found = np.load(path)
    return tuple(found[name] for name in ("x_train", "y_train", "x_test", "y_test"))
"""
