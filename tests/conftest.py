"""Small problems that every test may use."""

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.batch import Common
from fedtailor.engines.vectorized import Vectorized
from fedtailor.methods import METHODS
from fedtailor.samples import Samples
from fedtailor.trees import Tree

torch.set_num_threads(1)
# the same inputs every time, so that nobody's change fails for an older fault; and no clock, for machines are busy
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")
SOME = ("fedavg", "scaffold", "fedapm", "fedlag", "fedapa", "pfedhn", "fedproto", "selffl")  # of every kind
SOME_FAST = [
    name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in METHODS
]  # the others slow
SIZES = (9, 4, 7, 1)  # training samples of the clients: uneven, one with a single sample


def tiny_federation(sizes: Sequence[int] = SIZES, seed: int = 0) -> ft.Federation:
    """Clients of very different sizes with three classes in four dimensions, in float64."""
    random = np.random.default_rng(seed)

    def samples(count: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
        y = random.integers(0, 3, count)
        return random.normal(size=(count, 4)) + np.eye(3, 4)[y] * 2 + shift, y

    return ft.Federation.from_arrays(
        [(*samples(size, client / 10), *samples(5, client / 10)) for client, size in enumerate(sizes)], classes=3
    )


class TinyNet(nn.Module):
    """Four inputs, five hidden units, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(x)))  # type: ignore[no-any-return]


class Loud(TinyNet):
    """After one step with lr=1 its weights are numbers still, but what it answers is not: it diverged."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e160 * super().forward(x)


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """Ctrl-C as in a terminal, also where the tests themselves run in a background that ignores it."""
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


def refusal(call: Callable[[], object]) -> str:
    """The sentence with which a call is refused; it must be one."""
    with pytest.raises(ft.Refused) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and ". " not in text and text[-1] in ".?" and len(text) > 20
    return text


def same(a: Tree, b: Tree, tolerance: float = 0.0) -> bool:
    """Whether two trees hold the same names and numbers; to the last bit unless a tolerance is given."""
    from fedtailor.trees import flatten

    left, right = flatten(a), flatten(b)
    assert left.keys() == right.keys()
    return all(torch.allclose(left[n].double(), right[n].double(), rtol=tolerance, atol=tolerance) for n in left)


def alike(found: Sequence[Tree], wanted: Sequence[Tree], tolerance: float = 0.0) -> bool:
    """`same` of every two."""
    return all(same(a, b, tolerance) for a, b in zip(found, wanted, strict=True))


def wait_until(process: "subprocess.Popen[str]", holds: Callable[[], bool]) -> None:
    """Wait for something another process does; it must not end before."""
    while not holds():
        with suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"the process ended with {process.wait(0.02)}")


def models(run: ft.Run, moment: str = "trained") -> list[Tree]:
    """Everyone's own model."""
    return [run.personal(client, moment) for client in range(run.num_clients)]


def apply_mapped(
    common: Common, samples: Samples, function: Callable[..., Tree], round: int, clients: Sequence[int], *trees: Tree
) -> Tree:
    """A client's function over all clients at once: what `Sequential.apply` does one by one."""
    return Vectorized(common, samples, chunk=len(clients)).apply(function, round, clients, *trees)
