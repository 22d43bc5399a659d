"""Named networks have the architectures of the papers and initial weights from the seed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import same
from fedtailor.core.trees import Params
from fedtailor.networks import NETWORKS
from support.model_checks import CLOSE, check_vmap_agrees, is_one_sentence, load_state, normal, perturb

CPU, DOUBLE = torch.device("cpu"), torch.float64
MNIST, CIFAR, SMALL = (1, 28, 28), (3, 32, 32), (2, 8, 8)

KINDS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("logistic", (5,), {}),
    ("mlp", (5,), {}),
    ("lenet5", MNIST, {}),
    *[("cnn", SMALL, {"norm": norm}) for norm in ("none", "group", "batch")],
    *[("resnet9", SMALL, {"norm": norm, "blocks": (1, 1, 1, 1)}) for norm in ("none", "group", "batch")],
    *[("resnet20", SMALL, {"norm": norm, "blocks": (1, 2, 1)}) for norm in ("none", "group", "batch")],
    ("cnn", SMALL, {"channels": (4, 8), "repeats": 2, "hidden": (7, 5)}),
    ("cnn", (1, 16, 16), {"kernel": 5, "padded": False}),
    ("resnet18", SMALL, {"blocks": (1, 1, 1, 1), "channels": (4, 4, 8, 8)}),
]
every_network = pytest.mark.parametrize(
    ("name", "shape", "settings"), KINDS, ids=["-".join([name, *map(str, s.values())][:2]) for name, _, s in KINDS]
)


def data(shape: tuple[int, ...], classes: int = 10) -> ft.Federation:
    """Return one client with inputs of this shape."""
    x, y = normal(4, *shape), torch.arange(4) % classes
    return ft.Federation.from_arrays([(x, y, x, y)], classes=classes)


def make(name: str, shape: tuple[int, ...], classes: int = 10, **settings: Any) -> ft.Model:
    return ft.network(name, data(shape, classes), **settings)


def shapes(model: ft.Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights, in order."""
    return {name: tuple(p.shape) for name, p in model.init(0).items() if p.ndim > 1}


def megabytes(model: ft.Model) -> float:
    return sum(p.numel() for p in model.init(0).values()) * 4 / 1e6


def in_float64(model: ft.Model) -> tuple[ft.Model, Params]:
    """Return the model in float64 with perturbed parameters."""
    model = model.to(CPU, DOUBLE)
    return model, perturb(model.init(0), 1)


# architectures


def test_logistic_is_one_linear_layer() -> None:
    model, x = make("logistic", (2, 3)), normal(4, 2, 3)
    model, params = in_float64(model)
    assert shapes(model) == {"head.weight": (10, 6)}
    by_hand = x.reshape(4, 6) @ params["head.weight"].T + params["head.bias"]
    torch.testing.assert_close(model.logits(params, x), by_hand, rtol=CLOSE, atol=CLOSE)


def test_intercept_head_is_a_personal_intercept_on_shared_weights() -> None:
    """A client with a personal head shares all weights of the logistic regression but its intercept."""
    model, x = make("logistic", (6,), intercept_head=True), normal(4, 6)
    model, params = in_float64(model)
    assert {name: tuple(p.shape) for name, p in params.items()} == {"body.weight": (10, 6), "head.bias": (10,)}
    by_hand = x @ params["body.weight"].T + params["head.bias"]
    torch.testing.assert_close(model.logits(params, x), by_hand, rtol=CLOSE, atol=CLOSE)
    assert model.split(params)[1].keys() == {"head.bias"}


@pytest.mark.parametrize(
    ("settings", "widths"), [({}, (64, 32)), ({"hidden": (7,)}, (7,)), ({"hidden": [9, 8]}, (9, 8))]
)
def test_mlp_has_given_widths(settings: dict[str, Any], widths: tuple[int, ...]) -> None:
    model, x = make("mlp", (2, 3), **settings), normal(4, 2, 3)
    model, params = in_float64(model)
    assert [shape[0] for shape in shapes(model).values()] == [*widths, 10]
    hidden = x.flatten(1)
    for number in range(1, len(widths) + 1):
        hidden = F.relu(F.linear(hidden, params[f"fc{number}.weight"], params[f"fc{number}.bias"]))
    torch.testing.assert_close(model.features(params, x), hidden, rtol=CLOSE, atol=CLOSE)


def convolve(params: Params, x: Tensor, padding: int) -> Tensor:
    """Apply two convolutions, each with ReLU and 2×2 max-pooling."""
    for layer in ("conv1", "conv2"):
        x = F.max_pool2d(F.relu(F.conv2d(x, params[f"{layer}.weight"], params[f"{layer}.bias"], padding=padding)), 2)
    return x.flatten(1)


def test_lenet5_equals_architecture_of_paper() -> None:
    model, x = make("lenet5", CIFAR), normal(3, *CIFAR)
    assert sum(p.numel() for p in model.init(0).values()) == 62_006
    model, params = in_float64(model)
    hidden = convolve(params, x, padding=0)
    for layer in ("fc1", "fc2"):
        hidden = F.relu(F.linear(hidden, params[f"{layer}.weight"], params[f"{layer}.bias"]))
    torch.testing.assert_close(model.features(params, x), hidden, rtol=CLOSE, atol=CLOSE)
    assert hidden.shape == (3, 84)


@pytest.mark.parametrize(("shape", "flat"), [(MNIST, 256), (CIFAR, 400), ((1, 28, 36), 16 * 4 * 6)])
def test_lenet5_adapts_to_image_size(shape: tuple[int, ...], flat: int) -> None:
    model = make("lenet5", shape)
    assert shapes(model)["fc1.weight"] == (120, flat)
    assert model.logits(model.init(0), torch.zeros(2, *shape)).shape == (2, 10)


def test_cnn_equals_architecture_of_fedapm() -> None:
    model, x = make("cnn", CIFAR), normal(3, *CIFAR)
    assert shapes(model) == {
        "conv1.weight": (16, 3, 3, 3), "conv2.weight": (32, 16, 3, 3), "fc1.weight": (128, 2048),
        "head.weight": (10, 128),
    }  # fmt: skip
    model, params = in_float64(model)
    hidden = F.relu(F.linear(convolve(params, x, padding=1), params["fc1.weight"], params["fc1.bias"]))
    torch.testing.assert_close(model.features(params, x), hidden, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(
    ("name", "shape", "channels", "blocks", "size"),
    [("resnet9", MNIST, (32, 64, 128, 256), (1, 2, 2, 1), 6.81), ("resnet20", CIFAR, (64, 128, 256), (3, 3, 3), 17.54)],
)
def test_resnets_equal_architecture_of_fedlag(
    name: str, shape: tuple[int, ...], channels: tuple[int, ...], blocks: tuple[int, ...], size: float
) -> None:
    """Compare with Table 5 of the paper: convolutions, blocks, channels, and layers of 256, 128, and 10 units.

    The size in MB depends on normalization and shortcuts; no choice gives the paper's size for both networks.
    """
    model = make(name, shape)
    found = shapes(model)
    assert found["conv.weight"] == (channels[0], shape[0], 3, 3)
    for group, (width, count) in enumerate(zip(channels, blocks, strict=True), start=1):
        convolutions = [s for n, s in found.items() if n.startswith(f"group{group}_") and s[2:] == (3, 3)]
        assert len(convolutions) == 2 * count and {s[0] for s in convolutions} == {width}
    assert [found[f"{layer}.weight"][0] for layer in ("fc1", "fc2", "head")] == [256, 128, 10]
    assert megabytes(model) == pytest.approx(size, rel=0.01)


def parameters(model: ft.Model) -> int:
    return sum(p.numel() for p in model.trainable(model.init(0)).values())


def count_resnet(image: int, channels: tuple[int, ...], blocks: tuple[int, ...], shortcuts: bool) -> int:
    """Return the number of weights of the convolutions, which have no biases, with or without those of shortcuts."""
    total, before = 9 * image * channels[0], channels[0]
    for group, (width, number) in enumerate(zip(channels, blocks, strict=True)):
        total += 9 * before * width + 9 * width * width * (2 * number - 1)
        total += before * width if shortcuts and group else 0
        before = width
    return total


def test_resnet20_of_cifar100_has_other_blocks() -> None:
    """Count by hand. 17.54 MB, which Table 5 prints for both data sets, is CIFAR-10's network without the convolutions
    on its shortcuts."""
    channels, dense = (64, 128, 256), 257 * 256 + 257 * 128
    norms = [2 * sum(w * (2 * n) for w, n in zip(channels, blocks, strict=True)) for blocks in ((3, 3, 3), (2, 3, 4))]
    cifar10, cifar100 = make("resnet20", CIFAR, norm="batch"), make("resnet20", CIFAR, 100, blocks=(2, 3, 4))
    convolutions = count_resnet(3, channels, (3, 3, 3), shortcuts=True) + 2 * 64 + norms[0]
    assert parameters(cifar10) == convolutions + dense + 129 * 10
    assert 4e-6 * (parameters(cifar10) - 64 * 128 - 128 * 256) == pytest.approx(17.54, abs=0.01)
    convolutions = count_resnet(3, channels, (2, 3, 4), shortcuts=True) + 2 * 64 + norms[1]
    assert parameters(cifar100) == convolutions + dense + 129 * 100


@pytest.mark.parametrize(("shape", "classes"), [(CIFAR, 100), ((3, 64, 64), 200)])
def test_resnet18_equals_architecture_of_fedapm(shape: tuple[int, ...], classes: int) -> None:
    """ResNet-18 has 11,689,512 parameters for 1,000 classes and a 7×7 convolution; here, the first one is 3×3."""
    model = make("resnet18", shape, classes)
    assert parameters(model) == 11_689_512 - 64 * 3 * (49 - 9) - 513 * (1000 - classes)
    module, x, sizes = NETWORKS["resnet18"]().build(shape, classes), torch.zeros(1, *shape), []
    for name, layer in module.named_children():
        x = layer(x)
        if name == "conv" or name.endswith(("max_pool", "block2")):
            sizes.append((x.shape[1], shape[1] // x.shape[2]))
    assert sizes == [(64, 1), (64, 2), (64, 2), (128, 4), (256, 8), (512, 16)]


@pytest.mark.parametrize(
    ("shape", "classes", "settings", "weights"),
    [
        (MNIST, 62, {"channels": (32, 64), "kernel": 5, "hidden": (2048,)},  # LEAF: FEMNIST
         [(32, 1, 5, 5), (64, 32, 5, 5), (2048, 3136), (62, 2048)]),
        (MNIST, 62, {"channels": (32, 64), "kernel": 5, "padded": False, "hidden": (512,)},  # FedLAG's code: EMNIST
         [(32, 1, 5, 5), (64, 32, 5, 5), (512, 1024), (62, 512)]),
        (CIFAR, 100, {"channels": (32, 64, 128), "repeats": 2, "hidden": (512,)},  # FedLAG's code: CIFAR-100
         [(32, 3, 3, 3), (32, 32, 3, 3), (64, 32, 3, 3), (64, 64, 3, 3), (128, 64, 3, 3), (128, 128, 3, 3),
          (512, 2048), (100, 512)]),
        (MNIST, 10, {"hidden": ()}, [(16, 1, 3, 3), (32, 16, 3, 3), (10, 1568)]),
    ],
)  # fmt: skip
def test_cnn_has_given_layers(
    shape: tuple[int, ...], classes: int, settings: dict[str, Any], weights: list[tuple[int, ...]]
) -> None:
    model = make("cnn", shape, classes, **settings)
    assert [*shapes(model).values()] == weights
    assert model.logits(model.init(0), torch.zeros(2, *shape)).shape == (2, classes)
    output = model.split(model.init(0), "output")[1]
    assert {name for name in output if name.endswith("weight")} == {n for n, s in shapes(model).items() if len(s) == 2}


@pytest.mark.parametrize("classes", [10, 62])
def test_logistic_and_cnn_take_images_of_femnist(classes: int) -> None:
    sizes = [parameters(make(name, MNIST, classes)) for name in ("logistic", "cnn")]
    assert sizes == [785 * classes, 10 * 16 + 145 * 32 + (32 * 7 * 7 + 1) * 128 + 129 * classes]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("resnet18", {"blocks": (1, 1, 1, 1), "channels": (4, 4, 8, 8)}), ("cnn", {"channels": (4, 8), "repeats": 2})],
)
@pytest.mark.parametrize("method", [ft.methods.FedAvg(), ft.methods.FedAlt()])
def test_all_engines_give_the_same_model(name: str, settings: dict[str, Any], method: ft.Method) -> None:
    arrays = [
        (x := normal(size, *SMALL, seed=size), torch.arange(size) % 3, x, torch.arange(size) % 3) for size in (5, 8)
    ]
    fed = ft.Federation.from_arrays(arrays, classes=3)
    runs = [
        ft.simulate(
            method, ft.network(name, fed, **settings), fed, rounds=2, batch_size=4, engine=engine, dtype="float64"
        )
        for engine in ("sequential", "vectorized", "pool")
    ]
    for run in runs[1:]:
        assert same(run.personal(1), runs[0].personal(1), 1e-9)


def test_every_network_describes_inputs_and_uses() -> None:
    for kind in NETWORKS.values():
        assert is_one_sentence(f"{kind.__doc__}".partition("\n")[0]) and kind.inputs and kind.used_by


def test_resnet_groups_halve_feature_maps() -> None:
    module, x = NETWORKS["resnet20"]().build(CIFAR, 10), torch.zeros(1, *CIFAR)
    x, sizes = module.get_submodule("conv")(x), []
    for group in (1, 2, 3):
        for block in (1, 2, 3):
            x = module.get_submodule(f"group{group}_block{block}")(x)
        sizes.append(tuple(x.shape[2:]))
    assert sizes == [(32, 32), (16, 16), (8, 8)]


def test_resnet_block_adds_shortcut() -> None:
    """A block whose last convolution is zero returns its input, so that it can be removed."""
    long, params = in_float64(make("resnet20", SMALL, norm="none", blocks=(2, 1, 1)))
    short, x = make("resnet20", SMALL, norm="none", blocks=(1, 1, 1)).to(CPU, DOUBLE), normal(3, *SMALL)
    zeroed = params | {"group1_block2.conv2.weight": torch.zeros_like(params["group1_block2.conv2.weight"])}
    fewer = {name: p for name, p in params.items() if not name.startswith("group1_block2")}
    torch.testing.assert_close(long.logits(zeroed, x), short.logits(fewer, x), rtol=CLOSE, atol=CLOSE)
    assert not torch.allclose(long.logits(params, x), short.logits(fewer, x))


@pytest.mark.parametrize("name", ["cnn", "resnet9", "resnet20"])
def test_norm_setting_changes_normalization(name: str) -> None:
    """With "group", an output depends on its example only; with "batch", also on the others in training."""
    model, x = {norm: make(name, SMALL, norm=norm) for norm in ("group", "batch", "none")}, normal(4, *SMALL).float()
    params = {norm: m.init(0) for norm, m in model.items()}

    def is_independent(norm: str) -> bool:
        few, many = (model[norm].logits(params[norm], part)[:2] for part in (x[:2], x))
        return torch.allclose(few, many, atol=1e-5)

    assert [is_independent(norm) for norm in model] == [True, False, True]
    weights = {n for n in params["none"] if n.endswith("weight")}
    assert {n for n in params["group"] if n.endswith("weight")} > weights  # normalization has weights
    assert model["batch"].running_stats and not model["group"].running_stats
    assert model["group"].layers() == model["batch"].layers() == model["none"].layers()


@every_network
def test_network_equals_its_plain_module_and_its_head(
    name: str, shape: tuple[int, ...], settings: dict[str, Any]
) -> None:
    """The logits are those of the module with the same state_dict, and of the head on the features."""
    model, params = in_float64(make(name, shape, **settings))
    x = normal(3, *shape)
    by_hand = F.linear(model.features(params, x), params["head.weight"], params["head.bias"])
    torch.testing.assert_close(model.logits(params, x), by_hand, rtol=CLOSE, atol=CLOSE)
    body, head = model.split(params)
    assert body | head == params and set(head) == {"head.weight", "head.bias"}
    plain = load_state(NETWORKS[name](**settings).build(shape, 10).double(), model.state_dict(params))
    outputs = model.mode(training=False).logits(params, x)
    torch.testing.assert_close(outputs, plain(x).detach(), rtol=CLOSE, atol=CLOSE)
    check_vmap_agrees(make(name, shape, **settings).to(CPU, DOUBLE), x)


# initial weights


@every_network
def test_init_depends_on_seed_like_pytorch(name: str, shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    """The weights equal those of the module built with PyTorch's seed."""
    first, second = make(name, shape, **settings), make(name, shape, **settings)
    assert same(first.init(3), second.init(3))
    assert not torch.equal(first.init(3)["head.weight"], first.init(4)["head.weight"])
    torch.manual_seed(3)
    plain: nn.Module = NETWORKS[name](**settings).build(shape, 10)
    params = first.init(3)
    assert same(params, {key: plain.state_dict()[key] for key in params})


def test_init_has_dtype_of_model_and_keeps_global_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(seed: int) -> None:
        raise AssertionError("the GPUs' generators were seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", fail)
    torch.default_generator.manual_seed(123)
    expected = torch.rand(5)
    torch.default_generator.manual_seed(123)
    model = make("mlp", (5,))
    single, double = model.init(3), model.to(CPU, DOUBLE).init(3)
    assert torch.equal(torch.rand(5), expected)
    assert {p.dtype for p in double.values()} == {DOUBLE} and same(double, single)


# data and error messages


@pytest.mark.parametrize(("targets", "outputs"), [((), 1), ((2,), 2)])
def test_network_with_float_targets_is_regression(targets: tuple[int, ...], outputs: int) -> None:
    x, y = normal(6, 5), normal(6, *targets)
    fed = ft.Federation.from_arrays([(x, y, x, y)])
    model = ft.network("mlp", fed)
    assert model.logits(model.init(0), x.float()).shape == (6, outputs)
    assert model.score == "mse"
    run = ft.simulate(ft.methods.FedAvg(lr=0.05), model, fed, rounds=30, batch_size=6)
    assert run.records[-1]["loss"] < 0.5 * run.records[0]["loss"]


def test_network_has_one_output_per_class_and_describes_itself() -> None:
    for classes in (2, 62):
        model = make("mlp", (5,), classes, hidden=(7,))
        assert model.logits(model.init(0), torch.zeros(3, 5)).shape == (3, classes)
        assert dict(model.description) == {"name": "mlp", "hidden": (7,)}


@pytest.mark.parametrize(
    ("name", "shape", "settings", "words"),
    [
        ("lenet5", (1, 27, 28), {}, r"lenet5 .*28×28.*\(1, 27, 28\).*mlp"),
        ("lenet5", (64,), {}, r"lenet5 .*\(64,\); use mlp"),
        ("lenet5", (28, 28), {}, r"add a channel axis with x\[:, None\]"),
        ("lenet5", (28, 28, 3), {}, r"move the channels first with x\.transpose\(0, 3, 1, 2\)"),
        ("cnn", (1, 3, 8), {}, r"cnn .*4×4"),
        ("resnet9", (1, 7, 8), {}, r"resnet9 .*8×8"),
        ("resnet20", (5,), {}, r"resnet20 .*8×8"),
        ("resnet9", SMALL, {"blocks": (1, 2)}, r"blocks must have one number per group of channels: 4, got 2"),
        ("cnn", SMALL, {"norm": "grup"}, r"did you mean 'group'"),
        ("cnn", MNIST, {"kernel": 4}, r"network.kernel must be odd if padded is true, got 4"),
        ("cnn", (1, 15, 15), {"kernel": 5, "padded": False}, r"cnn .*16×16"),
        ("cnn", MNIST, {"channels": (0,)}, r"channels of a network must be"),
        ("cnn", MNIST, {"channels": (4,) * 31}, r"at most 30 times"),
        ("cnn", MNIST, {"channels": (4,) * 3, "repeats": 500}, r"at most 1000 convolutions, got 1500"),
        ("cnn", MNIST, {"kernel": 2**24 - 1}, r"too many parameters|has memory for"),
        ("mlp", (5,), {"hiden": (3,)}, r"did you mean 'hidden'"),
        ("lenet", MNIST, {}, r"did you mean 'lenet5'"),
    ],
)
def test_network_with_invalid_settings_raises(
    name: str, shape: tuple[int, ...], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ft.FedTailorError, match=words) as raised:
        make(name, shape, **settings)
    text = str(raised.value)
    assert is_one_sentence(text) or text.endswith("?")


def test_network_with_several_inputs_raises() -> None:
    x, y = {"a": normal(4, 2), "b": normal(4, 3)}, torch.arange(4)
    with pytest.raises(ft.FedTailorError, match=r"ft\.wrap"):
        ft.network("mlp", ft.Federation.from_arrays([(x, y, x, y)]))
