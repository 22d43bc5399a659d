"""Networks for tokens: they learn, ignore padding, and run on all engines, after resuming, and in exported files."""

from dataclasses import replace
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
from fedtailor.runs.serialization import load_tensors
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
        "name": "lstm", "vocabulary": TOKENS, "embedding": 64, "hidden": 9, "layers": 1, "dropout": 0.0,
        "skip_padding": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("x", "settings", "words"),
    [
        (torch.zeros(2, 3), {}, "needs tokens"),
        (torch.zeros(2, 3, 10), {}, "heads must divide the embedding's width 10"),
        (torch.zeros(2, 3, 8), {"pretrained": "words.npy"}, "network.pretrained is for tokens"),
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


def lstm_weights(inputs: int, hidden: int) -> int:
    """Return the number of parameters of two LSTM layers: four gates from input and state, with two biases."""
    return sum(4 * hidden * (before + hidden + 2) for before in (inputs, hidden))


@pytest.mark.parametrize(
    ("shape", "classes", "settings", "expected"),
    [
        ((25, 300), 2, {"hidden": 256, "layers": 2}, lstm_weights(300, 256) + 257 * 2),  # Self-FL's Sent140
        ((25, 300), 2, {"hidden": 256, "layers": 2, "linear": 30},  # FedProx's code
         lstm_weights(300, 256) + 257 * 30 + 31 * 2),
        ((80,), 81, {"embedding": 8, "hidden": 256, "layers": 2},  # Shakespeare of LEAF; 80 characters and padding
         81 * 8 + lstm_weights(8, 256) + 257 * 81),
    ],
)  # fmt: skip
def test_lstm_has_the_sizes_of_sent140_and_shakespeare(
    shape: tuple[int, ...], classes: int, settings: dict[str, Any], expected: int
) -> None:
    x = torch.full((2, 80), 80) if len(shape) == 1 else torch.ones(2, *shape)
    model = ft.network("lstm", ft.Federation.from_arrays([(x, torch.arange(2)) * 2], classes=classes), **settings)
    assert sum(p.numel() for p in model.init(0).values()) == expected
    assert model.logits(model.init(0), x).shape == (2, classes)


def write_words(folder: Path, rows: int = TOKENS) -> Path:
    """Write a matrix of vectors of width 8, one per token, and return its path."""
    path = folder / f"words{rows}.npy"
    np.save(path, np.random.default_rng(0).normal(size=(rows, 8)))
    return path


def embed(fed: ft.Federation, words: Path) -> ft.Federation:
    """Return the federation with the vectors of its tokens instead of these; padding is zero."""
    matrix = torch.from_numpy(np.load(words)).float()
    matrix[0] = 0
    return replace(fed, x=matrix[fed.x])


@every_network
def test_pretrained_embedding_is_constant_and_equals_embedded_inputs(name: str, tmp_path: Path) -> None:
    """Tokens with a pretrained embedding train as their vectors do, and the embedding is neither trained nor sent."""
    tokens, words = token_federation(), write_words(tmp_path)
    settings: dict[str, Any] = {"rounds": 2, "batch_size": 4, "dtype": "float64", "engine": "sequential"}
    model = ft.network(name, tokens, pretrained=str(words), **SMALL[name] | {"dropout": 0.0, "embedding": 3})
    assert model.description["embedding"] == 8 and "embedding.weight" not in model.init(0)
    run = ft.simulate(ft.methods.FedAvg(), model, tokens, folder=tmp_path / "run", **settings)
    vectors = embed(tokens, words)
    same_model = ft.network(name, vectors, **SMALL[name] | {"dropout": 0.0})
    expected = ft.simulate(
        ft.methods.FedAvg(), same_model, vectors, initial_weights=start_of(run, same_model), **settings
    )
    found = {name: value for name, value in run.personal(1).items() if name != "embedding.weight"}
    assert same(found, expected.personal(1), 1e-6)
    words.unlink()  # a saved model contains its vectors
    personal = ft.load_personal(tmp_path / "run", client=1)
    assert float((personal(tokens.x[tokens.test[1]]).argmax(1) == tokens.y[tokens.test[1]]).double().mean()) == (
        pytest.approx(run.scores("trained")[1])
    )


def start_of(run: ft.Run, model: ft.Model) -> dict[str, Tensor]:
    """Return the initial weights of a run that a model has."""
    assert run.folder is not None
    start = load_tensors(run.folder / "start.safetensors")
    return {name: start[name] for name in model.names}


@pytest.mark.parametrize("inputs", ["pretrained", "vectors"])
def test_all_engines_give_the_same_model_without_trained_embedding(inputs: str, tmp_path: Path) -> None:
    words = write_words(tmp_path)
    fed = token_federation() if inputs == "pretrained" else embed(token_federation(), words)
    own = {"pretrained": str(words)} if inputs == "pretrained" else {}
    model = ft.network("lstm", fed, hidden=6, layers=2, linear=5, skip_padding=False, **own)
    runs = [
        ft.simulate(ft.methods.FedAlt(), model, fed, rounds=2, batch_size=4, engine=engine, dtype="float64")
        for engine in ("sequential", "vectorized", "pool")
    ]
    for run in runs[1:]:
        assert same(run.personal(1), runs[0].personal(1), 1e-9)


def test_skip_padding_chooses_the_state_that_the_head_sees() -> None:
    fed = token_federation()
    x = torch.tensor([[3, 1, 0, 0, 0, 0]])
    skipping, reading = (ft.network("lstm", fed, hidden=4, skip_padding=skip).eval_mode for skip in (True, False))
    params = skipping.init(0)
    assert torch.equal(skipping.logits(params, x), reading.logits(params, x[:, :2]))
    assert not torch.allclose(skipping.logits(params, x), reading.logits(params, x))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"text", "must be a .npy file of floats"),
        (np.zeros((3, 2), np.int64), "must be a .npy file of floats"),
        (np.zeros(4), "must be a .npy file of floats"),
        (np.full((9, 2), np.nan), "infinite or NaN"),
        (np.zeros((3, 2)), "Client 0 has tokens up to 7; set network.pretrained to a file with at least 8"),
    ],
)
def test_invalid_pretrained_file_raises(content: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "words.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(ft.FedTailorError, match=words) as raised:
        ft.network("lstm", token_federation(), pretrained=str(path))
    assert is_one_sentence(str(raised.value))


def test_deployment_takes_vectors_but_no_pretrained_file() -> None:
    settings = {"network": {"name": "lstm", "hidden": 4}, "inputs": {"shape": [6, 5], "classes": 2}}
    assert make_deployment(settings).model().description["embedding"] == 5
    with pytest.raises(ft.ConfigError, match=r"does not send the file network\.pretrained"):
        make_deployment({"network": {"name": "lstm", "vocabulary": 5, "pretrained": "words.npy"}})


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
