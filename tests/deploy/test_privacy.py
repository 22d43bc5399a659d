"""Private data never leave a client: the decrypted traffic of a deployed federation is searched for them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedtailor.core.trees import Tree, flatten
from fedtailor.deploy.dummy_client import preview_payload
from fedtailor.runs.serialization import pack, unpack, unpack_flat
from support.federation_processes import Federation, federation, redirect_bundle, schedule_of
from support.flaky_proxy import FlakyProxy, flaky_proxy

pytestmark = pytest.mark.slow
ROUNDS = 2
_REQUEST = re.compile(rb"POST (\S+) HTTP/1\.1\r\n.*?\r\n\r\n", re.DOTALL)
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_FLOATS = (np.float32, np.float64, np.float16)
_INTEGERS = (np.int64, np.int32, np.uint8, np.float32)


def encode_rows(rows: Iterable[NDArray[Any]], dtypes: Sequence[type[np.generic]]) -> Iterator[bytes]:
    """Yield each row as bytes of each dtype, except for rows without information, such as zeros."""
    for row in rows:
        if len(set(row.tolist())) >= 4:
            yield from (row.astype(dtype).tobytes() for dtype in dtypes)


def encode_weights(tree: Tree, prefix: str, dtypes: Sequence[type[np.generic]] = _FLOATS) -> Iterator[bytes]:
    """Yield rows and columns of the layers whose names start with the prefix."""
    for name, leaf in flatten(tree).items():
        if name.rpartition("/")[2].startswith(prefix):
            matrix = leaf.numpy().reshape(len(leaf), -1)
            yield from encode_rows((*matrix, *matrix.T), dtypes)


def encode_images(x: NDArray[np.float32]) -> Iterator[bytes]:
    """Yield each row of each image, and whole images as bytes with 17 or 256 gray levels."""
    yield from encode_rows(x.reshape(-1, x.shape[-1]), _FLOATS)
    for maximum in (16, 255):
        yield from encode_rows((maximum * x).round().reshape(len(x), -1), [np.uint8])


def encode_labels(y: NDArray[np.int64], size: int = 16) -> Iterator[bytes]:
    """Yield sequences of labels, in the order of the client's file."""
    yield from encode_rows((y[start : start + size] for start in range(len(y) - size)), _INTEGERS)


def count_found(patterns: Iterable[bytes], streams: Sequence[bytes]) -> int:
    """Return how many of the patterns occur in the streams; there must be at least ten."""
    unique = set(patterns)
    assert len(unique) >= 10 and min(map(len, unique)) >= 16
    return sum(any(pattern in stream for stream in streams) for pattern in unique)


def saved_states(deployed: Federation, name: str) -> list[Tree]:
    """Return the client states and the trained models that a client saved after every round."""
    files = sorted((deployed.client_folder(name) / "runs").glob("*/states/*.safetensors"))
    assert [int(path.stem) for path in files] == list(range(1, ROUNDS + 1))
    return [unpack(path.read_bytes()) for path in files]


def uploaded_bytes(proxy: FlakyProxy) -> int:
    """Return the bytes of all objects that the client sent, without HTTP headers."""
    total = 0
    for stream in map(bytes, proxy.up):
        at = 0
        while request := _REQUEST.match(stream, at):
            length = _LENGTH.search(request[0])
            size = int(length[1]) if length else 0
            at, total = request.end() + size, total + size * (request[1] == b"/v1/fleet/push-object")
        assert at == len(stream)  # everything was parsed
    return total


def test_samples_and_client_state_are_not_sent(tmp_path: Path) -> None:
    with (
        federation(tmp_path, ("ann", "bob"), rounds=ROUNDS, deadline=90.0) as deployed,
        flaky_proxy(deployed, True) as proxy,
    ):
        deployed.start_server()
        deployed.start_client("ann", redirect_bundle(deployed.bundle("ann"), proxy.port))
        deployed.start_client("bob")
        deployed.start_run()
        run = deployed.wait_for_end()
        deployed.check_same_models(run)
        deployed.stop()
    assert schedule_of(run) == [[0, 1]] * ROUNDS
    up, down = list(map(bytes, proxy.up)), list(map(bytes, proxy.down))
    states, start = (
        saved_states(deployed, "ann"),
        unpack_flat((deployed.operator / "run" / "start.safetensors").read_bytes()),
    )
    with np.load(deployed.folder / "ann.npz") as arrays:
        x, y = (np.concatenate([arrays[f"{kind}_train"], arrays[f"{kind}_test"]]) for kind in "xy")

    # what should be sent is found: the initial body is received, and the whole body is sent in every round
    assert count_found(encode_weights(start, "fc1.weight", [np.float32]), down) >= 64
    bodies = [[row.tobytes() for row in tree["trained"]["fc1.weight"].numpy()] for tree in states]
    assert [count_found(body, up) for body in bodies] == [64] * ROUNDS
    # what must not be sent would be found
    head = {"head": states[0]["state"]["head"]}
    samples = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    assert count_found(encode_weights(head, "head"), [pack(head)]) >= 10
    assert (
        count_found(encode_images(x), [pack(samples)]) > 1000 and count_found(encode_labels(y), [pack(samples)]) > 100
    )

    for tree in states:
        assert count_found(encode_weights(tree, "head"), up + down) == 0
    assert count_found(encode_images(x), up + down) == 0
    assert count_found(encode_labels(y), up + down) == 0

    # the client sends no more than announced before it joins, except for fields such as its name, sizes, and scores
    upload = preview_payload(deployed.deployment, clients=2, num_samples=100)["up"]
    announced = ROUNDS * sum(tensor.bytes for tensor in upload)
    assert announced <= uploaded_bytes(proxy) <= announced + (ROUNDS + 2) * 2**11
