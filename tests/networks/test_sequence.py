"""Networks for tokens: they learn, ignore padding, and run on all engines, after resuming, and in exported files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import same
from fedtailor.experiments.deployment import make_deployment
from fedtailor.experiments.experiment import make_experiment
from fedtailor.export.prediction import predict
from fedtailor.export.writers import export_model
from fedtailor.methods import METHODS
from fedtailor.training.client_update import initial_model, make_shared_context
from fedtailor.training.config import TrainingConfig
from fedtailor.training.preflight import measure_step_cost
from support.model_checks import is_one_sentence

LENGTH, TOKENS = 6, 8
SMALL: dict[str, dict[str, Any]] = {
    "lstm": {"embedding": 8, "hidden": 10, "layers": 2, "dropout": 0.3},
    "transformer": {"embedding": 8, "heads": 2, "hidden": 12, "layers": 1},
}
every_network = pytest.mark.parametrize("name", SMALL)


def token_federation(samples: tuple[int, ...] = (12, 7, 9), seed: int = 0) -> ft.Federation:
    """Return sequences of tokens 1 to 7, padded with 0; the class is the parity of the first token."""
    generator = torch.Generator().manual_seed(seed)

    def sequences(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(1, TOKENS, (count, LENGTH), generator=generator)
        lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
        return x * (torch.arange(LENGTH) < lengths), x[:, 0] % 2

    return ft.Federation.from_arrays([(*sequences(count), *sequences(count)) for count in samples], classes=2)


def small(name: str, fed: ft.Federation) -> ft.Model:
    return ft.network(name, fed, **SMALL[name])


class GRU(nn.Module):
    """A user's own recurrent network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 5)
        self.gru = nn.GRU(5, 4, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(x))[0].mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [*SMALL, "gru"])
def test_all_engines_give_the_same_model(name: str) -> None:
    fed = token_federation()
    model = ft.wrap(GRU) if name == "gru" else small(name, fed)
    runs = {
        engine: ft.simulate(ft.methods.FedAvg(), model, fed, rounds=2, batch_size=4, engine=engine, dtype="float64")
        for engine in ("sequential", "vectorized", "pool")
    }
    for run in runs.values():
        assert same(run.personal(1), runs["sequential"].personal(1), 1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [*SMALL, "gru"])
def test_gpu_gives_the_same_model(name: str) -> None:
    fed = token_federation((24, 20, 22))
    model = ft.wrap(GRU) if name == "gru" else small(name, fed)
    runs = [
        ft.simulate(
            ft.methods.FedAvg(), model, fed, rounds=2, batch_size=4, dtype="float64", engine=engine, device=device
        )
        for engine, device in (("sequential", "cpu"), ("sequential", "cuda"), ("vectorized", "cuda"))
    ]
    assert same(runs[1].personal(1), runs[0].personal(1), 1e-9) and same(runs[2].personal(1), runs[0].personal(1), 1e-9)


@pytest.mark.parametrize(("name", "lr"), [("lstm", 1.0), ("transformer", 0.3)])
def test_network_learns_parity_of_first_token(name: str, lr: float) -> None:
    """A network that ignored the order of tokens, or saw padding as a token, could not predict new sequences."""
    fed = token_federation((60, 50))
    model = ft.network(name, fed, embedding=8, hidden=16, layers=1, dropout=0.0)
    run = ft.simulate(ft.methods.FedAvg(lr=lr, epochs=5), model, fed, rounds=12, batch_size=10)
    assert run.records[-1]["accuracy_received"] > 0.85


@every_network
def test_padding_does_not_change_outputs(name: str) -> None:
    """A sequence gets the same output with more padding, and tokens in another order get another one."""
    fed = token_federation()
    model = small(name, fed).eval_mode
    params = model.init(0)
    x = torch.tensor([[3, 1, 4, 0, 0, 0], [1, 3, 4, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    outputs = model.logits(params, x)
    assert outputs.isfinite().all() and not torch.allclose(outputs[0], outputs[1])
    shorter = ft.network(name, ft.Federation.from_arrays([(x[:, :3], [0, 1, 0]) * 2]), vocabulary=8, **SMALL[name])
    shorter_params = params | ({"positions.weight": params["positions.weight"][:3]} if name == "transformer" else {})
    torch.testing.assert_close(shorter.eval_mode.logits(shorter_params, x[:, :3]), outputs)


@every_network
@pytest.mark.parametrize("method", ["fedper", "fedlag", "fedproto", "scaffold", "fedbn"])
def test_methods_that_split_the_model_train_these_networks(name: str, method: str) -> None:
    fed = token_federation()
    run = ft.simulate(METHODS[method](), small(name, fed), fed, rounds=2, batch_size=4, engine="vectorized")
    assert np.isfinite(run.records[-1]["loss_trained"])


def test_layers_of_lstm_are_embedding_lstm_and_head() -> None:
    model = small("lstm", token_federation())
    assert list(model.layers()) == ["embedding", "lstm", "head"]
    assert set(model.split(model.init(0), "head")[1]) == {"head.weight", "head.bias"}


@every_network
def test_vocabulary_is_inferred_recorded_and_used_after_resuming(name: str, tmp_path: Path) -> None:
    fed = token_federation()
    settings: dict[str, Any] = {"rounds": 3, "batch_size": 4, "checkpoint_every": 1, "engine": "sequential"}

    def stop(record: Any) -> None:
        if record["round"] == 2:
            raise KeyError

    with pytest.raises(KeyError):
        ft.simulate(ft.methods.FedPer(), small(name, fed), fed, folder=tmp_path / "a", on_round_end=stop, **settings)
    resumed = ft.resume(tmp_path / "a", fed=fed)
    expected = ft.simulate(ft.methods.FedPer(), small(name, fed), fed, **settings)
    assert resumed.experiment["network"]["vocabulary"] == TOKENS
    assert same(resumed.personal(2), expected.personal(2)) and len(resumed.records) == 3
    model = ft.load_personal(tmp_path / "a", client=2)
    assert float((model(fed.x[fed.test[2]]).argmax(1) == fed.y[fed.test[2]]).double().mean()) == pytest.approx(
        resumed.scores("trained")[2]
    )


@every_network
def test_exported_files_give_the_same_outputs(name: str, tmp_path: Path) -> None:
    fed = token_federation()
    ft.simulate(ft.methods.FedPer(), small(name, fed), fed, rounds=1, folder=tmp_path / "run")
    model, x = ft.load_personal(tmp_path / "run", client=1), fed.x[:7]
    for file in ("model.safetensors", "model.onnx"):
        again = ft.load_personal(export_model(model, tmp_path / file))
        torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-5)
    program = torch.export.load(export_model(model, tmp_path / "model.pt2")).module()
    torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)
    np.save(tmp_path / "new.npy", x.numpy().astype(np.uint8))  # other integers are converted
    torch.testing.assert_close(predict(model, tmp_path / "new.npy").outputs, model(x).detach())
    np.save(tmp_path / "unknown.npy", np.full((2, LENGTH), TOKENS))
    with pytest.raises(ft.ConfigError, match="tokens 0 to 7"):
        predict(model, tmp_path / "unknown.npy")


def test_settings_from_files_and_flags_choose_the_network(tmp_path: Path) -> None:
    fed = token_federation()
    for client in range(3):
        own = torch.cat([fed.train[client], fed.test[client]])
        np.savez(tmp_path / f"client{client}.npz", x=fed.x[own].numpy(), y=fed.y[own].numpy())
    settings = {"data": {"name": "folder", "folder": str(tmp_path)}, "network": {"name": "lstm", "hidden": 9}}
    experiment = make_experiment({"rounds": 1, **settings})
    run = experiment.run()
    assert run.experiment["network"] == {
        "name": "lstm", "vocabulary": TOKENS, "embedding": 64, "hidden": 9, "layers": 1, "dropout": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("x", "settings", "words"),
    [
        (torch.zeros(2, 3), {}, "needs tokens"),
        (torch.zeros(2, 3, dtype=torch.uint8), {}, "convert them to int64 if they are tokens"),
        (torch.zeros(2, 3, 3, dtype=torch.int64), {}, "needs tokens"),
        (torch.tensor([[1, 2], [1, -1]]), {}, "Client 0 has negative tokens"),
        (torch.tensor([[1, 2], [9, 1]]), {"vocabulary": 5}, "network.vocabulary to at least 10"),
        (torch.ones(2, 3, dtype=torch.int64), {"vocabulary": 1}, "network.vocabulary must be"),
        (torch.ones(2, 3, dtype=torch.int64), {"layers": 0}, "network.layers must be"),
        (torch.ones(2, 3, dtype=torch.int64), {"dropout": 1.0}, "network.dropout must be"),
        (torch.ones(2, 3, dtype=torch.int64), {"heads": 3}, "must divide"),
    ],
)
def test_invalid_tokens_or_settings_raise(x: Tensor, settings: dict[str, Any], words: str) -> None:
    fed = ft.Federation.from_arrays([(x, torch.tensor([0, 1])) * 2], classes=2)
    with pytest.raises(ft.FedTailorError, match=words) as raised:
        ft.network("transformer", fed, **settings)
    assert is_one_sentence(str(raised.value))


def test_deployment_needs_the_vocabulary() -> None:
    with pytest.raises(ft.ConfigError, match=r"set network\.vocabulary"):
        make_deployment({"network": "lstm", "inputs": {"shape": [6]}})
    deployment = make_deployment({"network": {"name": "lstm", "vocabulary": 5}, "inputs": {"shape": [6], "classes": 2}})
    assert deployment.model().description["vocabulary"] == 5


def test_step_cost_counts_recurrent_and_attention_layers() -> None:
    """The multiplications determine the number of threads."""
    fed, config = token_federation(), TrainingConfig(batch_size=2, device="cpu")

    def multiplications(name: str, width: int) -> int:
        settings = {"hidden": width} if name == "lstm" else {"embedding": width}
        model, params = initial_model(ft.network(name, fed, **settings), config)
        shared = make_shared_context(config, model, fed, torch.tensor([12]), 1, 1.0)
        return measure_step_cost(model.eval_mode, params, shared).multiplications

    # by hand: forward and backward passes, 2 samples, 6 tokens, four gates of the input and of the state, and the head
    assert multiplications("lstm", 100) == 3 * 2 * (6 * 400 * (64 + 100) + 100 * 2)
    assert multiplications("transformer", 256) > 4 * multiplications("transformer", 64)
