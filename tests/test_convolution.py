"""Convolutions of many clients at once are the convolutions of one client after another."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedtailor.engines import pooling
from fedtailor.engines.convolution import adapt, conv2d, use_form
from fedtailor.engines.convolution_forms import Pair
from fedtailor.errors import Refused

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
FORMS = ["grouped", "each", "product"]


@pytest.fixture(params=list(product(FORMS, SHAPES)), ids="-".join)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    form, shape = request.param
    with use_form(form):
        yield SHAPES[shape]


def problem(groups: int, clients: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of 9×10, kernels of 3×2, from 4 channels to 6."""
    generator = torch.Generator().manual_seed(0)
    shapes = (clients, 5, 4, 9, 10), (clients, 6, 4 // groups, 3, 2), (clients, 6)
    x, w, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, w, b


def one_by_one(function: Callable[..., Tensor], *stacked: Tensor) -> Tensor:
    return torch.stack([function(*one) for one in zip(*stacked, strict=True)])


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def run(convolution: Convolution, case: Case, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return convolution(x, w, b, *case)


def sines(convolution: Convolution, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.sin(convolution(x, w, b)).sum()


def loss_with(convolution: Convolution, case: Case) -> Convolution:
    """Nonlinear in everything, so that second derivatives do not vanish."""

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (
            torch.sin(convolution(x, w, b, *case))
            * torch.cos(torch.arange(5.0, dtype=x.dtype, device=x.device))[:, None, None, None]
        ).sum()

    return loss


def test_values_are_those_of_one_client_after_another(case: Case) -> None:
    x, w, b = problem(groups=case[3])
    close(vmap(partial(run, conv2d, case))(x, w, b), one_by_one(partial(run, F.conv2d, case), x, w, b))
    close(vmap(partial(run, conv2d, case))(x, w), one_by_one(partial(run, F.conv2d, case), x, w))


@pytest.mark.parametrize("argument", [0, 1, 2], ids=["input", "weight", "bias"])
def test_gradients_are_those_of_one_client_after_another(case: Case, argument: int) -> None:
    stacked = problem(groups=case[3])
    ours, reference = loss_with(conv2d, case), loss_with(F.conv2d, case)
    close(vmap(grad(ours, argument))(*stacked), one_by_one(grad(reference, argument), *stacked))


@pytest.mark.parametrize("inner,outer", [(0, 0), (1, 1), (0, 1), (1, 0), (2, 1), (1, 2)])
def test_second_derivatives_are_those_of_one_client_after_another(case: Case, inner: int, outer: int) -> None:
    stacked = problem(groups=case[3])

    def second(convolution: Convolution) -> Convolution:
        first = grad(loss_with(convolution, case), inner)
        return grad(lambda *t: torch.sin(first(*t)).sum(), outer)

    close(vmap(second(conv2d))(*stacked), one_by_one(second(F.conv2d), *stacked))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shared", [(0,), (1,), (2,), (1, 2), (0, 2)])
def test_what_clients_share_needs_no_copy_each(form: str, shared: tuple[int, ...]) -> None:
    case = SHAPES["strided"]
    stacked = problem(groups=1)
    dims = tuple(None if i in shared else 0 for i in range(3))
    given = [t[0] if i in shared else t for i, t in enumerate(stacked)]
    whole = [t[:1].expand_as(t) if i in shared else t for i, t in enumerate(stacked)]
    with use_form(form):
        for argument in range(3):
            ours = vmap(grad(loss_with(conv2d, case), argument), in_dims=dims)(*given)
            close(ours, one_by_one(grad(loss_with(F.conv2d, case), argument), *whole))


@pytest.mark.parametrize("form", FORMS)
def test_a_client_may_lie_on_any_axis(form: str) -> None:
    x, w, b = problem(groups=1)
    with use_form(form):
        out = vmap(conv2d, in_dims=(2, 4, 1))(x.movedim(0, 2), w.movedim(0, 4), b.T)
    close(out, one_by_one(F.conv2d, x, w, b))


def test_alone_it_is_the_plain_convolution_with_plain_autograd() -> None:
    case = SHAPES["strided"]
    x, w, b = (t[0].requires_grad_() for t in problem(groups=1))
    ours = torch.autograd.grad(loss_with(conv2d, case)(x, w, b), (x, w, b))
    theirs = torch.autograd.grad(loss_with(F.conv2d, case)(x, w, b), (x, w, b))
    for left, right in zip(ours, theirs, strict=True):
        close(left, right)
    close(conv2d(x[0], w, b), F.conv2d(x[0], w, b))
    assert torch.autograd.gradgradcheck(lambda x, w, b: conv2d(x, w, b, *case), (x[:1], w, b))


@pytest.mark.parametrize("form", FORMS)
def test_transformations_around_vmap_work_too(form: str) -> None:
    x, w, b = problem(groups=1)
    twice = vmap(vmap(lambda x, w: conv2d(x, w, b[0]), in_dims=(0, None)), in_dims=(None, 0))
    with use_form(form):
        outside = grad(partial(sines, vmap(conv2d)), 1)(x, w, b)
        pairs = twice(x, w)
    close(outside, one_by_one(grad(partial(sines, F.conv2d), 1), x, w, b))
    close(pairs[2, 1], F.conv2d(x[1], w[2], b[0]))


def test_an_adapted_module_computes_the_same_from_the_same_names() -> None:
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


def test_layers_that_are_more_than_a_plain_convolution_are_left_alone() -> None:
    class Own(nn.Conv2d):
        pass

    module = nn.Sequential(
        nn.Conv2d(1, 1, 3, padding="same"), nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), Own(1, 1, 3)
    )
    assert [type(layer) for layer in adapt(module)] == [nn.Conv2d, nn.Conv2d, Own]


def test_a_form_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Refused, match="did you mean 'grouped'"), use_form("groupd"):
        pass


def slope_of(function: Convolution) -> Convolution:
    """A derivative that has derivatives of its own."""
    return grad(lambda x: torch.sin(function(x)).sum())


def pooled(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(x), 2)


@pytest.mark.parametrize("shape", [(3, 5, 2, 8, 6), (3, 5, 2, 7, 9)])
def test_pooling_in_one_pass_has_the_derivatives_of_the_two_layers(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    ours, reference = pooling.relu_pool, pooled
    for _ in range(4):  # the function and three derivatives of it
        close(vmap(ours)(x), one_by_one(reference, x))
        ours, reference = slope_of(ours), slope_of(reference)


def test_relu_and_pooling_are_one_only_where_they_are_plain_and_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, original = [], pooling.relu_pool

    def noted(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return original(x)

    monkeypatch.setattr(pooling, "relu_pool", noted)
    relu = nn.ReLU()
    module = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 2, 3), relu=relu, pool=nn.MaxPool2d(2), again=relu, other=nn.MaxPool2d(3, 2), last=relu
        )
    )
    twin = adapt(module)
    x = torch.randn(3, 1, 20, 20)
    torch.testing.assert_close(twin(x), module(x))
    assert seen == [(3, 2, 18, 18)]  # the second pooling is no halving
    torch.testing.assert_close(twin[:2](x), module[:2](x))  # a part of it is what it was
    module[2].register_forward_pre_hook(lambda layer, inputs: None)
    adapt(module)(x)
    assert len(seen) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")
@pytest.mark.parametrize("shape", [name for name in SHAPES if SHAPES[name][3] == 1])
def test_kernels_agree_with_one_client_after_another(shape: str) -> None:
    case = SHAPES[shape]
    exact = problem(groups=1)
    stacked = [t.float().cuda() for t in exact]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), use_form("kernel"):
        for argument in range(3):
            ours = vmap(grad(loss_with(conv2d, case), argument))(*stacked)
            reference = one_by_one(grad(loss_with(F.conv2d, case), argument), *exact)
            torch.testing.assert_close(ours.cpu().double(), reference, rtol=1e-5, atol=1e-4)
            assert torch.equal(ours, vmap(grad(loss_with(conv2d, case), argument))(*stacked))  # to the bit


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")
@pytest.mark.parametrize("shape", [(3, 5, 2, 8, 6), (3, 5, 2, 7, 9)])
def test_pooling_kernels_agree_with_the_two_layers(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).round().cuda()  # with equals in a window
    assert torch.equal(vmap(pooling.relu_pool)(x), one_by_one(pooled, x))
    assert torch.equal(vmap(slope_of(pooling.relu_pool))(x), one_by_one(slope_of(pooled), x))
