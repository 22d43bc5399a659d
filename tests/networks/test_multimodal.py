"""FedAPM's networks for several inputs: sizes and personal parts of the paper, padding, engines, and error messages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from conftest import same
from fedtailor.core.trees import Params
from fedtailor.experiments.deployment import make_deployment
from fedtailor.experiments.experiment import make_experiment
from fedtailor.export.writers import export_model
from support.model_checks import CLOSE, is_one_sentence, perturb

CPU, DOUBLE = torch.device("cpu"), torch.float64
PAPER: dict[str, dict[str, tuple[int, ...]]] = {  # shapes of the parts of one sample; () is a length
    "image_text": {"image": (1280,), "text": (32, 512), "text_length": ()},
    "activity": {"accelerometer": (64, 3), "gyroscope": (64, 3)},
    "audio_video": {"audio": (600, 80), "audio_length": (), "video": (10, 1280), "video_length": ()},
}
TINY: dict[str, dict[str, tuple[int, ...]]] = {
    "image_text": {"image": (5,), "text": (4, 3), "text_length": ()},
    "activity": {"accelerometer": (8, 3), "gyroscope": (8, 3)},
    "audio_video": {"audio": (17, 3), "audio_length": (), "video": (3, 2), "video_length": ()},
}
NARROW: dict[str, dict[str, Any]] = {
    "image_text": {"hidden": 4, "heads": 2, "image_layers": 2},
    "activity": {"hidden": 4, "heads": 2, "channels": (2, 3)},
    "audio_video": {"hidden": 4, "heads": 2, "channels": (2, 3)},
}
FEDAPM = ft.methods.FedAPM(split="split_input", lr=0.5, epochs_personal=1, epochs_shared=1)
every_network = pytest.mark.parametrize("name", PAPER)


def samples(shapes: dict[str, tuple[int, ...]], count: int, seed: int = 0) -> dict[str, Tensor]:
    """Return random samples; each length is from half the steps to all of them."""
    generator = torch.Generator().manual_seed(seed)

    def part(name: str, shape: tuple[int, ...]) -> Tensor:
        if shape:
            return torch.randn(count, *shape, generator=generator)
        steps = shapes[name.removesuffix("_length")][0]
        return torch.randint(steps // 2, steps + 1, (count,), generator=generator)

    return {name: part(name, shape) for name, shape in shapes.items()}


def federation(name: str, sizes: tuple[int, ...] = (6, 9, 4), shapes: Any = TINY, classes: int = 3) -> ft.Federation:
    arrays = [
        (x := samples(shapes[name], size, client), y := torch.arange(size) % classes, x, y)
        for client, size in enumerate(sizes)
    ]
    return ft.Federation.from_arrays(arrays, classes=classes)


def count(params: Params) -> int:
    return sum(p.numel() for p in params.values())


def gru(inputs: int, width: int) -> int:
    """Return the number of parameters of a GRU: three gates from the input and from the state, with two biases."""
    return 3 * width * (inputs + width + 2)


def fusion(width: int, heads: int, classes: int) -> int:
    """Return the number of parameters from the fused sequences to the classes."""
    return (width + 1) * 512 + (512 + 1) * heads + (heads * width + 1) * 64 + (64 + 1) * classes


CONVOLUTIONS = {inputs: (5 * inputs + 1) * 32 + (5 * 32 + 1) * 64 + (5 * 64 + 1) * 128 for inputs in (3, 80)}


@pytest.mark.parametrize(
    ("name", "settings", "classes", "personal", "shared"),
    [
        ("image_text", {}, 10, 1281 * 64 + gru(512, 64), fusion(64, 4, 10)),
        ("image_text", {"hidden": 128, "heads": 6, "image_layers": 2}, 8,
         1281 * 128 + 129 * 128 + gru(512, 128), fusion(128, 6, 8)),
        ("activity", {}, 10, CONVOLUTIONS[3], CONVOLUTIONS[3] + 2 * gru(128, 128) + fusion(128, 6, 10)),
        ("audio_video", {}, 10, CONVOLUTIONS[80] + gru(128, 128) + gru(1280, 128), fusion(128, 6, 10)),
    ],
)  # fmt: skip
def test_network_has_sizes_and_personal_part_of_fedapm(
    name: str, settings: dict[str, Any], classes: int, personal: int, shared: int
) -> None:
    """Count the parameters by hand, with the values of the paper, and for CrisisMMD also with those of its code."""
    model = ft.network(name, federation(name, (2,), PAPER, classes), **settings)
    found = [count(part) for part in model.split(model.init(0), "split_input")]
    assert found == [shared, personal]


GRU_TENSORS = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
PERSONAL = {
    ("image_text", "split_input"): [
        *("image.fc1.weight", "image.fc1.bias", "image.fc2.weight", "image.fc2.bias"),
        *(f"text.gru.{tensor}" for tensor in GRU_TENSORS),
    ],
    ("activity", "split_input"): [
        f"accelerometer.conv.conv{number}.{tensor}" for number in (1, 2) for tensor in ("weight", "bias")
    ],
    ("activity", "input"): [  # in the authors' code
        f"{sensor}.conv.conv{number}.{tensor}"
        for sensor in ("accelerometer", "gyroscope") for number in (1, 2) for tensor in ("weight", "bias")
    ],
    ("audio_video", "split_input"): [
        *(f"audio.conv.conv{number}.{tensor}" for number in (1, 2) for tensor in ("weight", "bias")),
        *(f"{modality}.gru.{tensor}" for modality in ("audio", "video") for tensor in GRU_TENSORS),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "split"), PERSONAL)
def test_personal_part_contains_these_tensors(name: str, split: str) -> None:
    model = ft.network(name, federation(name), **NARROW[name])
    personal = PERSONAL[name, split]
    assert [*model.split(model.init(0), split)[1]] == personal
    state = ft.methods.FedAPM(split=split).init_client(
        ft.Setup(model, model.init(0), 1, torch.tensor([4]), 1, 0)
    )  # what a client of FedAPM keeps
    assert [*state["personal"]] == personal and not {*personal} & {*state["shared"]}


def by_hand(model: ft.Model, params: Params, x: dict[str, Tensor], valid: dict[str, int]) -> Tensor:
    """Return the outputs for one sample, of which `valid` states per sequence are fused: [1, classes]."""

    def layer(name: str, value: Tensor) -> Tensor:
        return value @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    def states(name: str, value: Tensor) -> Tensor:
        for number in (1, 2) if f"{name}.conv.conv1.weight" in params else ():
            weight, bias = (params[f"{name}.conv.conv{number}.{tensor}"] for tensor in ("weight", "bias"))
            value = torch.conv1d(value.transpose(1, 2), weight, bias, padding=2).relu()
            value = torch.max_pool1d(value, 2).transpose(1, 2)
        weights = [params[f"{name}.gru.{tensor}"] for tensor in GRU_TENSORS]
        zeros = torch.zeros(1, 1, weights[1].shape[1], dtype=DOUBLE)
        return torch.gru(value, zeros, weights, True, 1, 0.0, False, False, True)[0][:, : valid[name]]

    sequences = [layer("image.fc2", layer("image.fc1", x["image"]).relu())[:, None]] if "image" in x else []
    sequences += [states(name, x[name]) for name in valid]
    steps = torch.cat(sequences, 1)[0]  # [steps, width]
    weights = layer("fusion.scores", layer("fusion.hidden", steps).tanh()).softmax(0)  # [steps, heads]
    sums = [weights[:, head] @ steps for head in range(weights.shape[1])]
    return layer("head", layer("fc1", torch.cat(sums)).relu())[None]


@pytest.mark.parametrize(
    ("name", "lengths", "valid"),
    [
        ("image_text", {"text_length": 3}, {"text": 3}),
        ("image_text", {"text_length": 0}, {"text": 0}),  # the image alone
        ("activity", {}, {"accelerometer": 2, "gyroscope": 2}),
        ("audio_video", {"audio_length": 17, "video_length": 2}, {"audio": 4, "video": 2}),
        ("audio_video", {"audio_length": 11, "video_length": 3}, {"audio": 2, "video": 3}),  # 11 // 2 // 2
        ("audio_video", {"audio_length": 3, "video_length": 1}, {"audio": 0, "video": 1}),
    ],
)
def test_outputs_equal_those_by_hand_and_ignore_padding(
    name: str, lengths: dict[str, int], valid: dict[str, int]
) -> None:
    """Pooling divides the lengths and rounds down. What the padding contains changes neither outputs nor gradients."""
    model = ft.network(name, federation(name), **NARROW[name]).to(CPU, DOUBLE).eval_mode
    params = perturb(model.init(0), 1)
    x = {n: part.double() if part.is_floating_point() else part for n, part in samples(TINY[name], 1).items()}
    x |= {n: torch.tensor([length]) for n, length in lengths.items()}
    ends = {n.removesuffix("_length"): length for n, length in lengths.items()}
    zero, noise = (
        {
            n: torch.cat([part[:, : ends[n]], fill * part[:, ends[n] :]], 1) if n in ends else part
            for n, part in x.items()
        }
        for fill in (0, 100)
    )
    torch.testing.assert_close(model.logits(params, noise), by_hand(model, params, zero, valid), rtol=CLOSE, atol=CLOSE)
    gradients = torch.func.grad(lambda p, inputs: model.logits(p, inputs).square().sum())
    assert same(gradients(params, noise), gradients(params, zero), CLOSE)


@every_network
@pytest.mark.parametrize("method", [ft.methods.FedAvg(), FEDAPM])
def test_all_engines_give_the_same_model(name: str, method: ft.Method) -> None:
    """The networks contain dropout, whose masks all engines share."""
    fed = federation(name)
    model = ft.network(name, fed, **NARROW[name])
    settings: dict[str, Any] = {"rounds": 2, "batch_size": 4, "dtype": "float64"}
    runs = [ft.simulate(method, model, fed, engine=e, **settings) for e in ("sequential", "vectorized", "pool")]
    for run in runs[1:]:
        assert all(same(run.personal(client), runs[0].personal(client), 1e-9) for client in range(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_network
def test_gpu_gives_the_same_model(name: str) -> None:
    fed = federation(name, (20, 24, 22))
    model = ft.network(name, fed, **NARROW[name])
    settings: dict[str, Any] = {"rounds": 2, "batch_size": 4, "dtype": "float64"}
    runs = [
        ft.simulate(FEDAPM, model, fed, engine=engine, device=device, **settings)
        for engine, device in (("sequential", "cpu"), ("sequential", "cuda"), ("vectorized", "cuda"))
    ]
    assert same(runs[1].personal(1), runs[0].personal(1), 1e-9) and same(runs[2].personal(1), runs[0].personal(1), 1e-9)


@every_network
def test_network_learns_from_both_modalities(name: str) -> None:
    """Each modality has one of the two bits that make the class, so that one alone predicts at most half of them."""
    generator = torch.Generator().manual_seed(0)

    def draw(size: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        bits = torch.randint(0, 2, (2, size), generator=generator)
        x = samples(TINY[name], size, seed)
        for bit, modality in zip(bits, [n for n in x if not n.endswith("_length")], strict=True):
            x[modality] += (4.0 * bit - 2).reshape(-1, *[1] * (x[modality].ndim - 1))
        return x, 2 * bits[0] + bits[1]

    fed = ft.Federation.from_arrays([(*draw(60, 2 * i), *draw(40, 2 * i + 1)) for i in range(2)], classes=4)
    model = ft.network(name, fed, **NARROW[name] | {"hidden": 8})
    run = ft.simulate(ft.methods.FedAvg(lr=0.3, epochs=4), model, fed, rounds=6, batch_size=10)
    assert run.records[-1]["accuracy_received"] > 0.9


@pytest.mark.slow
@every_network
def test_onnx_file_gives_the_same_outputs(name: str, tmp_path: Path) -> None:
    fed = federation(name)
    ft.simulate(ft.methods.FedAvg(), ft.network(name, fed, **NARROW[name]), fed, rounds=1, folder=tmp_path / "run")
    model, x = ft.load_personal(tmp_path / "run", client=1), samples(TINY[name], 3)
    again = ft.load_personal(export_model(model, tmp_path / "model.onnx"))
    torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-5)


@every_network
def test_run_is_resumed_and_exported(name: str, tmp_path: Path) -> None:
    fed = federation(name)
    model = ft.network(name, fed, **NARROW[name])
    settings: dict[str, Any] = {"rounds": 2, "batch_size": 4, "engine": "sequential", "checkpoint_every": 1}

    def stop(record: Any) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        ft.simulate(ft.methods.FedAlt(split="split_input"), model, fed, folder=tmp_path, on_round_end=stop, **settings)
    resumed = ft.resume(tmp_path, fed=fed)
    expected = ft.simulate(ft.methods.FedAlt(split="split_input"), model, fed, **settings)
    assert same(resumed.personal(2), expected.personal(2))
    personal, x = ft.load_personal(tmp_path, client=1), samples(TINY[name], 3)
    again = ft.load_personal(export_model(personal, tmp_path / "model.safetensors"))
    torch.testing.assert_close(again(x), personal(x))


def test_network_is_chosen_by_the_parts_of_the_data(tmp_path: Path) -> None:
    """An experiment that names no network gets the one for these parts, and the error for another one names it."""
    fed = federation("audio_video")
    fed.save(tmp_path / "fed.safetensors")
    chosen = make_experiment({"data": {"name": "file", "file": str(tmp_path / "fed.safetensors")}}).model(fed)
    assert isinstance(chosen, ft.Model) and chosen.description["name"] == "audio_video"
    with pytest.raises(ft.ConfigError, match=r"audio, audio_length, video, video_length, use audio_video or ft\.wrap"):
        ft.network("mlp", fed)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("image_text", {"text": None}, "needs inputs with the parts image and text, got image, text_length"),
        ("activity", {"magnetometer": torch.zeros(4, 8, 3)}, "got accelerometer, gyroscope, magnetometer"),
        ("activity", {"gyroscope": torch.zeros(4, 3)}, r"gyroscope as float32 of shape \(steps, numbers\)"),
        ("activity", {"gyroscope": torch.zeros(4, 2, 3)}, "at least 4 steps of gyroscope, got 2"),
        ("image_text", {"image": torch.zeros(4, 5, dtype=torch.uint8)}, "needs image as float32"),
        ("image_text", {"text_length": torch.ones(4)}, "text_length must be one int64 per sample, got float32"),
        ("image_text", {"text_length": torch.tensor([1, 2, 5, 0])}, "Client 0 has a text_length outside of 0 to 4"),
    ],
)
def test_inputs_that_do_not_fit_raise(name: str, change: dict[str, Tensor | None], words: str) -> None:
    x = {n: part for n, part in (samples(TINY[name], 4) | change).items() if part is not None}
    fed = ft.Federation.from_arrays([(x, torch.arange(4), x, torch.arange(4))])
    with pytest.raises(ft.FedTailorError, match=words) as raised:
        ft.network(name, fed, **NARROW[name])
    assert is_one_sentence(str(raised.value))


def test_network_for_several_inputs_rejects_one_input_and_deployments() -> None:
    x, y = torch.zeros(4, 3), torch.arange(4)
    with pytest.raises(ft.ConfigError, match="parts accelerometer and gyroscope, got a single part"):
        ft.network("activity", ft.Federation.from_arrays([(x, y, x, y)]))
    with pytest.raises(ft.ConfigError, match="samples of a deployment have one part"):
        make_deployment({"network": "activity"})
