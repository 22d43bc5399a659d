"""Clients whose data are folders of images: agreed classes, sizes, and the same models as a simulation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedtailor as ft
from conftest import error_message
from fedtailor.deploy.client.client_folder import ClientFolder
from fedtailor.deploy.selftest import read_personal_model
from fedtailor.experiments.deployment import make_deployment, read_deployment
from fedtailor.export.prediction import predict
from support.flower_in_process import InProcessFederation, federate

CLASSES = ("benign", "malignant", "unclear")
CLIENTS = {"ann": {"benign": 8, "malignant": 5, "unclear": 6}, "bob": {"unclear": 4, "benign": 9}}
SETTINGS = {"method": "fedavg", "network": "mlp", "rounds": 2, "batch_size": 4, "evaluate_every": 2}


def write_images(folder: Path, counts: dict[str, int], size: tuple[int, int] = (6, 5)) -> Path:
    """Write gray images of width 6 and height 5, a folder per class."""
    random = np.random.default_rng(len(counts))
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, size[::-1], np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture
def create(tmp_path: Path) -> Callable[..., InProcessFederation]:
    """Return a function that creates a federation in which each client has a folder of images."""

    def build(**settings: Any) -> InProcessFederation:
        x, y = np.zeros((3, 1, 5, 6), np.uint8), np.arange(3)
        fed = ft.Federation.from_arrays([(x, y, x, y)] * 2, names=tuple(CLIENTS))
        inputs = {"shape": [1, 5, 6], "class_names": list(CLASSES), "test": 0.3}
        federation = federate(tmp_path, fed, {**SETTINGS, "inputs": inputs, **settings})
        for name, folder in federation.client_folders.items():
            ClientFolder.create(folder, write_images(folder / "images", CLIENTS[name]), device="cpu")
        return federation

    return build


def test_folders_of_images_give_same_models_as_simulation_and_predict_names(
    create: Callable[..., InProcessFederation],
) -> None:
    federation = create()
    federation.run()
    arrays = []
    for name, folder in federation.client_folders.items():
        fed = ClientFolder.open(folder).fed
        assert fed.class_names == CLASSES and fed.classes == 3 and fed.x.shape[1:] == (1, 5, 6)
        assert torch.bincount(fed.y, minlength=3).tolist() == [CLIENTS[name].get(part, 0) for part in CLASSES]
        arrays.append(tuple(t[i].numpy() for i in (fed.train[0], fed.test[0]) for t in (fed.x, fed.y)))
    deployment = read_deployment(federation.folder)
    whole = ft.Federation.from_arrays(arrays, names=tuple(CLIENTS), classes=3)  # type: ignore[arg-type]
    run = ft.simulate(
        deployment.method, deployment.model(), whole, rounds=2, batch_size=4, evaluate_every=2, engine="sequential"
    )
    for client, folder in enumerate(federation.client_folders.values()):
        deployed, expected = read_personal_model(folder, "trained"), run.personal(client, "trained")
        assert deployed and all(torch.equal(deployed[name], expected[name]) for name in expected)
    image = next((folder / "images" / "benign").glob("*.png"))
    assert predict(ft.load_personal(folder), image.parent).rows()[1][0][1] in CLASSES


@pytest.mark.parametrize(
    ("counts", "size", "text"),
    [
        ({"benign": 4, "normal": 4}, (6, 5), "normal"),
        ({"benign": 4, "malignant": 4}, (5, 6), "have shape (1, 6, 5), but this federation requires (1, 5, 6)"),
        ({}, (6, 5), "has no training data"),
    ],
    ids=["unknown class", "another size", "no images"],
)
def test_folder_of_other_images_is_rejected(
    counts: dict[str, int], size: tuple[int, int], text: str, create: Callable[..., InProcessFederation], tmp_path: Path
) -> None:
    folder = create().client_folders["ann"]
    (tmp_path / "other").mkdir()
    images = write_images(tmp_path / "other", counts, size)
    message = error_message(lambda: ClientFolder.create(folder, images, device="cpu"))
    assert text in message
    if "normal" in counts:
        assert all(name in message for name in CLASSES)


def test_folder_without_agreed_classes_is_rejected(create: Callable[..., InProcessFederation]) -> None:
    client = ClientFolder.open(create().client_folders["ann"])
    inputs = replace(client.deployment.inputs, class_names=None)
    other = replace(client, deployment=replace(client.deployment, inputs=inputs))
    assert "the operator sets inputs.class_names" in error_message(lambda: other.fed)


def test_image_that_is_added_or_replaced_is_noticed(create: Callable[..., InProcessFederation]) -> None:
    client = ClientFolder.open(create().client_folders["ann"])
    versions = [client.data_version]
    image = client.data / "benign" / "0.png"
    (client.data / "benign" / "more.png").write_bytes(image.read_bytes())
    versions.append(client.data_version)
    Image.fromarray(np.zeros((5, 6), np.uint8)).save(image)
    versions.append(client.data_version)
    assert len(set(versions)) == 3


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"class_names": ["a", "b"], "classes": 3}, "must be 3 different names"),
        ({"class_names": ["a", "a"]}, "must be 2 different names"),
        ({"class_names": ["a", ""]}, "must have 1 to 255 characters"),
    ],
)
def test_invalid_class_names_are_rejected(inputs: dict[str, Any], text: str) -> None:
    assert text in error_message(lambda: make_deployment({"inputs": inputs}))
    assert make_deployment({"inputs": {"class_names": ["a", "b"]}}).inputs.classes == 2
