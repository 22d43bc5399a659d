"""`Federation` keeps the data as given, and errors name the client with invalid data."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import fedtailor as ft
from conftest import error_message
from fedtailor.data.images.datasets import MNIST
from fedtailor.data.normalization import Normalization
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.splits.class_fractions import PARTITIONS
from support.datasets import ListDataset

Array = NDArray[Any]
Client = tuple[Any, Any, Any, Any]
RNG = np.random.default_rng(3)
NAMES = ["ann", "bob", "cem"]
CPU = torch.device("cpu")


def client(train: int = 6, test: int = 3, dtype: Any = np.float32, shape: tuple[int, ...] = (4,)) -> Client:
    def samples(count: int) -> tuple[Array, Array]:
        return (RNG.random((count, *shape)) * 200).astype(dtype), RNG.permutation(np.arange(count) % 3)

    return *samples(train), *samples(test)


def replace_part(given: Client, position: int, value: Any) -> Client:
    a, b, c, d = (value if i == position else part for i, part in enumerate(given))
    return a, b, c, d


def build(clients: list[Client], **settings: Any) -> ft.Federation:
    return ft.Federation.from_arrays(clients, names=NAMES[: len(clients)], **settings)


def arrays_of(fed: ft.Federation, number: int) -> Client:
    """Return a client's arrays from the federation."""
    assert isinstance(fed.x, Tensor)
    train, test = fed.train[number], fed.test[number]
    return fed.x[train], fed.y[train], fed.x[test], fed.y[test]


# from_arrays


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.float16, np.float32, np.float64, bool])
@pytest.mark.parametrize("shape", [(), (4,), (3, 5, 5)])
def test_from_arrays_keeps_values_and_dtypes(dtype: Any, shape: tuple[int, ...]) -> None:
    clients = [client(6, 3, dtype, shape), client(1, 1, dtype, shape), client(4, 9, dtype, shape)]
    for given in (clients, [tuple(torch.as_tensor(part) for part in one) for one in clients]):
        fed = ft.Federation.from_arrays(given)  # type: ignore[arg-type]
        assert fed.num_clients == 3 and fed.shape == shape and fed.classes == 3 and fed.names == ("0", "1", "2")
        for number, parts in enumerate(clients):
            for stored, part in zip(arrays_of(fed, number), parts, strict=True):
                assert stored.numpy().dtype == part.dtype
                np.testing.assert_array_equal(stored.numpy(), part)


def test_from_arrays_with_several_inputs() -> None:
    def parts(count: int) -> dict[str, Array]:
        return {"image": RNG.integers(0, 255, (count, 2, 2), np.uint8), "words": RNG.integers(0, 99, (count, 5))}

    clients = [(parts(4), np.zeros(4, int), parts(2), np.ones(2, int)) for _ in range(2)]
    fed = build(clients)
    assert fed.shape is None and isinstance(fed.x, dict) and fed.x["image"].dtype == torch.uint8
    for number, (x_train, _, x_test, _) in enumerate(clients):
        for name, part in fed.x.items():
            np.testing.assert_array_equal(part[fed.train[number]], x_train[name])
            np.testing.assert_array_equal(part[fed.test[number]], x_test[name])


def test_from_arrays_with_regression_targets() -> None:
    for y in (RNG.normal(size=8), RNG.normal(size=(8, 2)), RNG.integers(0, 5, (8, 6))):
        fed = build([(np.zeros((8, 3)), y, np.zeros((8, 3)), y)])
        assert fed.classes is None and fed.class_counts(fed.train[0]) is None
        np.testing.assert_array_equal(arrays_of(fed, 0)[1], y)


def test_from_arrays_with_boolean_targets_has_two_classes() -> None:
    y = np.array([True, False, True])
    fed = build([(np.zeros((3, 2)), y, np.zeros((3, 2)), y)])
    assert fed.classes == 2 and fed.class_counts(fed.train[0]) == [1, 2]


def test_from_arrays_with_any_memory_layout_gives_no_warning() -> None:
    x, y = client()[0], np.array([0, 1, 2, 0, 1, 2])
    read_only = x.copy()
    read_only.flags.writeable = False
    for array in (x[::-1].copy()[::-1], x.astype(">f4"), np.asfortranarray(x), read_only, list(x), x.tolist()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fed = build([(array, y[::-1], array, y[::-1])])
        for stored, part in zip(arrays_of(fed, 0), (x, y[::-1], x, y[::-1]), strict=True):
            np.testing.assert_array_equal(stored, part)


def test_from_arrays_detaches_tensors() -> None:
    x = torch.zeros(4, 2, requires_grad=True)
    fed = build([(x * 2, torch.zeros(4), x, torch.zeros(4))])
    assert isinstance(fed.x, Tensor) and not fed.x.requires_grad


def test_from_arrays_with_more_classes_than_labels() -> None:
    fed = build([client(), client()], classes=7)
    counts = fed.class_counts(fed.train[1])
    assert fed.classes == 7 and counts is not None and len(counts) == 7 and sum(counts) == len(fed.train[1])


def with_value(array: Array, value: float) -> Array:
    array = array.copy()
    array[-1] = value
    return array


NO_X, NO_Y = np.zeros((0, 4), np.float32), np.zeros(0, int)
INVALID: dict[str, tuple[Callable[[Client], Any], str]] = {
    "NaN in training inputs": (lambda c: replace_part(c, 0, with_value(c[0], np.nan)), "NaN or infinity in its inputs"),
    "infinity in test inputs": (
        lambda c: replace_part(c, 2, with_value(c[2], np.inf)),
        "NaN or infinity in its inputs",
    ),
    "label too large": (lambda c: replace_part(c, 1, with_value(c[1], 3)), "the label 3; labels must be from 0 to 2"),
    "label below 0, in the test data": (lambda c: replace_part(c, 3, with_value(c[3], -1)), "the label -1"),
    "no training data": (lambda c: (NO_X, NO_Y, c[2], c[3]), "no training data"),
    "more inputs than targets": (lambda c: replace_part(c, 1, c[1][:-1]), "6 rows, but there are 5 targets"),
    "fewer test inputs than targets": (lambda c: replace_part(c, 2, c[2][:-1]), "2 rows, but there are 3 targets"),
    "another shape": (lambda c: replace_part(c, 2, c[2][:, :3]), "(3,)"),
    "another dtype": (lambda c: replace_part(c, 0, c[0].astype(np.float64)), "float64"),
    "other targets": (lambda c: replace_part(c, 1, c[1] / 2), "targets are float64"),
    "text as targets": (lambda c: replace_part(c, 1, c[1].astype(str)), "text labels, but other labels are numbers"),
    "objects as inputs": (lambda c: replace_part(c, 0, c[0].astype(object)), "inputs cannot be converted"),
    "ragged inputs": (lambda c: replace_part(c, 0, [[1.0], [1.0, 2.0]]), "inputs cannot be converted"),
    "nothing as inputs": (lambda c: replace_part(c, 0, None), "inputs cannot be converted"),
    "a number as targets": (lambda c: replace_part(c, 1, 3), "single number"),
    "parts where others have one": (lambda c: replace_part(c, 0, {"a": c[0]}), "do not have the same parts"),
    "parts of different lengths": (lambda c: replace_part(c, 0, {"a": c[0], "b": c[0][:2]}), "inputs 'b' have 2 rows"),
    "no parts": (lambda c: replace_part(c, 0, {}), "no parts"),
    "two arrays": (lambda c: c[:2], "x_train, y_train, x_test, y_test"),
}


@pytest.mark.parametrize("fault", INVALID)
def test_from_arrays_with_invalid_client_names_it(fault: str) -> None:
    corrupt, words = INVALID[fault]
    clients = [client(), corrupt(client()), client()]
    text = error_message(lambda: build(clients, classes=3))
    assert words in text and "bob" in text and "cem" not in text


def test_from_arrays_with_different_parts_raises() -> None:
    x, y = np.zeros((4, 2)), np.zeros(4, int)
    good = ({"a": x, "b": x}, y, {"a": x, "b": x}, y)
    for bad in ({"a": x}, {"a": x, "c": x}, x):
        assert "bob" in error_message(lambda bad=bad: build([good, (bad, y, {"a": x, "b": x}, y)]))  # type: ignore[misc]
    nan = {"a": x, "b": x * np.nan}
    assert "bob has NaN" in error_message(lambda: build([good, (nan, y, {"a": x, "b": x}, y)]))
    other = error_message(lambda: build([good, ({"a": x, "b": x[:, :1]}, y, {"a": x, "b": x}, y)]))
    assert "bob's inputs 'b'" in other


def test_from_arrays_with_nan_targets_raises() -> None:
    x, y = np.zeros((4, 2)), np.zeros(4)
    text = error_message(lambda: build([(x, y, x, y), (x, y, x, y * np.nan)]))
    assert "bob has NaN or infinity in its targets" in text


@pytest.mark.parametrize(
    ("clients", "names", "words"),
    [(0, None, "at least one client"), (2, ["a"], "2 clients but 1 names"), (3, ["a", "b", "a"], "2 clients have the")],
)
def test_from_arrays_with_invalid_names_raises(clients: int, names: list[str] | None, words: str) -> None:
    given = [client() for _ in range(clients)]
    assert words in error_message(lambda: ft.Federation.from_arrays(given, names=names))


# from_owners


def test_from_owners_holds_out_fraction_per_class() -> None:
    x, y = RNG.normal(size=(60, 2)), np.repeat([0, 1, 2], 20)
    owned = [np.arange(0, 60, 2), np.arange(1, 60, 2)]
    fed = ft.Federation.from_owners(x, y, owned, test=0.2)
    for mine, train, test in zip(owned, fed.train, fed.test, strict=True):
        assert sorted([*train.tolist(), *test.tolist()]) == mine.tolist()
        assert np.bincount(y[test]).tolist() == [2, 2, 2]


def test_from_owners_split_depends_on_seed_and_client() -> None:
    x, y, owned = np.zeros((80, 2)), np.arange(80) % 4, [list(range(40)), list(range(40, 80))]
    feds = [ft.Federation.from_owners(x, y, owned, seed=seed) for seed in (0, 0, 1)]
    tests = [[test.tolist() for test in fed.test] for fed in feds]
    assert tests[0] == tests[1] != tests[2]
    assert [i + 40 for i in tests[0][0]] != tests[0][1], "clients with equal labels have different splits"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"owned": [[0, 1], [1, 2]]}, "Sample 1 is owned twice"),
        ({"owned": [[0, 1, 1], [2, 3]]}, "Sample 1 is owned twice"),
        ({"owned": [[0, 1], [2, 9]]}, "bob owns samples that do not exist"),
        ({"owned": [[0, 1], [2, -1]]}, "bob owns samples that do not exist"),
        ({"owned": [[0, 1, 2, 3], []]}, "bob has no training data"),
        ({"x": np.zeros((8, 2))}, "8 rows, but there are 6 targets"),
        ({"y": np.array(3)}, "single number"),
        ({"seed": -1}, "seed must be"),
        *(({"test": fraction}, "test must be") for fraction in (0, 1, -0.5, 1.5, float("nan"))),
    ],
)
def test_from_owners_with_invalid_argument_raises(changes: dict[str, Any], words: str) -> None:
    given = {"x": np.zeros((6, 2)), "y": np.zeros(6, int), "owned": [[0, 1, 2], [3, 4, 5]]} | changes
    arguments = [given.pop(name) for name in ("x", "y", "owned")]
    assert words in error_message(lambda: ft.Federation.from_owners(*arguments, names=["ann", "bob"], **given))  # type: ignore[arg-type]


def test_from_owners_with_invalid_label_names_its_client() -> None:
    y = np.array([0, 8, 0, 0, 9, 0])
    text = error_message(lambda: ft.Federation.from_owners(y[:, None] * 1.0, y, [[3, 4, 5], [0, 1, 2]], classes=2))
    assert "Client 1 has the label 8" in text or "Client 0 has the label 9" in text


def test_from_owners_ignores_samples_without_owner() -> None:
    x = np.array([[0.0], [1.0], [np.nan]])
    fed = ft.Federation.from_owners(x, np.array([0, 1, -5]), [np.array([0, 1])], classes=2)
    assert fed.num_clients == 1


# from_dataset


class StreamDataset(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(2), 0


def test_from_dataset_makes_one_client_per_owner() -> None:
    owners = RNG.choice(["zoe", "ann", "bob"], 60)
    x = torch.arange(60.0)[:, None]
    fed = ft.Federation.from_dataset(TensorDataset(x, torch.zeros(60).long()), owners)  # type: ignore[arg-type]
    assert fed.names == ("ann", "bob", "zoe")
    for number, name in enumerate(fed.names):
        x_train, _, x_test, _ = arrays_of(fed, number)
        numbers = sorted(int(value) for value in torch.cat([x_train, x_test]))
        assert numbers == np.flatnonzero(owners == name).tolist()


@pytest.mark.parametrize("kind", ["torch", "numpy", "python", "parts"])
def test_from_dataset_accepts_all_sample_types(kind: str) -> None:
    x, y = RNG.integers(0, 255, (8, 1, 2, 2), np.uint8), RNG.permutation(np.arange(8) % 3)
    kinds: dict[str, list[Any]] = {
        "torch": [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(x, y, strict=True)],
        "numpy": list(zip(x, y, strict=True)),
        "python": [[a.tolist(), int(b)] for a, b in zip(x, y, strict=True)],
        "parts": [({"a": a}, b) for a, b in zip(x, y, strict=True)],
    }
    fed = ft.Federation.from_dataset(ListDataset(kinds[kind]), [1, 2] * 4)
    inputs = fed.x["a"] if isinstance(fed.x, dict) else fed.x
    np.testing.assert_array_equal(inputs, x)
    np.testing.assert_array_equal(fed.y, y)
    assert inputs.dtype == (torch.int64 if kind == "python" else torch.uint8)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([(torch.zeros(2), 0)] * 3 + [(torch.zeros(3), 0)], "Client ann's inputs are float32 (3,)"),
        ([(torch.zeros(2), 0)] * 3 + [(torch.zeros(2), 0.5)], "Client ann's targets"),
        ([(torch.zeros(2), 0)] * 3 + [({"a": torch.zeros(2)}, 0)], "Client ann's inputs do not have the same parts"),
        ([(torch.zeros(2), 0, "meta")] * 4, "pairs (x, y)"),
        ([{"x": 1, "y": 2}] * 4, "pairs (x, y)"),
        ([torch.zeros(2, 2)] * 4, "pairs (x, y)"),
        ([(torch.zeros(2), None)] * 4, "Client bob's targets cannot be converted"),
        ([(torch.zeros(2), 0)] * 3 + [(torch.zeros(2), "cat")], "Client ann has text labels"),
        ([(torch.zeros(2), 0)] * 3 + [(torch.full((2,), torch.nan), 0)], "Client ann has NaN"),
        ([(torch.zeros(2), 0)] * 3 + [(torch.zeros(2), -1)], "Client ann has the label -1"),
    ],
)
def test_from_dataset_with_invalid_sample_names_owner(samples: list[Any], words: str) -> None:
    assert words in error_message(
        lambda: ft.Federation.from_dataset(ListDataset(samples), ["bob", "ann", "bob", "ann"])
    )


def test_from_dataset_with_invalid_owners_raises() -> None:
    data = TensorDataset(torch.zeros(4, 2), torch.zeros(4).long())
    assert "4 samples but 3 owners" in error_message(lambda: ft.Federation.from_dataset(data, [1, 1, 2]))
    assert "sample 3" in error_message(lambda: ft.Federation.from_dataset(data, ["ann"] * 3 + [None]))
    assert "no samples" in error_message(lambda: ft.Federation.from_dataset(ListDataset([]), []))
    assert "length" in error_message(lambda: ft.Federation.from_dataset(StreamDataset(), [1]))
    assert "test must be" in error_message(lambda: ft.Federation.from_dataset(data, [1] * 4, test=1.0))


# preprocessing


def test_preprocessing_scales_bytes_and_converts_floats() -> None:
    x = {"bytes": np.array([[0, 51, 255]], np.uint8), "floats": np.ones((1, 2)), "tokens": np.array([[7, 300]])}
    fed = build([(x, np.zeros(1, int), x, np.zeros(1, int))])
    prepared = fed.make_preprocessing(torch.float32, CPU)(fed.x)
    assert isinstance(prepared, dict)
    assert torch.allclose(prepared["bytes"][0], torch.tensor([0.0, 0.2, 1.0]))
    assert [prepared[name].dtype for name in x] == [torch.float32, torch.float32, torch.int64]
    assert prepared["tokens"][0].tolist() == [7, 300]


def test_preprocessing_normalizes_channels() -> None:
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.4, 0.8)
    x = np.stack([np.full((4, 4), 255 * m) for m in mean])[None].round().astype(np.uint8)
    brighter = x + np.uint8(10)
    fed = build([(x, np.zeros(1), brighter, np.zeros(1))], mean=mean, std=std)
    prepared = fed.make_preprocessing(torch.float64, CPU)(fed.x)
    assert isinstance(prepared, Tensor) and prepared.shape == (2, 3, 4, 4) and prepared.dtype == torch.float64
    assert prepared[0].abs().max() < 0.02, "pixels at the mean become 0, up to rounding"
    steps = (prepared[1] - prepared[0]).mean((1, 2))
    assert torch.allclose(steps, 10 / 255 / torch.tensor(std, dtype=torch.float64))


@pytest.mark.parametrize(
    "wrong", [{"std": (0.0,)}, {"std": (-1.0,)}, {"mean": (float("nan"),)}, {"mean": 0.5}, {"std": "ab"}], ids=str
)
def test_mean_and_std_that_cannot_normalize_raise(wrong: dict[str, Any]) -> None:
    """Training would end with NaN, and the error would blame the learning rate."""
    assert "mean" in error_message(lambda: build([client(shape=(3, 4, 4))], **wrong))


def test_mean_and_std_of_wrong_length_raise() -> None:
    images = client(shape=(3, 4, 4))
    for field in ("mean", "std"):
        assert "channel" in error_message(lambda field=field: build([images], **{field: (0.1, 0.2)}))  # type: ignore[misc]


@pytest.mark.parametrize("per", ["channel", "pixel"])
@pytest.mark.parametrize(("dtype", "shape"), [(np.uint8, (3, 5, 4)), (np.float32, (2, 6)), (np.float64, (7,))])
def test_with_normalization_gives_mean_0_and_std_1_over_training_data(dtype: Any, shape: Any, per: Any) -> None:
    random = np.random.default_rng(0)
    scale = (1 + np.arange(shape[0])).reshape(-1, *[1] * (len(shape) - 1))

    def samples(count: int, shift: int) -> tuple[np.ndarray, np.ndarray]:
        return (random.integers(0, 50, (count, *shape)) * scale + shift).astype(dtype), np.zeros(count, int)

    fed = build([(*samples(size, size), *samples(2, 90)) for size in (5, 30)]).with_normalization(per)
    x = fed.make_preprocessing(torch.float64, CPU)(fed.x[torch.cat(fed.train)])
    x = x.transpose(0, 1).flatten(1) if per == "channel" else x.flatten(1).T  # one row per channel or pixel
    assert torch.allclose(x.mean(1), torch.zeros(len(x)).double(), atol=1e-4)
    assert torch.allclose(x.std(1, correction=0), torch.ones(len(x)).double(), atol=1e-4)


def test_with_normalization_half_maps_bytes_from_minus_1_to_1_and_none_from_0() -> None:
    x, y = np.array([[[0, 255]], [[51, 204]]], np.uint8)[None], np.zeros(1, int)
    fed = build([(x, y, x, y)], mean=(0.1, 0.2), std=(0.3, 0.4))
    half, none = (fed.with_normalization(kind) for kind in ("half", "none"))
    expected = torch.tensor([[[-1.0, 1.0]], [[-0.6, 0.6]]])
    assert torch.allclose(half.make_preprocessing(torch.float32, CPU)(fed.x)[0], expected)
    assert torch.allclose(none.make_preprocessing(torch.float32, CPU)(fed.x)[0], (expected + 1) / 2)


def test_with_normalization_keeps_constant_channels_finite_and_large_offsets_exact() -> None:
    x = np.stack([np.full(4, 0.1), 1e6 + np.arange(4.0)], 1)
    fed = build([(x, np.zeros(4, int), x, np.zeros(4, int))]).with_normalization()
    prepared = fed.make_preprocessing(torch.float64, CPU)(fed.x[:4])
    assert fed.std is not None and fed.std[0] == 1 and fed.mean == pytest.approx((0.1, 1e6 + 1.5), abs=1e-5)
    assert torch.allclose(prepared[:, 1], (torch.arange(4.0).double() - 1.5) / 1.25**0.5, atol=1e-5)


def test_with_normalization_of_tokens_or_several_parts_raises() -> None:
    tokens, y = np.array([[7, 300]]), np.zeros(1, int)
    for x in (tokens, {"a": np.ones((1, 2)), "b": np.ones((1, 2))}):
        assert "single part" in error_message(build([(x, y, x, y)]).with_normalization)


def test_load_with_normalize_is_recorded_and_reproduced() -> None:
    for kind in get_args(Normalization):
        fed = ft.load("digits", clients=3, normalize=kind)
        again = ft.load(**fed.settings)
        assert (fed.mean, fed.std) == (again.mean, again.std) and (fed.mean is None) == (kind == "none")
        assert ft.load("digits", clients=3).with_normalization(kind).settings == fed.settings
    assert "data.normalize" in error_message(lambda: ft.load("digits", normalize=True))


def test_simulate_on_bytes_equals_scaled_floats() -> None:
    x = RNG.integers(0, 256, (48, 5), np.uint8)
    y = (x[:, 0] > 127).astype(int)
    models = []
    for stored in (x, (x / 255).astype(np.float32), x / 255):
        fed = build([(stored[i::4], y[i::4], stored[i + 1 :: 4], y[i + 1 :: 4]) for i in (0, 2)])
        run = ft.simulate(ft.methods.FedAvg(lr=0.1), ft.network("logistic", fed), fed, rounds=3, device="cpu")
        models.append(torch.cat([p.flatten() for p in run.personal(0).values()]))
    assert models[0].dtype == torch.float32
    assert torch.allclose(models[0], models[1], atol=1e-6) and torch.allclose(models[0], models[2], atol=1e-6)


def test_simulate_with_too_few_outputs_names_client() -> None:
    clients = [(np.zeros((4, 4)), np.zeros(4, int)) * 2, (np.zeros((4, 4)), np.full(4, 2)) * 2]
    fed = build(clients, classes=3)
    two_outputs = ft.wrap(nn.Sequential(nn.Linear(4, 2)), head="0")
    assert "bob" in error_message(lambda: ft.simulate(ft.methods.FedAvg(), two_outputs, fed, rounds=1, device="cpu"))


# named data sets


@pytest.mark.parametrize("partition", sorted(PARTITIONS.keys() - {"pfedme"}))
def test_load_assigns_all_samples(partition: str) -> None:
    fed = ft.load("digits", clients=15, partition=partition, test=0.2)
    positions = torch.cat([*fed.train, *fed.test]).sort().values
    assert torch.equal(positions, torch.arange(1797)), "each sample belongs to one client"
    for number in range(15):
        train, test = fed.y[fed.train[number]], fed.y[fed.test[number]]
        counts = torch.bincount(torch.cat([train, test]), minlength=10)
        assert (torch.bincount(test, minlength=10) - 0.2 * counts).abs().max() < 1 + 1e-6, (
            "equal proportions of classes"
        )


def test_load_settings_reproduce_federation() -> None:
    fed = ft.load("digits", clients=5, partition="power_law", exponent=0.5, seed=3)
    again = ft.load(**fed.settings)
    assert fed.settings["exponent"] == 0.5 and fed.settings["seed"] == 3
    assert all(torch.equal(a, b) for a, b in zip(fed.train + fed.test, again.train + again.test, strict=True))


def test_load_split_depends_on_seed() -> None:
    feds = [ft.load("digits", clients=5, partition="iid", seed=seed) for seed in (0, 0, 1)]
    first = [set(torch.cat([fed.train[0], fed.test[0]]).tolist()) for fed in feds]
    assert first[0] == first[1] != first[2]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("digit", {}, "did you mean 'digits'"),
        ("digits", {"client": 5}, "did you mean 'clients'"),
        ("digits", {"partition": "by_owner"}, "from_dataset"),
        ("digits", {"clients": 2000}, "1797 samples are too few for 2000 clients"),
        ("digits", {"test": 1.0}, "test must be"),
        ("digits", {"alpha": -1.0}, "alpha"),
        ("digits", {"seed": -1}, "seed"),
        ("folder", {}, "data.folder"),
    ],
)
def test_load_with_invalid_settings_raises(name: str, settings: dict[str, Any], words: str) -> None:
    assert words in error_message(lambda: ft.load(name, **settings))


def test_load_with_unknown_partition_raises_before_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(data: MNIST) -> SampleTable:
        raise AssertionError("downloaded")

    monkeypatch.setattr(MNIST, "read", fetch)
    assert "did you mean 'dirichlet'" in error_message(lambda: ft.load("mnist", partition="dirichlett"))
