"""Networks by client: which clients have the same architecture."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import TinyNet, error_message, same, tiny_federation


class Net(nn.Module):
    """A network with an attribute that its layers do not show."""

    def __init__(self, width: int = 5, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.fc, self.activation, self.head = nn.Linear(4, width), activation, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.fc(x)))  # type: ignore[no-any-return]


FACTORIES: dict[str, tuple[Callable[[int], object], tuple[int, ...]]] = {
    "modules": (lambda client: Net(5 + client % 2), (0, 1, 0, 1)),
    "attributes": (lambda client: Net(5, torch.relu if client == 2 else torch.tanh), (0, 0, 1, 0)),
    "classes": (lambda client: TinyNet if client else Net, (0, 1, 1, 1)),
    "models": (lambda client: ft.wrap(lambda: Net(5 + client % 2)), (0, 1, 0, 1)),
    "losses": (lambda client: ft.wrap(Net, parts={"input": ["fc"]} if client == 3 else None), (0, 0, 0, 1)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_clients_with_the_same_network_have_one_architecture(name: str) -> None:
    factory, expected = FACTORIES[name]
    before = torch.random.get_rng_state()
    assert ft.client_models(factory, tiny_federation()).of_client == expected  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_named_networks_made_for_each_client_are_grouped() -> None:
    fed = ft.load("digits", clients=4)
    models = ft.client_models(lambda client: ft.network("mlp", fed, hidden=(8,) if client < 3 else (9,)), fed)
    assert models.of_client == (0, 0, 0, 1)
    assert [model.description["hidden"] for model in models.models] == [(8,), (9,)]


def test_new_modules_draw_weights_from_the_seed_and_kept_modules_keep_theirs() -> None:
    kept = [Net() for _ in range(2)]
    drawn = ft.client_models(lambda client: Net(), tiny_federation()).models[0]
    assert same(drawn.init(1), ft.wrap(Net).init(1)) and not same(drawn.init(1), drawn.init(2))
    models = ft.client_models(lambda client: kept[client % 2], tiny_federation())
    assert models.of_client == (0, 1, 0, 1)  # the same layers, but other weights
    assert all(same(model.init(7), dict(own.state_dict())) for model, own in zip(models.models, kept, strict=True))


def test_networks_that_cannot_train_together_are_rejected() -> None:
    fed = tiny_federation()
    different = [ft.wrap(Net), ft.wrap(Net, loss="regression")]
    assert "the same loss" in error_message(lambda: ft.client_models(different, fed))
    assert "a list of networks" in error_message(lambda: ft.client_models([], fed))
    assert "A model must be" in error_message(lambda: ft.client_models(lambda client: client, fed))  # type: ignore[arg-type,return-value]
