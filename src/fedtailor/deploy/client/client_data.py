"""Reads a client's data in the format that its federation requires.

The data are an .npz file, a table with an agreed schema, a folder of images with one folder per class, a file of
`Federation.save` with one client, or what the deployment's own loader reads.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data.federation import Federation
from fedtailor.data.tables.reading import SUFFIXES as TABLE_SUFFIXES
from fedtailor.data.user_files.client_folders import hold_out_client, read_client, read_image_client
from fedtailor.errors import DeployError
from fedtailor.experiments.deployment import Deployment
from fedtailor.experiments.own_code import CodeConsent


@dataclass(frozen=True)
class ClientData:
    """Where a client's data are."""

    path: Path
    name: str  # of the client, on which its test samples depend
    schema: Path  # of a table; it may not exist

    def read(self, deployment: Deployment, consent: CodeConsent) -> Federation:
        """Return a federation with this client's data only; raise an error if they have another format."""
        inputs, fed = deployment.inputs, self._read(deployment, consent)
        if fed.shape != tuple(inputs.shape):
            raise DeployError(
                f"The samples in '{self.path}' have shape {fed.shape}, but this federation requires {inputs.shape}."
            )
        if inputs.schema is not None and (fed.table is None or fed.table.schema != inputs.schema):
            raise DeployError(
                f"'{self.path}' was not read with the schema of this federation; pass the operator's file as --schema."
            )
        if fed.task != inputs.task:
            raise DeployError(
                f"The targets in '{self.path}' do not match this federation; see inputs.classes in its settings."
            )
        return fed

    def _read(self, deployment: Deployment, consent: CodeConsent) -> Federation:
        inputs, suffix = deployment.inputs, self.path.suffix.lower()
        if deployment.data is not None:
            return self._read_with_loader(deployment, consent)
        if self.path.is_dir():
            return self._from_arrays(self._read_images(deployment), deployment)
        if suffix in TABLE_SUFFIXES:
            if not self.schema.is_file():
                raise DeployError(f"'{self.path}' is a table; pass the schema on which the sites agreed as --schema.")
            fed = Federation.from_tables({self.name: self.path}, schema=self.schema)
            return replace(fed, classes=inputs.classes or None, mean=inputs.mean, std=inputs.std)
        if suffix == ".npz" or not self.path.is_file():
            options: dict[str, Any] = {"test": inputs.test, "survival": inputs.survival}
            return self._from_arrays(read_client(self.path, self.name, seed=deployment.seed, **options), deployment)
        return self._adopt(Federation.from_file(self.path), deployment)

    def _read_images(self, deployment: Deployment) -> Any:
        inputs = deployment.inputs
        if inputs.class_names is None:
            fix = "the operator sets inputs.class_names"
            raise DeployError(f"'{self.path}' is a folder, but this federation has no names of classes; {fix}.")
        return read_image_client(self.path, self.name, inputs.class_names, test=inputs.test, seed=deployment.seed)

    def _read_with_loader(self, deployment: Deployment, consent: CodeConsent) -> Federation:
        """Return the samples that the deployment's own function reads from the path."""
        loader, inputs = deployment.data, deployment.inputs
        assert loader is not None
        if not self.path.exists():
            raise DeployError(f"There is no file or folder '{self.path}'.")
        found = loader.read(self.path.resolve(), consent)
        if isinstance(found, Federation):
            return self._adopt(found, deployment)
        if not isinstance(found, tuple) or len(found) not in (2, 4):
            expected = "(x, y), (x_train, y_train, x_test, y_test), or an ft.Federation with one client"
            raise DeployError(f"'{loader.name}' must return {expected}, got {type(found).__name__}.")
        arrays = tuple(np.asarray(part) for part in found)
        if len(arrays) == 2:
            arrays = hold_out_client(
                *arrays, self.name, test=inputs.test, seed=deployment.seed, survival=inputs.survival
            )
        return self._from_arrays(arrays, deployment)

    def _from_arrays(self, arrays: Any, deployment: Deployment) -> Federation:
        inputs, classes = deployment.inputs, deployment.inputs.classes or None
        return Federation.from_arrays(
            [arrays], names=[self.name], classes=classes, class_names=inputs.class_names, regression=classes is None,
            survival=inputs.survival, mean=inputs.mean, std=inputs.std,
        )  # fmt: skip

    def _adopt(self, fed: Federation, deployment: Deployment) -> Federation:
        """Return a federation of one client with this client's name and the deployment's normalization."""
        if fed.num_clients != 1:
            raise DeployError(f"'{self.path}' contains {fed.num_clients} clients; save one with fed.select([0]).save.")
        inputs = deployment.inputs
        names = inputs.class_names if fed.table is None else fed.class_names  # for predictions of rows of a table
        return replace(
            fed, names=(self.name,), classes=inputs.classes or None, class_names=names, mean=inputs.mean, std=inputs.std
        )

    @property
    def version(self) -> tuple[int, ...]:
        """What changes when the data are replaced; empty if there are none."""
        files = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        stats = [path.stat() for path in files if path.is_file()]
        return tuple(number for stat in stats for number in (stat.st_ino, stat.st_size, stat.st_mtime_ns))
