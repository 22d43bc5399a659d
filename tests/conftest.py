"""Fixtures, small federations and networks, and helpers for all tests."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.core.batch import SharedContext
from fedtailor.core.trees import Tree
from fedtailor.methods import METHODS
from fedtailor.training.engines.kernels import convolution_algorithms, normalization, pooling
from fedtailor.training.engines.vectorized import Vectorized
from fedtailor.training.sample_index import SampleIndex

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; Triton reads this when it is imported
# The same inputs in every run, so that failures are reproducible; no deadline, because machines may be busy.
settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")
REPRESENTATIVE_METHODS = (
    "fedavg",
    "scaffold",
    "fedapm",
    "fedlag",
    "fedapa",
    "pfedhn",
    "fedproto",
    "selffl",
)  # one or more of every type
FEDERATED = [name for name, method in METHODS.items() if not method().pools_data]  # without centralized training
METHOD_PARAMS = [
    name if name in REPRESENTATIVE_METHODS else pytest.param(name, marks=pytest.mark.slow) for name in FEDERATED
]  # the other methods are marked slow
MEASURED = ("seconds", "peak_memory")  # beginnings of keys in a record that are measured, so they do not repeat
SIZES = (9, 4, 7, 1)  # training samples per client: uneven, and one client has a single sample


@pytest.fixture
def kernel_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return the device of Triton kernels: a GPU, or the CPU with Triton's interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.importorskip("triton", reason="Triton is not available on this platform")
    for module in (convolution_algorithms, normalization, pooling):
        monkeypatch.setattr(module, "has_triton_kernels", lambda x: x.dtype in (torch.float32, torch.bfloat16))
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def steady_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `auto` train the short runs of tests sequentially, however busy the machine is, and neither read nor write
    what it learned in the user's cache folder."""

    def fail() -> Path:
        raise OSError("no cache in tests")

    monkeypatch.setattr("fedtailor.training.engines.auto._SHORT_RUN_SECONDS", 10.0)
    monkeypatch.setattr("fedtailor.training.engines.learned_choices.cache_folder", fail)


def tiny_federation(sizes: Sequence[int] = SIZES, seed: int = 0) -> ft.Federation:
    """Return clients of different sizes with three classes and four features, in float64."""
    random = np.random.default_rng(seed)

    def samples(count: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
        y = random.integers(0, 3, count)
        return random.normal(size=(count, 4)) + np.eye(3, 4)[y] * 2 + shift, y

    return ft.Federation.from_arrays(
        [(*samples(size, client / 10), *samples(5, client / 10)) for client, size in enumerate(sizes)], classes=3
    )


def survival_federation(sizes: Sequence[int] = (13, 5, 9, 2)) -> ft.Federation:
    """Return clients of different sizes whose risk grows with the first feature."""
    random = np.random.default_rng(0)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = random.normal(size=(count, 3))
        time, censored = random.exponential(np.exp(-2 * x[:, 0])), random.exponential(1.0, size=count)
        return x, np.stack([time <= censored, np.minimum(time, censored)], 1).astype(np.float64)

    return ft.Federation.from_arrays([(*samples(size), *samples(20)) for size in sizes], survival=True)


class TinyNet(nn.Module):
    """Four inputs, five hidden units, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(x)))  # type: ignore[no-any-return]


class DivergingNet(TinyNet):
    """A network that diverges: after one step with lr=1, its weights are finite but its outputs are not."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e160 * super().forward(x)


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal, even if the tests run in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def fed() -> ft.Federation:
    return tiny_federation()


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return TinyNet().double()


def error_message(call: Callable[[], object]) -> str:
    """Return the message of the FedTailorError that a call raises; it must be one line of one or two sentences."""
    with pytest.raises(ft.FedTailorError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and text.count(". ") <= 1 and text[-1] in ".?" and len(text) > 20
    return text


def same(a: Tree, b: Tree, tolerance: float = 0.0) -> bool:
    """Return whether two trees have the same names and values, bit for bit unless a tolerance is given."""
    from fedtailor.core.trees import flatten

    left, right = flatten(a), flatten(b)
    assert left.keys() == right.keys()
    return all(torch.allclose(left[n].double(), right[n].double(), rtol=tolerance, atol=tolerance) for n in left)


def all_same(actual: Sequence[Tree], expected: Sequence[Tree], tolerance: float = 0.0) -> bool:
    """Return whether `same` is true for all pairs of two sequences of trees."""
    return all(same(a, b, tolerance) for a, b in zip(actual, expected, strict=True))


def wait_until(process: "subprocess.Popen[str]", condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; fail if the process ends before."""
    while not condition():
        with suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"the process ended with {process.wait(0.02)}")


def models(run: ft.Run, moment: str = "trained") -> list[Tree]:
    """Return the personal models of all clients."""
    return [run.personal(client, moment) for client in range(run.num_clients)]


def apply_mapped(
    shared: SharedContext,
    samples: SampleIndex,
    function: Callable[..., Tree],
    round: int,
    clients: Sequence[int],
    *trees: Tree,
) -> Tree:
    """Apply a client function to all clients with `torch.func.vmap`, as `Sequential.apply` does one by one."""
    return Vectorized(shared, samples, chunk_size=len(clients)).apply(function, round, clients, *trees)
