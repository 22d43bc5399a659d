"""Tests that convolutions of many clients equal the convolutions of each client."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedtailor.core.precision import forward_precision
from fedtailor.errors import FedTailorError
from fedtailor.training.engines.kernels import adapt as adapt_module
from fedtailor.training.engines.kernels import pooling
from fedtailor.training.engines.kernels.adapt import adapt
from fedtailor.training.engines.kernels.convolution import conv2d, use_algorithm
from fedtailor.training.engines.kernels.geometry import Pair

Case = tuple[Pair, Pair, Pair, int]
Convolution = Callable[..., Tensor]

SHAPES: dict[str, Case] = {  # stride, padding, dilation, groups
    "plain": ((1, 1), (0, 0), (1, 1), 1),
    "padded": ((1, 1), (1, 1), (1, 1), 1),
    "strided": ((2, 2), (1, 1), (1, 1), 1),
    "uneven": ((2, 3), (2, 0), (1, 1), 1),
    "dilated": ((1, 1), (2, 1), (2, 1), 1),
    "grouped": ((1, 1), (1, 0), (1, 1), 2),
    "everything": ((3, 2), (1, 2), (1, 2), 2),
}
ALGORITHMS = ["grouped", "loop", "im2col"]


@pytest.fixture(params=list(product(ALGORITHMS, SHAPES)), ids="-".join)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    algorithm, shape = request.param
    with use_algorithm(algorithm):
        yield SHAPES[shape]


def problem(groups: int, clients: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs of 9×10 with 4 channels, kernels of 3×2, and biases for 6 outputs."""
    generator = torch.Generator().manual_seed(0)
    shapes = (clients, 5, 4, 9, 10), (clients, 6, 4 // groups, 3, 2), (clients, 6)
    x, w, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, w, b


def per_client(function: Callable[..., Tensor], *stacked: Tensor) -> Tensor:
    return torch.stack([function(*one) for one in zip(*stacked, strict=True)])


def assert_close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def run(convolution: Convolution, case: Case, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return convolution(x, w, b, *case)


def sine_loss(convolution: Convolution, *args: Tensor) -> Tensor:
    return torch.sin(convolution(*args)).sum()


def make_loss(convolution: Convolution, case: Case) -> Convolution:
    """Return a loss that is nonlinear in all arguments, so that second derivatives do not vanish."""

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        weights = torch.cos(torch.arange(5.0, dtype=x.dtype, device=x.device))[:, None, None, None]
        return (torch.sin(convolution(x, w, b, *case)) * weights).sum()

    return loss


def test_conv2d_values_and_gradients_match_each_client(case: Case) -> None:
    stacked = problem(groups=case[3])
    for given in (stacked, stacked[:2]):  # with and without a bias
        values = per_client(partial(run, F.conv2d, case), *given)
        assert_close(vmap(partial(run, conv2d, case))(*given), values)
    ours, reference = make_loss(conv2d, case), make_loss(F.conv2d, case)
    for argument in range(3):
        assert_close(vmap(grad(ours, argument))(*stacked), per_client(grad(reference, argument), *stacked))


@pytest.mark.parametrize("inner,outer", [(0, 0), (1, 1), (0, 1), (1, 0), (2, 1), (1, 2)])
def test_conv2d_second_derivatives_match_each_client(case: Case, inner: int, outer: int) -> None:
    stacked = problem(groups=case[3])

    def second(convolution: Convolution) -> Convolution:
        first = grad(make_loss(convolution, case), inner)
        return grad(lambda *t: torch.sin(first(*t)).sum(), outer)

    assert_close(vmap(second(conv2d))(*stacked), per_client(second(F.conv2d), *stacked))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shared", [(0,), (1,), (2,), (1, 2), (0, 2)])
def test_conv2d_with_shared_tensors_matches_each_client(algorithm: str, shared: tuple[int, ...]) -> None:
    case = SHAPES["strided"]
    stacked = problem(groups=1)
    dims = tuple(None if i in shared else 0 for i in range(3))
    given = [t[0] if i in shared else t for i, t in enumerate(stacked)]
    expanded = [t[:1].expand_as(t) if i in shared else t for i, t in enumerate(stacked)]
    with use_algorithm(algorithm):
        for argument in range(3):
            ours = vmap(grad(make_loss(conv2d, case), argument), in_dims=dims)(*given)
            assert_close(ours, per_client(grad(make_loss(F.conv2d, case), argument), *expanded))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_conv2d_with_clients_on_any_axis(algorithm: str) -> None:
    x, w, b = problem(groups=1)
    with use_algorithm(algorithm):
        out = vmap(conv2d, in_dims=(2, 4, 1))(x.movedim(0, 2), w.movedim(0, 4), b.T)
    assert_close(out, per_client(F.conv2d, x, w, b))


def test_conv2d_without_vmap_matches_pytorch() -> None:
    case = SHAPES["strided"]
    x, w, b = (t[0].requires_grad_() for t in problem(groups=1))
    ours = torch.autograd.grad(make_loss(conv2d, case)(x, w, b), (x, w, b))
    theirs = torch.autograd.grad(make_loss(F.conv2d, case)(x, w, b), (x, w, b))
    for left, right in zip(ours, theirs, strict=True):
        assert_close(left, right)
    assert_close(conv2d(x[0], w, b), F.conv2d(x[0], w, b))
    assert torch.autograd.gradgradcheck(lambda x, w, b: conv2d(x, w, b, *case), (x[:1], w, b))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_conv2d_with_nested_transformations(algorithm: str) -> None:
    x, w, b = problem(groups=1)
    twice = vmap(vmap(lambda x, w: conv2d(x, w, b[0]), in_dims=(0, None)), in_dims=(None, 0))
    with use_algorithm(algorithm):
        outside = grad(partial(sine_loss, vmap(conv2d)), 1)(x, w, b)
        pairs = twice(x, w)
    assert_close(outside, per_client(grad(partial(sine_loss, F.conv2d), 1), x, w, b))
    assert_close(pairs[2, 1], F.conv2d(x[1], w[2], b[0]))


def test_adapt_keeps_parameter_names_and_outputs() -> None:
    shared = nn.Conv2d(4, 4, 3, padding=1, bias=False)
    module = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2), nn.ReLU(), shared, shared, nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(2, 5, 2, 9, 9)
    module(x[0])
    twin = adapt(module)
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert twin[2] is twin[3] and type(module[0]) is nn.Conv2d and type(twin[0]) is not nn.Conv2d
    state = {name: torch.randn(2, *p.shape) / 8 for name, p in module.named_parameters()}
    out = vmap(lambda state, x: functional_call(twin, state, (x,)))(state, x)
    for i in range(2):
        own = {name: p[i] for name, p in state.items()}
        torch.testing.assert_close(out[i], functional_call(module, own, (x[i],)), rtol=1e-4, atol=1e-5)


def test_adapt_leaves_other_convolutions_unchanged() -> None:
    class Own(nn.Conv2d):
        pass

    reflecting = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
    module = nn.Sequential(nn.Conv2d(1, 1, 3, padding="same"), reflecting, Own(1, 1, 3))
    assert [type(layer) for layer in adapt(module)] == [nn.Conv2d, nn.Conv2d, Own]
    with pytest.raises(FedTailorError, match="did you mean 'grouped'"), use_algorithm("groupd"):
        pass


def sine_gradient(function: Convolution) -> Convolution:
    """Return a gradient that is differentiable again."""
    return grad(partial(sine_loss, function))


def relu_then_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(x), 2)


@pytest.mark.parametrize("shape", [(3, 5, 2, 8, 6), (3, 5, 2, 7, 9)])
def test_relu_pool_derivatives_match_two_layers(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    ours, reference = pooling.relu_pool, relu_then_pool
    for _ in range(4):  # the function and its first three derivatives
        assert_close(vmap(ours)(x), per_client(reference, x))
        ours, reference = sine_gradient(ours), sine_gradient(reference)


def test_adapt_fuses_only_adjacent_plain_relu_and_pooling(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [], pooling.relu_pool

    def recorded(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return original(x)

    monkeypatch.setattr(adapt_module, "relu_pool", recorded)
    relu = nn.ReLU()
    module = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 2, 3), relu=relu, pool=nn.MaxPool2d(2), again=relu, other=nn.MaxPool2d(3, 2), last=relu
        )
    )
    twin = adapt(module)
    x = torch.randn(3, 1, 20, 20)
    torch.testing.assert_close(twin(x), module(x))
    assert seen == [(3, 2, 18, 18)]  # the second pooling is not 2×2
    torch.testing.assert_close(twin[:2](x), module[:2](x))  # a slice is unchanged
    module[2].register_forward_pre_hook(lambda layer, inputs: None)
    adapt(module)(x)
    assert len(seen) == 1


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "triton"])
def test_bf16_convolution_and_gradients_are_close_to_each_client(algorithm: str, kernel_device: torch.device) -> None:
    """Only the convolution is in bfloat16: the sine, its gradient, and the tensors stay float32."""
    case, exact = SHAPES["strided"], problem(groups=1)
    stacked = [t.to(kernel_device, torch.float32) for t in exact]

    def convolution(*args: Any) -> Tensor:
        with forward_precision("bf16", kernel_device):
            found = conv2d(*args)
        assert found.dtype == torch.bfloat16
        return found.float()

    with use_algorithm(algorithm):
        for argument in range(3):
            ours = vmap(grad(make_loss(convolution, case), argument))(*stacked)
            reference = per_client(grad(make_loss(F.conv2d, case), argument), *exact)
            assert ours.dtype == torch.float32
            assert 0 < (ours.cpu() - reference).norm() / reference.norm() < 8 * 2**-8


@pytest.mark.parametrize("shape", [name for name in SHAPES if SHAPES[name][3] == 1])
def test_triton_convolution_matches_each_client(shape: str, kernel_device: torch.device) -> None:
    case = SHAPES[shape]
    exact = problem(groups=1)
    stacked = [t.to(kernel_device, torch.float32) for t in exact]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), use_algorithm("triton"):
        for argument in range(3):
            ours = vmap(grad(make_loss(conv2d, case), argument))(*stacked)
            reference = per_client(grad(make_loss(F.conv2d, case), argument), *exact)
            torch.testing.assert_close(ours.cpu().double(), reference, rtol=1e-5, atol=1e-4)
            assert torch.equal(ours, vmap(grad(make_loss(conv2d, case), argument))(*stacked))  # reproducible to the bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 2, 8, 6), (3, 5, 2, 7, 9)])
def test_triton_relu_pool_matches_two_layers(
    shape: tuple[int, ...], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).round()  # with ties in windows
    x = values.to(kernel_device, dtype)
    assert torch.equal(vmap(pooling.relu_pool)(x), per_client(relu_then_pool, x))
    assert torch.equal(vmap(sine_gradient(pooling.relu_pool))(x), per_client(sine_gradient(relu_then_pool), x))
