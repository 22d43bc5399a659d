"""Where clients' states lie: the same bits from memory and from a file, and room only for who took part."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from conftest import refusal
from fedtailor.store import ClientStore
from fedtailor.trees import Rows, Tree, flatten, map_leaves, stack

CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
SPOTS = pytest.mark.parametrize("in_memory", [2**28, 1], ids=["memory", "file"])  # 1: the first byte is too many


def start() -> Tree:
    """Every kind of leaf: several dtypes and shapes, odd numbers of bytes, scalars, no entries, rows, nested, empty."""
    return {
        "flag": torch.tensor(False),
        "deep": {"weights": torch.zeros(3, 2, dtype=torch.float64), "nothing": {}},
        "half": torch.ones(3, dtype=torch.bfloat16),
        "bytes": torch.zeros(5, dtype=torch.uint8),
        "none": torch.zeros(0, 4),
        "count": torch.tensor(7),
        "rows": Rows(torch.zeros(3, 2), torch.zeros(3, dtype=torch.bool)),
    }


def moved(number: int) -> Tree:
    """A tree of the same kind with other bits in every leaf; floats among them that no decimal text would keep."""
    random = torch.Generator().manual_seed(number)

    def fill(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=random, dtype=torch.float64).to(leaf.dtype)
        return torch.randint(0, 2 if leaf.dtype == torch.bool else 100, leaf.shape, generator=random).to(leaf.dtype)

    return map_leaves(fill, start())


def identical(a: Tree, b: Tree) -> bool:
    """The same structure, dtypes, shapes and numbers, to the last bit."""

    def structure(tree: Tree) -> object:
        return {name: structure(node) if isinstance(node, dict) else type(node) for name, node in tree.items()}

    left, right = flatten(a), flatten(b)
    return structure(a) == structure(b) and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


@SPOTS
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_every_client_gets_back_what_it_put_last(in_memory: int, device: torch.device) -> None:
    store = ClientStore(start(), in_memory)
    expected = {client: start() for client in range(6)}
    for number, clients in enumerate([[4, 1], [0], [5, 4, 0], [1]]):
        trees = {client: moved(10 * number + client) for client in clients}
        store.put(clients, map_leaves(lambda leaf: leaf.to(device), stack(list(trees.values()))))
        expected |= trees
        for asked in ([0, 1, 2, 3, 4, 5], [5, 3, 1], [2, 3], [4]):
            found = store.get(asked, device)
            assert all(leaf.device == device for leaf in flatten(found).values())
            assert identical(map_leaves(Tensor.cpu, found), stack([expected[client] for client in asked]))
    assert identical(store.one(4), expected[4]) and identical(store.one(2), start())
    assert [store.has(client) for client in range(6)] == [True, True, False, False, True, True]


@SPOTS
def test_the_tree_of_one_client_may_be_changed(in_memory: int) -> None:
    store = ClientStore({"a": torch.zeros(2)}, in_memory)
    store.put([2], {"a": torch.ones(1, 2)})
    store.put([1], {"a": torch.ones(1, 2)})
    for client in range(3):
        store.one(client)["a"].add_(5)
    assert store.get([0, 1, 2], CPU)["a"].tolist() == [[0, 0], [1, 1], [1, 1]]


def test_who_takes_part_in_every_round_is_not_copied() -> None:
    store, stacked = ClientStore({"a": torch.zeros(2)}), {"a": torch.ones(2, 2)}
    store.put([3, 5], stacked)
    assert store.get([3, 5], CPU)["a"] is stacked["a"]
    assert store.get([5, 3], CPU)["a"] is not stacked["a"]


def test_views_and_names_in_another_order_are_kept_by_name() -> None:
    store = ClientStore({"a": torch.zeros(2, 3), "b": torch.zeros(2)})
    across = torch.arange(6.0).reshape(1, 3, 2).transpose(1, 2)
    store.put([0], {"b": torch.ones(1, 1).expand(1, 2), "a": across})
    assert identical(store.one(0), {"a": across[0], "b": torch.ones(2)})


def test_an_empty_tree_has_only_who_took_part() -> None:
    store = ClientStore({})
    store.put([3], {})
    assert store.get([1, 3], CPU) == {} and store.has(3) and not store.has(1)


def test_the_file_grows_with_clients_that_took_part() -> None:
    """Not with their numbers, and not when they come again; what is in the file is not in memory."""
    store = ClientStore({"a": torch.zeros(1000)}, in_memory=1)
    sizes = []
    for clients in ([99_999_999, 5], [7], [5, 99_999_999], [7, 8], [7]):
        store.put(clients, {"a": torch.ones(len(clients), 1000)})
        sizes.append(os.fstat(store._file.fileno()).st_size)
    assert sizes == [0, 8000, 12_000, 12_000, 16_000]  # who was put last is not written yet


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
def test_other_names_or_shapes_are_refused(changed: Tree) -> None:
    store = ClientStore({"a": torch.zeros(3), "b": torch.zeros(())})
    assert "changed its names or shapes" in refusal(lambda: store.put([0, 1], changed))
    assert not store.has(0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Path("/dev/full").open("r+b"))  # noqa: SIM115 - closed by the store
    store = ClientStore({"a": torch.zeros(3)}, in_memory=1)
    store.put([0], {"a": torch.ones(1, 3)})
    said = refusal(lambda: store.put([1], {"a": torch.ones(1, 3)}))
    assert "No space left" in said and "TMPDIR" in said


def test_a_run_from_the_file_is_the_run_from_memory(fed: ft.Federation, net: torch.nn.Module) -> None:
    """Self-FL keeps two models and three numbers a client; a method must not notice where."""
    runs = []
    for in_memory in (2**28, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedtailor.rounds.ClientStore", lambda start, *_, size=in_memory: ClientStore(start, size))
            runs.append(ft.simulate(ft.methods.SelfFL(warmup=1), net, fed, rounds=4, participation=0.5, batch_size=3))
    for client in range(fed.num_clients):
        assert identical(runs[0].client(client), runs[1].client(client))
        assert identical(runs[0].personal(client), runs[1].personal(client))
    assert identical(runs[0].server, runs[1].server)
