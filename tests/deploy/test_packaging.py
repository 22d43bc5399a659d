"""The files in packaging/: their commands are run as real processes on this machine, with other paths."""

import json
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from support.federation_processes import Federation, federation
from support.proxied_superlink import prepare

PACKAGING = Path(__file__).parents[2] / "packaging"
UNITS = PACKAGING / "systemd"
NAMES = ("hospital-a", "hospital-b", "hospital-c")
PROGRAM = str(Path(sys.executable).with_name("fedtailor"))


@dataclass(frozen=True)
class Process:
    """A command line as a file starts it, its environment, and where the paths in it are on this machine."""

    command: list[str]
    env: dict[str, str]
    paths: dict[str, Path]

    def local(self) -> tuple[list[str], dict[str, str]]:
        """Return the command and the environment with paths of this machine."""
        env = {name: self._replace(value) for name, value in self.env.items()}
        return [self._replace(word) for word in self.command], env

    def _replace(self, word: str) -> str:
        if word in ("fedtailor", "/opt/fedtailor/bin/fedtailor"):
            return PROGRAM
        if not word.startswith("/"):
            return word
        mount = max((path for path in self.paths if word == path or word.startswith(f"{path}/")), key=len)
        return str(self.paths[mount].resolve()) + word.removeprefix(mount)


def from_unit(path: Path, paths: Mapping[str, Path], instance: str = "") -> Process:
    """Read the ExecStart= line of a systemd unit."""
    text = path.read_text().replace("\\\n", " ").replace("%i", instance)
    match = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert match is not None
    return Process(shlex.split(match[1]), {}, dict(paths))


def read_dockerfile() -> tuple[list[str], dict[str, str]]:
    """Return the ENTRYPOINT and the ENV of the image."""
    text = (PACKAGING / "docker" / "Dockerfile").read_text()
    entrypoint, env = (re.search(rf"^{key} (.*)$", text, re.MULTILINE) for key in ("ENTRYPOINT", "ENV"))
    assert entrypoint is not None and env is not None
    return json.loads(entrypoint[1]), dict(word.split("=", 1) for word in shlex.split(env[1]))


def from_compose(service: str, folder: Path) -> Process:
    """Read a service of the Compose file, which lies in a folder with the files that it mounts."""
    content = yaml.safe_load((PACKAGING / "docker" / "compose.yaml").read_text())
    described = content["services"][service]
    paths = {volume.split(":")[1]: folder / volume.split(":")[0] for volume in described["volumes"]}
    for secret in described.get("secrets", ()):
        paths[f"/run/secrets/{secret}"] = folder / content["secrets"][secret]["file"]
    entrypoint, env = read_dockerfile()
    return Process([*entrypoint, *described["command"]], env, paths | dict.fromkeys(described["tmpfs"], folder))


def from_manifest(text: str, volumes: Mapping[str, Path]) -> Process:
    """Read the container of a manifest, whose volumes are folders of this machine."""
    (workload,) = (part for part in yaml.safe_load_all(text) if part["kind"] == "StatefulSet")
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    paths = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    entrypoint, env = read_dockerfile()
    return Process([*entrypoint, *container["args"]], env, paths)


def compose_folder(deployed: Federation) -> Path:
    """Return a folder as the Compose file expects it."""
    folder = deployed.folder / "compose"
    folder.mkdir()
    (folder / "federation").symlink_to(deployed.operator)
    (folder / "clients").symlink_to(deployed.folder)
    (folder / "data").symlink_to(deployed.folder)
    return folder


def client_volumes(deployed: Federation, name: str) -> dict[str, Path]:
    """Return the volumes of a client's manifest."""
    volumes = {volume: deployed.folder / "volumes" / volume for volume in ("data", "tmp", "secret")}
    for folder in volumes.values():
        folder.mkdir(parents=True)
    shutil.copy(deployed.folder / f"{name}.npz", volumes["data"] / "data.npz")
    shutil.copy(deployed.bundle(name), volumes["secret"])
    return volumes | {"client": deployed.client_folder(name)}


@pytest.mark.slow
def test_federation_of_packaged_commands_trains_to_its_end(tmp_path: Path) -> None:
    """The server and a client by systemd, a client by Compose, and one by Kubernetes."""
    with federation(tmp_path, NAMES, rounds=2, evaluate_every=2) as deployed:
        shutil.copy(deployed.bundle("hospital-a"), tmp_path)
        manifest = (PACKAGING / "kubernetes" / "client.yaml").read_text().replace("hospital-a", "hospital-c")
        processes = {
            "server": from_unit(UNITS / "fedtailor-server.service", {"/srv/federation": deployed.operator}),
            "hospital-a": from_unit(
                UNITS / "fedtailor-client@.service", {"/srv/federation": tmp_path, "/srv/data": tmp_path}, "hospital-a"
            ),
            "hospital-b": from_compose("hospital-b", compose_folder(deployed)),
            "hospital-c": from_manifest(manifest, client_volumes(deployed, "hospital-c")),
        }
        for name, process in processes.items():
            deployed.start_program(name, *process.local())
            if name == "server":
                deployed.wait_for_server()
        deployed.start_run()
        run = deployed.wait_for_end()
        assert [record["clients"] for record in run.records] == [[0, 1, 2]] * 2
        deployed.check_same_models(run)
        deployed.stop()


def test_all_formats_start_the_same_server(tmp_path: Path) -> None:
    volumes = {"federation": tmp_path / "federation", "tmp": tmp_path}
    processes = [
        from_unit(UNITS / "fedtailor-server.service", {"/srv/federation": tmp_path / "federation"}),
        from_compose("server", tmp_path),
        from_manifest((PACKAGING / "kubernetes" / "server.yaml").read_text(), volumes),
    ]
    assert [process.local()[0] for process in processes] == [
        [PROGRAM, "deploy", "server", str(tmp_path / "federation")]
    ] * 3


def test_init_container_unpacks_operator_folder_once(tmp_path: Path) -> None:
    """With the command of the manifest's comment, and without the authority's key and the bundles."""
    folder, volume = prepare(tmp_path / "federation", ["a"]), tmp_path / "volume"
    (folder / "app").mkdir()
    volume.mkdir()
    manifest = (PACKAGING / "kubernetes" / "server.yaml").read_text()
    packed = re.search(r"^# +(tar .*)$", manifest, re.MULTILINE)
    assert packed is not None
    subprocess.run(shlex.split(packed[1]), cwd=tmp_path, check=True)
    (init,) = dict(pods())["server.yaml"]["initContainers"]
    unpack = Process(init["command"], {}, {"/federation": volume, "/secret": tmp_path}).local()[0]
    subprocess.run(unpack, check=True)
    names = {str(path.relative_to(volume)) for path in volume.rglob("*") if path.is_file()}
    expected = {"keys/authority.crt", "keys/server.crt", "keys/server.key", "clients.json", "deployment.toml"}
    assert names - {"keys/lock"} == expected
    assert stat.S_IMODE((volume / "keys" / "server.key").stat().st_mode) == 0o600
    (volume / "clients.json").write_text("{}")
    subprocess.run(unpack, check=True)
    assert (volume / "clients.json").read_text() == "{}"


def pods() -> list[tuple[str, dict[str, Any]]]:
    """Return the pods of all manifests, by file."""
    parts = [
        (path.name, part)
        for path in (PACKAGING / "kubernetes").iterdir()
        for part in yaml.safe_load_all(path.read_text())
    ]
    return [(name, part["spec"]["template"]["spec"]) for name, part in parts if part["kind"] == "StatefulSet"]


def test_containers_have_no_privileges() -> None:
    """Every container, so that one that is added later is not forgotten."""
    services = yaml.safe_load((PACKAGING / "docker" / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"], name
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"], name
            assert context["capabilities"] == {"drop": ["ALL"]}, name


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_units_are_valid(tmp_path: Path) -> None:
    for unit in UNITS.iterdir():
        text = unit.read_text().replace("/opt/fedtailor/bin/fedtailor", PROGRAM).replace("User=fedtailor", "User=root")
        (tmp_path / unit.name.replace("@", "@hospital-a")).write_text(text)
    command = ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))]
    verified = subprocess.run(command, capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
