"""Storage of client states: the same bits from memory and from a file, and space only for participants."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from conftest import error_message
from fedtailor.core.trees import Rows, Tree, flatten, map_leaves, stack
from fedtailor.runs.client_states import ClientStates

CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
STORAGES = pytest.mark.parametrize("max_memory_bytes", [2**28, 1], ids=["memory", "file"])


def initial_tree() -> Tree:
    """Return a tree with all types of leaves: several dtypes and shapes, scalars, empty tensors, rows, nested trees."""
    return {
        "flag": torch.tensor(False),
        "deep": {"weights": torch.zeros(3, 2, dtype=torch.float64), "nothing": {}},
        "half": torch.ones(3, dtype=torch.bfloat16),
        "bytes": torch.zeros(5, dtype=torch.uint8),
        "none": torch.zeros(0, 4),
        "count": torch.tensor(7),
        "rows": Rows(torch.zeros(3, 2), torch.zeros(3, dtype=torch.bool)),
    }


def random_tree(number: int) -> Tree:
    """Return a tree of the same structure with random values."""
    random = torch.Generator().manual_seed(number)

    def fill(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=random, dtype=torch.float64).to(leaf.dtype)
        return torch.randint(0, 2 if leaf.dtype == torch.bool else 100, leaf.shape, generator=random).to(leaf.dtype)

    return map_leaves(fill, initial_tree())


def identical(a: Tree, b: Tree) -> bool:
    """Return whether two trees have the same structure, dtypes, shapes, and bits."""

    def structure(tree: Tree) -> object:
        return {name: structure(node) if isinstance(node, dict) else type(node) for name, node in tree.items()}

    left, right = flatten(a), flatten(b)
    return structure(a) == structure(b) and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


@STORAGES
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_get_returns_latest_put_of_each_client(max_memory_bytes: int, device: torch.device) -> None:
    store = ClientStates(initial_tree(), max_memory_bytes)
    expected = {client: initial_tree() for client in range(6)}
    for number, clients in enumerate([[4, 1], [0], [5, 4, 0], [1]]):
        trees = {client: random_tree(10 * number + client) for client in clients}
        store.put(clients, map_leaves(lambda leaf: leaf.to(device), stack(list(trees.values()))))
        expected |= trees
        for requested in ([0, 1, 2, 3, 4, 5], [5, 3, 1], [2, 3], [4]):
            found = store.get(requested, device)
            assert all(leaf.device == device for leaf in flatten(found).values())
            assert identical(map_leaves(Tensor.cpu, found), stack([expected[client] for client in requested]))
    assert identical(store.get_one(4), expected[4]) and identical(store.get_one(2), initial_tree())
    assert [store.has(client) for client in range(6)] == [True, True, False, False, True, True]


@STORAGES
def test_get_one_returns_a_copy(max_memory_bytes: int) -> None:
    store = ClientStates({"a": torch.zeros(2)}, max_memory_bytes)
    store.put([2], {"a": torch.ones(1, 2)})
    store.put([1], {"a": torch.ones(1, 2)})
    for client in range(3):
        store.get_one(client)["a"].add_(5)
    assert store.get([0, 1, 2], CPU)["a"].tolist() == [[0, 0], [1, 1], [1, 1]]


def test_get_same_clients_as_latest_put_is_not_copied() -> None:
    store, stacked = ClientStates({"a": torch.zeros(2)}), {"a": torch.ones(2, 2)}
    store.put([3, 5], stacked)
    assert store.get([3, 5], CPU)["a"] is stacked["a"]
    assert store.get([5, 3], CPU)["a"] is not stacked["a"]


def test_put_accepts_views_another_order_of_names_and_empty_trees() -> None:
    store = ClientStates({"a": torch.zeros(2, 3), "b": torch.zeros(2)})
    transposed = torch.arange(6.0).reshape(1, 3, 2).transpose(1, 2)
    store.put([0], {"b": torch.ones(1, 1).expand(1, 2), "a": transposed})
    assert identical(store.get_one(0), {"a": transposed[0], "b": torch.ones(2)})
    empty = ClientStates({})
    empty.put([3], {})
    assert empty.get([1, 3], CPU) == {} and empty.has(3) and not empty.has(1)


def test_file_grows_with_number_of_participants() -> None:
    """The size does not depend on client numbers, and repeated participation does not increase it."""
    store = ClientStates({"a": torch.zeros(1000)}, max_memory_bytes=1)
    sizes = []
    for clients in ([99_999_999, 5], [7], [5, 99_999_999], [7, 8], [7]):
        store.put(clients, {"a": torch.ones(len(clients), 1000)})
        sizes.append(os.fstat(store._file.fileno()).st_size)
    assert sizes == [0, 8000, 12_000, 12_000, 16_000]  # the latest put is not written yet


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.zeros(2, 4), "b": torch.zeros(2)},
        {"a": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "b": torch.zeros(2), "c": torch.zeros(2)},
        {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.zeros(2)},
    ],
    ids=["shape", "less", "more", "dtype"],
)
def test_put_other_names_or_shapes_raises(changed: Tree) -> None:
    store = ClientStates({"a": torch.zeros(3), "b": torch.zeros(())})
    assert "changed its names or shapes" in error_message(lambda: store.put([0, 1], changed))
    assert not store.has(0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_put_full_disk_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Path("/dev/full").open("r+b"))  # noqa: SIM115 - closed by the store
    store = ClientStates({"a": torch.zeros(3)}, max_memory_bytes=1)
    store.put([0], {"a": torch.ones(1, 3)})
    message = error_message(lambda: store.put([1], {"a": torch.ones(1, 3)}))
    assert "No space left" in message and "TMPDIR" in message


def test_simulate_with_states_in_file_gives_same_bits(fed: ft.Federation, net: torch.nn.Module) -> None:
    """Self-FL stores two models and three values per client."""
    runs = []
    for max_memory_bytes in (2**28, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "fedtailor.training.simulated_clients.ClientStates",
                lambda initial, *_, size=max_memory_bytes: ClientStates(initial, size),
            )
            runs.append(ft.simulate(ft.methods.SelfFL(warmup=1), net, fed, rounds=4, participation=0.5, batch_size=3))
    for client in range(fed.num_clients):
        assert identical(runs[0].client(client), runs[1].client(client))
        assert identical(runs[0].personal(client), runs[1].personal(client))
    assert identical(runs[0].server, runs[1].server)
