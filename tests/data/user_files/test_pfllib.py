"""`Federation.from_pfllib` reads the folders that PFLlib generates, and executes nothing that they contain."""

import io
import json
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fedtailor as ft
from conftest import error_message
from fedtailor.data.formats.numpy_pickle import unpickle_arrays
from fedtailor.experiments.experiment import make_experiment
from support.malicious_pickle import Trap

Array = NDArray[Any]


def samples(client: int, count: int) -> dict[str, Array]:
    x = np.random.default_rng(client).normal(size=(count, 1, 4, 4)).astype(np.float32)
    return {"x": x, "y": np.arange(count) % 3}


def save_pfllib(folder: Path, clients: int = 12, **config: Any) -> Path:
    """Write a folder as PFLlib's save_file does; client i has 6 + i training samples and 3 test samples."""
    for part, sizes in (("train", [6 + client for client in range(clients)]), ("test", [3] * clients)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for client, size in enumerate(sizes):
            data: Any = samples(client + 100 * (part == "test"), size)
            np.savez_compressed(folder / part / f"{client}.npz", data=data)
    settings = {"num_clients": clients, "num_classes": 10, "non_iid": True, "partition": "dir", "alpha": 0.1} | config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def pfllib_error(folder: Path) -> str:
    return error_message(lambda: ft.Federation.from_pfllib(folder))


def test_from_pfllib_keeps_clients_in_order_and_their_split(tmp_path: Path) -> None:
    fed = ft.Federation.from_pfllib(save_pfllib(tmp_path))
    assert fed.names == tuple(map(str, range(12))), "client 10 comes after client 9"
    assert fed.classes == 10, "also of classes without samples"
    for client in range(12):
        for indices, seed, size in ((fed.train[client], client, 6 + client), (fed.test[client], client + 100, 3)):
            expected = samples(seed, size)
            np.testing.assert_array_equal(fed.x[indices], expected["x"])
            np.testing.assert_array_equal(fed.y[indices], expected["y"])


def test_from_pfllib_converts_as_pfllib_does_and_reads_plain_arrays(tmp_path: Path) -> None:
    folder = save_pfllib(tmp_path, clients=2)
    pixels = np.arange(48, dtype=np.uint8).reshape(3, 1, 4, 4)
    np.savez(folder / "train" / "0.npz", x=np.asfortranarray(pixels), y=np.array([0.0, 1.0, 2.0]))
    big_endian: Any = {"x": pixels.astype(">f8"), "y": np.array([0, 1, 2], np.uint8)}
    np.savez(folder / "train" / "1.npz", data=big_endian)
    fed = ft.Federation.from_pfllib(folder)
    for client in range(2):
        np.testing.assert_array_equal(fed.x[fed.train[client]], pixels.astype(np.float32))  # not divided by 255
        assert fed.y[fed.train[client]].tolist() == [0, 1, 2]
    assert str(fed.x.dtype) == "torch.float32"


def test_from_pfllib_ignores_files_of_an_earlier_split_with_more_clients(tmp_path: Path) -> None:
    save_pfllib(tmp_path, clients=5)
    assert ft.Federation.from_pfllib(save_pfllib(tmp_path, clients=3)).num_clients == 3


def test_run_on_pfllib_data_resumes_from_its_folder(tmp_path: Path) -> None:
    data = {"name": "pfllib", "folder": str(save_pfllib(tmp_path / "data", clients=3))}
    experiment = make_experiment({"rounds": 2, "data": data, "network": {"name": "logistic"}, "seed": 3})
    whole = experiment.run()
    assert whole.experiment["data"] == data | {"seed": 3}, "as for every data set"
    stopped = tmp_path / "run"

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.run(on_round_end=stop, folder=stopped)
    assert ft.resume(stopped).records[-1]["per_client"] == whole.records[-1]["per_client"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "needs data.folder"),
        ({"folder": "x", "clients": 5}, "no setting of the data set pfllib 'clients'"),
        ({"folder": "x", "test": 0.5}, "no setting of the data set pfllib 'test'"),
        ({"folder": "nowhere"}, "config.json"),
    ],
)
def test_load_pfllib_with_invalid_settings_raises(settings: dict[str, Any], words: str) -> None:
    assert words in error_message(lambda: ft.load("pfllib", **settings))


def test_unpickle_arrays_reads_pickles_of_numpy_1() -> None:
    """NumPy 1 named its modules differently and used protocol 3."""
    x = np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3))
    content = pickle.dumps(np.array({"x": x, "y": np.arange(2), "z": x}), protocol=3)
    found = unpickle_arrays(content.replace(b"numpy._core", b"numpy.core"))
    np.testing.assert_array_equal(found["x"], x)
    assert found["x"].dtype == x.dtype and found["z"] is found["x"] and found["y"].tolist() == [0, 1]


# ---- untrusted files


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "hide", [lambda t: t, lambda t: {"x": t, "y": np.zeros(2)}, lambda t: {"x": np.array([t]), "y": t}]
)
def test_from_pfllib_with_malicious_pickle_raises_without_executing_it(
    tmp_path: Path, protocol: int, hide: Callable[[Trap], Any]
) -> None:
    folder = save_pfllib(tmp_path / "data", clients=2)
    content = pickle.dumps(np.array(hide(Trap(tmp_path / "sprung")), dtype=object), protocol)
    save_object_array(folder / "train" / "1.npz", content)
    assert "1.npz' cannot be read" in pfllib_error(folder)
    assert not (tmp_path / "sprung").exists()


def save_object_array(path: Path, content: bytes) -> None:
    """Write an .npz file whose entry `data` is an array of one object with this pickle."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": ()})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.npy", header.getvalue() + content)


def text_of(count: int) -> bytes:
    """Return the pickle of samples of text, which PFLlib saves as lists of tokens with their lengths."""
    x = np.array([([5, sample], 2) for sample in range(count)], dtype=object)
    return pickle.dumps(np.array({"x": x, "y": np.zeros(count)}), protocol=4)


GOOD = pickle.dumps(np.array({"x": np.ones((2, 3)), "y": np.arange(2)}), protocol=4)


@pytest.mark.parametrize(
    "content",
    [
        b"", b".", b"N.", b"\x80\x04}.", b"cos\nsystem\n(S'touch sprung'\ntR.", b"cbuiltins\neval\n.",
        b"\x80\x04" + b"r" + struct.pack("<I", 2**32 - 1) + b".",  # memo entry 2³² − 1
        b"\x80\x04" + b"}" * 10**6 + b".",  # a million dicts in a megabyte
        b"\x80\x04]\x94" + b"(" + b"h\x00" * 100 + b"e.",  # a list that contains itself a hundred times
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",  # 2⁶² bytes
        GOOD.replace(b"\x8c\x02f8", b"\x8c\x02O8"),  # numbers as pointers to objects
        GOOD.replace(b"\x8c\x02f8", b"\x8c\x02f4"),  # twice as many elements
        GOOD.replace(b"_reconstruct", b"_reconstrucT"),
    ],
)  # fmt: skip
def test_unpickle_arrays_with_invalid_program_raises(content: bytes) -> None:
    with pytest.raises(ft.DataError):
        unpickle_arrays(content)


def test_unpickle_arrays_survives_every_damaged_byte() -> None:
    """Each byte of a valid pickle is replaced in turn: the result is a dict of arrays, or a DataError."""
    assert unpickle_arrays(GOOD)["x"].tolist() == [[1.0] * 3] * 2
    assert any(operation.name == "BUILD" for operation, _, _ in pickletools.genops(GOOD))
    for position in range(len(GOOD)):
        for value in (0x00, 0x28, 0x52, 0x62, 0x93, 0xFF):
            damaged = GOOD[:position] + bytes([value]) + GOOD[position + 1 :]
            try:
                found = unpickle_arrays(damaged)
            except ft.DataError:
                continue
            assert all(isinstance(array, np.ndarray) for array in found.values())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "test" / "1.npz").unlink(), "1.npz', but config.json names 2 clients"),
        (lambda f: (f / "config.json").write_text("[]"), "must contain num_clients"),
        (lambda f: (f / "config.json").write_text('{"num_clients": 1e999}'), "num_clients"),
        (lambda f: (f / "config.json").write_text('{"num_clients": -1}'), "integer from 1"),
        (lambda f: (f / "train" / "1.npz").write_bytes(b"PK"), "1.npz"),
        (lambda f: np.savez(f / "train" / "1.npz", z=np.zeros(2)), "must contain x and y"),
        (
            lambda f: np.savez(f / "train" / "1.npz", x=np.zeros((2, 1, 4, 4)), y=np.array(["a", "b"])),
            "must be numbers",
        ),
        (lambda f: np.savez(f / "train" / "1.npz", x=np.zeros((2, 1, 4, 4)), y=np.array([0, 10])), "label 10"),
        (lambda f: save_object_array(f / "train" / "1.npz", text_of(9)), "only arrays of numbers"),
        (lambda f: save_object_array(f / "train" / "1.npz", text_of(9000)), "only arrays of numbers"),
    ],
)
def test_from_pfllib_with_damaged_folder_raises(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    folder = save_pfllib(tmp_path, clients=2)
    damage(folder)
    assert words in pfllib_error(folder)


def test_from_pfllib_with_links_out_of_the_folder_raises(tmp_path: Path) -> None:
    other = save_pfllib(tmp_path / "other", clients=2)
    for name in ("test", "train/1.npz"):
        folder = save_pfllib(tmp_path / name.replace("/", "-"), clients=2)
        (folder / name).rename(tmp_path / f"away-{name.replace('/', '-')}")
        (folder / name).symlink_to(other / name)
        assert "leads out of" in pfllib_error(folder)
