"""Tests of the channel: clipping, noise, sparsification, quantization, payload size, and privacy."""

import math
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import fedtailor as ft
from conftest import METHOD_PARAMS, error_message, models, same, tiny_federation
from fedtailor.core.trees import Rows, Tree, flatten, map_leaves, mean, take
from fedtailor.experiments.experiment import make_experiment
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.methods import METHODS
from fedtailor.training.channel.channel import Channel
from fedtailor.training.channel.payload import count_bytes
from fedtailor.training.channel.privacy import epsilon
from support.simulation import simulate

ALL_STEPS = Channel(clip=0.5, noise=0.1, top=0.3, quantize="int8")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def transmit(
    channel: Channel, uploads: Tree, sent: Tree, clients: Sequence[int] | None = None, round: int = 1, seed: int = 0
) -> Tree:
    """Return what the server receives."""
    clients = range(len(next(iter(flatten(uploads).values())))) if clients is None else clients
    return channel.decode(channel.encode(uploads, sent, clients, round, seed), sent, clients, round, seed)


def norms(uploads: Tree, sent: Tree) -> Tensor:
    """Return the norm of every client's change over all its tensors."""
    before = flatten(sent)
    changes = [(leaf - before.get(path, 0)).reshape(len(leaf), -1) for path, leaf in flatten(uploads).items()]
    return torch.cat(changes, 1).double().square().sum(1).sqrt()


def example(clients: int = 3) -> tuple[Tree, Tree]:
    """Return uploads and messages: two tensors of a model, and one value that was not sent."""
    sent = {"params": {"w": normal(clients, 4, 5), "b": normal(clients, 6, seed=1)}}
    moved = map_leaves(lambda leaf: leaf + normal(*leaf.shape, seed=2) / 10, sent)
    return moved | {"variance": normal(clients, seed=3)}, sent


# The identity channel and the effect of each field


def test_channel_default_is_identity_and_large_clip_only_rounds() -> None:
    uploads, sent = example()
    encoded = Channel().encode(uploads, sent, [0, 1, 2], 1, 0)
    assert encoded is uploads and Channel().decode(encoded, sent, [0, 1, 2], 1, 0) is uploads
    assert Channel(top=1.0, quantize="none").is_identity
    assert same(transmit(Channel(clip=1e9), uploads, sent), uploads, tolerance=1e-6)


def test_clip_scales_change_to_norm() -> None:
    uploads, sent = example()
    before = norms(uploads, sent)
    limit = float(before.median())  # one client above, one at, and one below the limit
    received = transmit(Channel(clip=limit), uploads, sent)
    assert torch.allclose(norms(received, sent), before.clamp(max=limit), rtol=1e-5)
    for path, leaf in flatten(uploads).items():
        reference = flatten(sent).get(path, torch.zeros_like(leaf))
        factors = (limit / before).clamp(max=1).float().reshape(-1, *[1] * (leaf.ndim - 1))
        assert torch.allclose(flatten(received)[path], reference + factors * (leaf - reference), atol=1e-6)


def test_record_contains_change_norm_before_clipping(net: nn.Module) -> None:
    run = simulate(net, rounds=1, channel=Channel(1e-3))
    start = net.state_dict()
    moved = [sum(float((model[n] - start[n]).square().sum()) for n in start) ** 0.5 for model in models(run)]
    assert list(run.records[0]["per_client"]["change_norm"].values()) == pytest.approx(moved)
    # The server moves by at most the limit, because its model is a mean of models within it.
    assert norms({"params": ft.trees.repeat(run.server["params"], 1)}, {"params": ft.trees.repeat(start, 1)}) <= 1.1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_error_is_at_most_half_a_step(dtype: torch.dtype) -> None:
    sent = {"w": normal(4, 300, dtype=dtype)}
    change = normal(4, 300, seed=1, dtype=dtype) * torch.tensor([[1e-6], [1.0], [50.0], [0.0]], dtype=dtype)
    received = transmit(Channel(quantize="int8"), {"w": sent["w"] + change}, sent)["w"]
    change = (sent["w"] + change) - sent["w"]  # rounded to the dtype
    step = change.abs().amax(1, keepdim=True) / 127  # each client has its own scale
    slack = 4 * torch.finfo(dtype).eps * (sent["w"].abs() + change.abs())
    assert bool(((received - sent["w"] - change).abs() <= step / 2 + slack).all())
    assert torch.equal(received[3], sent["w"][3])


def test_float16_rounds_and_clamps() -> None:
    values = normal(2, 500) * 10.0 ** torch.linspace(-6, 4, 500)
    received = transmit(Channel(quantize="float16"), {"w": values}, {})["w"]
    assert received.dtype == torch.get_default_dtype()
    assert bool(((received - values).abs() <= values.abs() * 2.0**-11 + 2.0**-25).all())
    huge = torch.tensor([[1e9, -1e9, 3.0]])
    assert transmit(Channel(quantize="float16"), {"w": huge}, {})["w"].tolist() == [[65504.0, -65504.0, 3.0]]


@pytest.mark.parametrize(("count", "top"), [(40, 0.5), (1000, 0.01), (70_000, 0.001), (3, 0.1)])
def test_top_sends_largest_changes_and_keeps_rest(count: int, top: float) -> None:
    sent, moved = normal(3, count, seed=4), normal(3, count, seed=5)
    received = transmit(Channel(top=top), {"w": moved}, {"w": sent})["w"]
    kept = max(1, round(top * count))
    for client in range(3):
        order = np.argsort(-np.abs((moved - sent)[client].numpy()))
        assert torch.allclose(received[client, order[:kept].copy()], moved[client, order[:kept].copy()], atol=1e-6)
        assert torch.equal(received[client, order[kept:].copy()], sent[client, order[kept:].copy()])


def test_top_sends_tensors_without_reference_completely() -> None:
    """FedLAG's personal layers are an example; omitted values would become 0. Integers and booleans are unchanged."""
    sent: Tree = {"params": {"shared": normal(2, 50)}}
    uploads: Tree = {
        "params": {"shared": normal(2, 50, seed=1), "personal": normal(2, 50, seed=2)},
        "count": torch.tensor([3, 4]),
        "mask": torch.tensor([[True, False], [False, False]]),
    }
    received = transmit(Channel(top=0.1), uploads, sent)
    assert int((received["params"]["shared"] != sent["params"]["shared"]).sum()) == 2 * 5
    assert torch.equal(received["params"]["personal"], uploads["params"]["personal"])
    received = transmit(Channel(clip=0.1, top=0.1, quantize="int8"), uploads, sent)
    assert torch.equal(received["count"], uploads["count"]) and torch.equal(received["mask"], uploads["mask"])


def test_absent_rows_stay_absent() -> None:
    present = torch.tensor([[True, False, True], [False, False, False]])
    rows = Rows(normal(2, 3, 4) * present[..., None], present)
    known = Rows(torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
    for sent in ({}, {"prototypes": known}):
        for channel in (Channel(quantize="int8"), Channel(quantize="float16"), Channel(clip=1e6)):
            received = transmit(channel, {"prototypes": rows}, sent)["prototypes"]
            assert torch.equal(received.present, present)
            assert not received.values[~present].any()
            assert torch.allclose(received.values, rows.values, atol=0.02)
    cut = transmit(Channel(clip=0.5), {"prototypes": rows}, {"prototypes": known})["prototypes"]
    change = ((cut.values - 1) * present[..., None]).flatten(1).norm(dim=1)
    assert change.tolist() == pytest.approx([0.5, 0.0])  # a client without rows has no change


def test_variance_after_quantization_is_not_negative() -> None:
    """A step of int8 is 10/127, so a change of −0.05 becomes −0.08."""
    sent, moved = torch.tensor([[0.05, 10.0]]), torch.tensor([[0.0, 20.0]])
    below = transmit(Channel(quantize="int8"), {"params": {"w": moved}}, {"params": {"w": sent}})["params"]["w"]
    assert below[0, 0] < 0
    name = "norm.running_var"
    variance = transmit(Channel(quantize="int8"), {"params": {name: moved}}, {"params": {name: sent}})["params"][name]
    assert variance[0, 0] == 0


@pytest.mark.parametrize("channel", [Channel(quantize="int8"), Channel(top=0.05, quantize="int8"), Channel(clip=0.5)])
def test_batch_normalization_with_encoding_stays_finite(channel: Channel) -> None:
    layers = OrderedDict(fc=nn.Linear(4, 5), norm=nn.BatchNorm1d(5), head=nn.Linear(5, 3))
    run = ft.simulate(ft.methods.FedAvg(), nn.Sequential(layers), tiny_federation(), rounds=3, channel=channel)
    assert math.isfinite(run.records[-1]["loss_received"])
    assert bool((run.server["params"]["norm.running_var"] >= 0).all())


# Payload size

BYTES: list[tuple[Channel, int, int]] = [  # bytes of 1,000 and of 100,000 values in float32
    (Channel(), 4_000, 400_000),
    (Channel(clip=1.0), 4_000, 400_000),
    (Channel(quantize="float16"), 2_000, 200_000),
    (Channel(quantize="int8"), 1_004, 100_004),
    (Channel(top=0.01), 10 * (4 + 2), 1_000 * (4 + 4)),  # 16-bit positions up to 65,536 values, then 32-bit
    (Channel(top=0.5), 500 * 4 + 125, 50_000 * 4 + 12_500),  # a bit mask is smaller than positions
    (Channel(top=0.01, quantize="float16"), 10 * (2 + 2), 1_000 * (2 + 4)),
    (Channel(top=0.01, quantize="int8"), 10 * (1 + 2) + 4, 1_000 * (1 + 4) + 4),
    (Channel(top=0.1, quantize="int8"), 100 + 125 + 4, 10_000 + 12_500 + 4),
]


@pytest.mark.parametrize(("channel", "few", "many"), BYTES, ids=[str(number) for number in range(len(BYTES))])
def test_encoded_bytes_match_manual_count(channel: Channel, few: int, many: int) -> None:
    for shape, cost in (((10, 100), few), ((100_000,), many)):
        sent, moved = normal(2, *shape), normal(2, *shape, seed=1)
        assert count_bytes(channel.encode({"w": moved}, {"w": sent}, [0, 1], 1, 0), 2) == [cost, cost]


def test_encoded_bytes_of_single_values_and_rows() -> None:
    """The scale of a single value would be as large as the value; absent rows are not sent."""
    int8, present = Channel(quantize="int8"), torch.tensor([[True, True, False], [False, False, False]])
    for value in (normal(2), normal(2, 1)):
        assert count_bytes(int8.encode({"n": value}, {}, [0, 1], 1, 0), 2) == [4, 4]
    assert count_bytes(int8.encode({"t": Rows(normal(2, 3, 5), present)}, {}, [0, 1], 1, 0), 2) == [2 * 5 + 4, 4]


@pytest.mark.parametrize(("quantize", "cost"), [("float16", 2 * 43), ("int8", 43 + 4 * 4)])
def test_record_contains_encoded_bytes(quantize: Any, cost: int, net: nn.Module) -> None:
    """The model has four tensors with 43 values; messages to clients are not encoded."""
    run = simulate(net, rounds=2, dtype=torch.float32, channel=Channel(quantize=quantize))
    for record in run.records:
        assert record["per_client"]["bytes_up"] == dict.fromkeys(range(4), cost)
        assert record["bytes_up"] == 4 * cost and record["bytes_down"] == 4 * 4 * 43


# Noise


def draw_noise(
    channel: Channel, clients: Sequence[int], name: str = "w", round: int = 1, seed: int = 0, count: int = 20_000
) -> Tensor:
    """Return what the server receives from uploads without a change."""
    nothing = {name: torch.zeros(len(clients), count, dtype=torch.float64)}
    drawn: Tensor = transmit(channel, nothing, nothing, clients, round, seed)[name]
    return drawn


def test_noise_is_normal_with_given_std() -> None:
    drawn = draw_noise(Channel(clip=2.0, noise=1.5), range(20)).flatten().numpy() / 3.0
    count = len(drawn)
    assert abs(drawn.mean()) < 4 / math.sqrt(count)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / count)
    assert stats.kstest(drawn, "norm").pvalue > 0.001
    beyond = 2 * stats.norm.sf(4) * count  # also in the tails, which matter for privacy
    assert abs((np.abs(drawn) > 4).sum() - beyond) < 4 * math.sqrt(beyond)


def test_noise_differs_per_client_round_tensor_and_seed() -> None:
    channel = Channel(clip=1.0, noise=1.0)
    draws = [draw_noise(channel, [0, 1]), draw_noise(channel, [0], round=2), draw_noise(channel, [0], name="v")]
    drawn = torch.cat([*draws, draw_noise(channel, [0], seed=1), draws[0][:1].roll(1, 1)])
    correlations = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert float(correlations.abs().max()) < 4.5 / math.sqrt(drawn.shape[1])


def test_noise_does_not_depend_on_other_clients_or_dtype() -> None:
    uploads, sent = example(3)
    stacked = ALL_STEPS.encode(uploads, sent, [7, 2, 5], 3, 1)
    for position, client in enumerate([7, 2, 5]):
        upload, message, expected = (take(tree, torch.tensor([position])) for tree in (uploads, sent, stacked))
        assert same(ALL_STEPS.encode(upload, message, [client], 3, 1), expected)
    nothing = torch.zeros(2, 999)
    single, double = (
        transmit(Channel(clip=1.0, noise=1.0), {"w": n}, {"w": n})["w"] for n in (nothing, nothing.double())
    )
    assert single.dtype == torch.float32 and torch.equal(single, double.float())


@pytest.mark.parametrize("clients", [1, 4, 25])
def test_trusted_server_adds_noise_once_to_sum(clients: int) -> None:
    channel = Channel(clip=2.0, noise=1.5, trusted=True)
    total = draw_noise(channel, range(clients)).sum(0)
    assert float(total.var()) == pytest.approx(3.0**2, rel=4 * math.sqrt(2 / len(total)))
    each = draw_noise(Channel(clip=2.0, noise=1.5), range(clients))
    assert float(each.var()) == pytest.approx(3.0**2, rel=4 * math.sqrt(2 / each.numel()))


def test_trusted_server_clips_and_adds_noise_after_decoding() -> None:
    """Otherwise quantization would reduce the privacy of the sum, and rounding could exceed the norm C."""
    uploads, sent = example()
    noisy, quiet, plain = (
        Channel(clip=0.1, noise=z, trusted=z > 0, top=0.5, quantize="int8") for z in (1.0, 1e-9, 0.0)
    )
    assert same(noisy.encode(uploads, sent, [0, 1, 2], 1, 0), plain.encode(uploads, sent, [0, 1, 2], 1, 0))
    too_much = Channel(quantize="int8").encode(uploads, sent, [0, 1, 2], 1, 0)
    assert torch.allclose(norms(quiet.decode(too_much, sent, [0, 1, 2], 1, 0), sent), torch.full((3,), 0.1).double())


# Privacy


def delta_of(eps: float, std: float) -> float:
    """Return δ(ε) of the Gaussian mechanism with sensitivity 1 (Balle and Wang 2018, Theorem 8)."""
    below = stats.norm.cdf(1 / (2 * std) - eps * std)
    return float(below - math.exp(eps) * stats.norm.cdf(-1 / (2 * std) - eps * std))


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("uploads", [1, 7, 100])
def test_epsilon_matches_independent_formula(noise: float, uploads: int) -> None:
    found = epsilon(noise, uploads, 1e-5)
    assert delta_of(found, noise / math.sqrt(uploads)) == pytest.approx(1e-5, rel=1e-6)


def test_epsilon_matches_sampled_privacy_loss() -> None:
    """δ is the expectation of (1 − e^(ε − loss))⁺, where the privacy loss is the log ratio of the densities of k noisy
    uploads with and without a change of norm C. It is estimated here from drawn noise."""
    noise, uploads, delta = 2.0, 5, 0.01
    drawn = draw_noise(Channel(clip=1.0, noise=noise), range(uploads), count=400_000) / noise  # std 1
    shift = 1 / noise
    loss = ((drawn + shift) * shift - shift**2 / 2).sum(0)  # privacy loss of uploads with the change
    excess = (1 - (epsilon(noise, uploads, delta) - loss).exp()).clamp(min=0)  # δ = E[(1 − e^(ε − loss))⁺]
    assert float(excess.mean()) == pytest.approx(delta, abs=4 * float(excess.std()) / math.sqrt(len(loss)))


@pytest.mark.parametrize("trusted", [False, True])
def test_record_epsilon_is_of_client_with_most_uploads(trusted: bool, net: nn.Module) -> None:
    channel = Channel(clip=1.0, noise=3.0, trusted=trusted, delta=1e-4)
    schedule = [[0, 1], [2], [1, 3], [0, 1, 2, 3]]
    run = simulate(net, ft.methods.FedAvg(weights="uniform"), schedule=schedule, channel=channel)
    for record, uploads in zip(run.records, [1, 1, 2, 3], strict=True):
        assert delta_of(record["epsilon"], 3.0 / math.sqrt(uploads)) == pytest.approx(1e-4, rel=1e-6)
    assert "epsilon" not in simulate(net, rounds=1).records[0]


WITH_UNIFORM_WEIGHTS = [
    "fedavg", "fedavgft", "fedprox", "fedadam", "fedyogi", "fedadagrad", "fedper", "fedrep", "fedbabu", "fedbn",
    "fedalt", "fedsim", "fedas", "ditto", "pfedme", "fedphp", "fedrod", "fedala", "fedcp", "gpfl",
]  # fmt: skip
ALWAYS = ["scaffold", "fedadmm", "lgfedavg", "fedapm", "local", "lpproj", "perfedavg"]
PLAIN_MEAN_FIELDS: dict[str, dict[str, str]] = {
    **{name: {"weights": "uniform"} for name in WITH_UNIFORM_WEIGHTS},
    **{name: {} for name in ALWAYS},
}


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind().mean_weights is not None])
def test_mean_weights_server_depends_only_on_this_mean(
    name: str, net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all uploads are replaced by their mean, in rows that share memory, the server state is the same."""
    kind, original = METHODS[name], METHODS[name].receive

    def receive(self: ft.Method, server: Tree, exchange: ft.Exchange) -> Tree:
        weights = exchange.sizes if self.mean_weights == "size" else None
        means = ft.trees.repeat(mean(exchange.received, weights), len(exchange.clients))
        return original(self, server, ft.Exchange(**{**vars(exchange), "received": means}))

    expected = simulate(net, kind(), rounds=2, evaluate_every=2).server
    monkeypatch.setattr(kind, "receive", receive)
    assert same(simulate(net, kind(), rounds=2, evaluate_every=2).server, expected, tolerance=1e-12)


def test_mean_weights_of_own_receive_must_be_declared() -> None:
    class Median(ft.methods.FedAvg):
        def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
            return ft.trees.map_leaves(lambda leaf: leaf.median(0).values, exchange.received)

    class Halved(ft.methods.FedAvg):
        mean_weights = ft.methods.FedAvg.mean_weights

        def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
            return ft.trees.scale(super().receive(server, exchange), 0.5)

    assert Median().mean_weights is None
    assert Halved().mean_weights == "size"


@pytest.mark.parametrize("name", PLAIN_MEAN_FIELDS)
def test_uses_plain_mean_server_depends_only_on_mean(
    name: str, net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all uploads are replaced by their mean, the server state is the same."""
    kind, plain = METHODS[name], METHODS[name].receive

    def receive(self: ft.Method, server: Tree, exchange: ft.Exchange) -> Tree:
        means = ft.trees.repeat(mean(exchange.received), len(exchange.clients))
        return plain(self, server, ft.Exchange(**{**vars(exchange), "received": means}))

    method = kind(**PLAIN_MEAN_FIELDS[name])
    assert method.uses_plain_mean

    expected = simulate(net, method, rounds=2, evaluate_every=2).server
    monkeypatch.setattr(kind, "receive", receive)
    assert same(simulate(net, method, rounds=2, evaluate_every=2).server, expected, tolerance=1e-12)


def test_uses_plain_mean_is_false_for_other_methods() -> None:
    assert {name for name, kind in METHODS.items() if kind().uses_plain_mean} == {*ALWAYS}
    for name, kind in METHODS.items():
        if "weights" in {f.name for f in fields(kind)}:  # the other choice
            changed: dict[str, Any] = {"weights": "size" if name in ALWAYS else "uniform"}
            assert kind(**changed).uses_plain_mean == (name in WITH_UNIFORM_WEIGHTS)
    lag = ft.methods.LAG(inner=ft.methods.FedAvg(weights="uniform"))  # it compares the clients' layers
    assert not lag.uses_plain_mean


# Errors


@pytest.mark.parametrize(
    "fields",
    [
        {"clip": 0}, {"clip": -1.0}, {"clip": math.nan}, {"clip": "1"}, {"clip": True}, {"clip": 1.0, "noise": -0.1},
        {"clip": 1.0, "noise": math.inf}, {"noise": 1.0}, {"delta": 0}, {"delta": 1}, {"trusted": "yes"},
        {"trusted": True}, {"top": 0}, {"top": 1.5}, {"quantize": "int4"}, {"quantize": None},
    ],
    ids=str,
)  # fmt: skip
def test_channel_with_invalid_field_raises(fields: dict[str, Any]) -> None:
    text = error_message(lambda: Channel(**fields))
    assert any(f"channel.{name}" in text for name in fields)


def test_noise_on_tensor_it_cannot_protect_raises() -> None:
    cases: dict[str, Any] = {
        "rows": Rows(normal(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)),
        "mask": torch.zeros(2, 3, dtype=torch.bool),
        "counts": torch.zeros(2, 3, dtype=torch.int64),
        "norm.running_var": torch.ones(2, 3),
    }
    for name, leaf in cases.items():
        for trusted in (False, True):
            channel = Channel(clip=1.0, noise=1.0, trusted=trusted)
            uploads = {"params": {"w": normal(2, 3), name: leaf}}
            assert f"'params/{name}'" in error_message(partial(channel.encode, uploads, {}, [0, 1], 1, 0))


def test_noise_without_accountant_raises_before_training(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    trained: list[dict[str, Any]] = []
    noisy = Channel(clip=1.0, noise=1.0)
    assert "fedtailor[privacy]" in error_message(lambda: simulate(net, channel=noisy, on_round_end=trained.append))
    assert not trained
    simulate(net, rounds=1, channel=Channel(clip=1.0))  # without noise, no accountant is needed


def test_trusted_with_weighted_method_raises(net: nn.Module) -> None:
    def run(method: ft.Method) -> ft.Run:
        return simulate(net, method, rounds=1, channel=Channel(clip=1.0, noise=1.0, trusted=True))

    assert "weights to 'uniform'" in error_message(lambda: run(ft.methods.FedAvg()))
    assert "channel.trusted to false" in error_message(lambda: run(ft.methods.FedExP(weights="size")))
    assert run(ft.methods.FedAvg(weights="uniform")).records


# All methods

CHANNELS = {"noise": Channel(clip=0.5, noise=0.1), "top": Channel(top=0.2), "int8": Channel(quantize="int8")}
ROWS_ONLY = {"fedproto", "fedgh", "fedaf"}
REJECTED = {
    "noise": ROWS_ONLY | {"fedpac", "dbe", "fedcac"},  # present rows depend on the data, or booleans
    "top": ROWS_ONLY | {"fedadmm", "fedapm", "apple", "fedfomo"},  # uploads without a counterpart in the message
    "int8": set(),
}


@pytest.mark.parametrize("kind", CHANNELS)
@pytest.mark.parametrize("name", METHOD_PARAMS)
def test_method_with_channel_trains_or_raises(name: str, kind: str, net: nn.Module) -> None:
    """Neither the server state nor a loss may become NaN."""

    def run() -> ft.Run:
        return simulate(net, METHODS[name](), rounds=2, evaluate_every=2, channel=CHANNELS[kind])

    if name in REJECTED[kind]:
        error_message(run)
        return
    found = run()
    assert all(bool(leaf.isfinite().all()) for leaf in flatten(found.server).values() if leaf.is_floating_point())
    assert math.isfinite(found.records[-1]["loss_trained"]) and math.isfinite(found.records[-1]["loss_received"])
    assert not found.records[-1]["failed"]


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedapa"])
def test_channel_gives_same_result_on_all_engines(name: str, net: nn.Module) -> None:
    def run(engine: str) -> list[Tree]:
        found = simulate(net, METHODS[name](), engine=engine, channel=ALL_STEPS, device="cpu")
        return [found.server, *models(found, "received")]

    expected = run("sequential")
    for engine in ("vectorized", "pool"):
        assert all(same(a, b, tolerance=1e-9) for a, b in zip(run(engine), expected, strict=True))
    assert all(same(a, b) for a, b in zip(run("sequential"), expected, strict=True))  # no hidden state


# Settings


def test_channel_fields_from_flags_and_tables(net: nn.Module) -> None:
    flags = ["--channel.clip", "0.5", "--channel.noise", "0.1", "--channel.top", "0.3", "--channel.quantize", "int8"]
    assert make_experiment(parse_overrides(flags).apply_to({})).channel == ALL_STEPS
    assert "channel.quantize" in error_message(lambda: make_experiment({"channel": {"quantize": "int4"}}))
    saved = simulate(net, rounds=1, channel=ALL_STEPS).experiment["channel"]
    assert saved == vars(ALL_STEPS) and make_experiment({"channel": saved}).channel == ALL_STEPS
