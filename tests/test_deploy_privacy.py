"""What a client keeps never leaves it: the bytes of a real federation, as they cross in TLS, are searched for it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cables import Cable, cable
from federating import Federation, federation, plan_of, redirected
from fedtailor.deploy.example import preview
from fedtailor.packing import pack, unpack, unpack_flat
from fedtailor.trees import Tree, flatten

pytestmark = pytest.mark.slow
ROUNDS = 3
_REQUEST = re.compile(rb"POST (\S+) HTTP/1\.1\r\n.*?\r\n\r\n", re.DOTALL)
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_FLOATS = (np.float32, np.float64, np.float16)  # in which numbers may be written
_WHOLE = (np.int64, np.int32, np.uint8, np.float32)


def telling(lines: Iterable[NDArray[Any]], kinds: Sequence[type[np.generic]]) -> Iterator[bytes]:
    """Each line of numbers as bytes; but for those that say nothing, such as zeros."""
    for line in lines:
        if len(set(line.tolist())) >= 4:
            yield from (line.astype(kind).tobytes() for kind in kinds)


def weights(tree: Tree, part: str, kinds: Sequence[type[np.generic]] = _FLOATS) -> Iterator[bytes]:
    """Rows and columns of the layers whose names begin so."""
    for name, leaf in flatten(tree).items():
        if name.rpartition("/")[2].startswith(part):
            table = leaf.numpy().reshape(len(leaf), -1)
            yield from telling((*table, *table.T), kinds)


def pictures(x: NDArray[np.float32]) -> Iterator[bytes]:
    """A client's samples: every line of every picture, and pictures as bytes, of 16 or 256 shades."""
    yield from telling(x.reshape(-1, x.shape[-1]), _FLOATS)
    for shades in (16, 255):
        yield from telling((shades * x).round().reshape(len(x), -1), [np.uint8])


def labels(y: NDArray[np.int64], size: int = 16) -> Iterator[bytes]:
    """A client's labels, some in a row, in the order of its file."""
    yield from telling((y[start : start + size] for start in range(len(y) - size)), _WHOLE)


def found(needles: Iterable[bytes], crossed: Sequence[bytes]) -> int:
    """How many of these are in what crossed; there must be some to look for."""
    wanted = set(needles)
    assert len(wanted) >= 10 and min(map(len, wanted)) >= 16
    return sum(any(needle in stream for stream in crossed) for needle in wanted)


def kept(real: Federation, name: str) -> list[Tree]:
    """What a client kept after every round, and its model as it trained."""
    files = sorted((real.site(name) / "runs").glob("*/states/*.safetensors"))
    assert [int(path.stem) for path in files] == list(range(1, ROUNDS + 1))
    return [unpack(path.read_bytes()) for path in files]


def pushed(wire: Cable) -> int:
    """The bytes of all objects that the client sent, without HTTP's headers."""
    total = 0
    for stream in map(bytes, wire.up):
        at = 0
        while request := _REQUEST.match(stream, at):
            length = _LENGTH.search(request[0])
            size = int(length[1]) if length else 0
            at, total = request.end() + size, total + size * (request[1] == b"/v1/fleet/push-object")
        assert at == len(stream)  # all of it was understood
    return total


def test_neither_samples_nor_what_a_method_keeps_cross(tmp_path: Path) -> None:
    with federation(tmp_path, ("ann", "bob"), rounds=ROUNDS, deadline=90.0) as real, cable(real, True) as wire:
        real.serve()
        real.join("ann", redirected(real.bundle("ann"), wire.port))
        real.join("bob")
        real.do("start")
        run = real.wait_for_end()
        real.check_same(run)
        real.end()
    assert plan_of(run) == [[0, 1]] * ROUNDS
    up, down = list(map(bytes, wire.up)), list(map(bytes, wire.down))
    states, start = kept(real, "ann"), unpack_flat((real.operator / "run" / "start.safetensors").read_bytes())
    with np.load(real.folder / "ann.npz") as arrays:
        x, y = (np.concatenate([arrays[f"{kind}_train"], arrays[f"{kind}_test"]]) for kind in "xy")

    # what is to cross does: the start's body came, and in every round the whole body went
    assert found(weights(start, "fc1.weight", [np.float32]), down) >= 64
    bodies = [[row.tobytes() for row in tree["trained"]["fc1.weight"].numpy()] for tree in states]
    assert [found(body, up) for body in bodies] == [64] * ROUNDS
    # and what is not to cross would be found if it did
    head = {"head": states[0]["state"]["head"]}
    samples = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    assert found(weights(head, "head"), [pack(head)]) >= 10
    assert found(pictures(x), [pack(samples)]) > 1000 and found(labels(y), [pack(samples)]) > 100

    for tree in states:
        assert found(weights(tree, "head"), up + down) == 0
    assert found(pictures(x), up + down) == 0
    assert found(labels(y), up + down) == 0

    # and no more than a client is told before it joins, but for words: who it is, how large, its numbers at the end
    promised = ROUNDS * sum(sent.bytes for sent in preview(real.deployment, clients=2, own_size=100)["up"])
    assert promised <= pushed(wire) <= promised + (ROUNDS + 2) * 2**11
