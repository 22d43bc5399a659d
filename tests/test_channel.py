"""What happens to uploads on their way: clipped, noisy, thinned out, quantised; and the privacy that noise buys."""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import fedtailor as ft
from conftest import SOME_FAST, models, refusal, same, tiny_federation
from fedtailor.channel import Channel
from fedtailor.experiment import make
from fedtailor.flags import read_flags
from fedtailor.methods import METHODS
from fedtailor.privacy import epsilon
from fedtailor.trees import Rows, Tree, flatten, map_leaves, mean, take
from fedtailor.wire import count_bytes

ALL_FOUR = Channel(clip=0.5, noise=0.1, top=0.3, quantise="int8")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def through(
    channel: Channel, uploads: Tree, sent: Tree, clients: Sequence[int] | None = None, round: int = 1, seed: int = 0
) -> Tree:
    """What arrives."""
    clients = range(len(next(iter(flatten(uploads).values())))) if clients is None else clients
    return channel.decode(channel.encode(uploads, sent, clients, round, seed), sent, clients, round, seed)


def norms(uploads: Tree, sent: Tree) -> Tensor:
    """Of every client's change, over all its tensors."""
    before = flatten(sent)
    changes = [(leaf - before.get(path, 0)).reshape(len(leaf), -1) for path, leaf in flatten(uploads).items()]
    return torch.cat(changes, 1).double().square().sum(1).sqrt()


def example(clients: int = 3) -> tuple[Tree, Tree]:
    """Uploads and what was sent before: two tensors of a model, and one number that was not sent."""
    sent = {"params": {"w": numbers(clients, 4, 5), "b": numbers(clients, 6, seed=1)}}
    moved = map_leaves(lambda leaf: leaf + numbers(*leaf.shape, seed=2) / 10, sent)
    return moved | {"variance": numbers(clients, seed=3)}, sent


# the plain channel, and what each field does


def test_by_default_nothing_happens() -> None:
    uploads, sent = example()
    encoded = Channel().encode(uploads, sent, [0, 1, 2], 1, 0)
    assert encoded is uploads and Channel().decode(encoded, sent, [0, 1, 2], 1, 0) is uploads
    assert Channel(top=1.0, quantise="none").plain


def test_a_large_limit_changes_nothing_but_rounding() -> None:
    uploads, sent = example()
    assert same(through(Channel(clip=1e9), uploads, sent), uploads, tolerance=1e-6)


def test_a_change_is_cut_to_the_limit_and_keeps_its_direction() -> None:
    uploads, sent = example()
    before = norms(uploads, sent)
    limit = float(before.median())  # one client above, one at it, one below
    arrived = through(Channel(clip=limit), uploads, sent)
    assert torch.allclose(norms(arrived, sent), before.clamp(max=limit), rtol=1e-5)
    for path, leaf in flatten(uploads).items():
        reference = flatten(sent).get(path, torch.zeros_like(leaf))
        factors = (limit / before).clamp(max=1).float().reshape(-1, *[1] * (leaf.ndim - 1))
        assert torch.allclose(flatten(arrived)[path], reference + factors * (leaf - reference), atol=1e-6)


def test_the_record_tells_how_large_changes_were_before_they_were_cut(net: nn.Module) -> None:
    run = ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), rounds=1, dtype=torch.float64, channel=Channel(1e-3))
    start = net.state_dict()
    moved = [sum(float((model[n] - start[n]).square().sum()) for n in start) ** 0.5 for model in models(run)]
    assert list(run.records[0]["per_client"]["change_norm"].values()) == pytest.approx(moved)
    # the server moved by no more than the limit, for its model is a mean of models within it
    assert norms({"params": ft.trees.repeat(run.server["params"], 1)}, {"params": ft.trees.repeat(start, 1)}) <= 1.1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    sent = {"w": numbers(4, 300, dtype=dtype)}
    change = numbers(4, 300, seed=1, dtype=dtype) * torch.tensor([[1e-6], [1.0], [50.0], [0.0]], dtype=dtype)
    arrived = through(Channel(quantise="int8"), {"w": sent["w"] + change}, sent)["w"]
    change = (sent["w"] + change) - sent["w"]  # as far as the dtype can tell
    step = change.abs().amax(1, keepdim=True) / 127  # every client has its own
    slack = 4 * torch.finfo(dtype).eps * (sent["w"].abs() + change.abs())
    assert bool(((arrived - sent["w"] - change).abs() <= step / 2 + slack).all())
    assert torch.equal(arrived[3], sent["w"][3])


def test_float16_is_as_near_as_halves_are_and_never_infinite() -> None:
    values = numbers(2, 500) * 10.0 ** torch.linspace(-6, 4, 500)
    arrived = through(Channel(quantise="float16"), {"w": values}, {})["w"]
    assert arrived.dtype == torch.get_default_dtype()
    assert bool(((arrived - values).abs() <= values.abs() * 2.0**-11 + 2.0**-25).all())
    huge = torch.tensor([[1e9, -1e9, 3.0]])
    assert through(Channel(quantise="float16"), {"w": huge}, {})["w"].tolist() == [[65504.0, -65504.0, 3.0]]


@pytest.mark.parametrize(("count", "top"), [(40, 0.5), (1000, 0.01), (70_000, 0.001), (3, 0.1)])
def test_top_keeps_the_largest_changes_and_leaves_the_rest_at_what_was_sent(count: int, top: float) -> None:
    sent, moved = numbers(3, count, seed=4), numbers(3, count, seed=5)
    arrived = through(Channel(top=top), {"w": moved}, {"w": sent})["w"]
    kept = max(1, round(top * count))
    for client in range(3):
        order = np.argsort(-np.abs((moved - sent)[client].numpy()))
        assert torch.allclose(arrived[client, order[:kept].copy()], moved[client, order[:kept].copy()], atol=1e-6)
        assert torch.equal(arrived[client, order[kept:].copy()], sent[client, order[kept:].copy()])


def test_what_was_not_sent_crosses_whole() -> None:
    """As FedLAG's personal layers do: left out, it would become 0. Whole numbers and bools are never touched."""
    sent: Tree = {"params": {"shared": numbers(2, 50)}}
    uploads: Tree = {
        "params": {"shared": numbers(2, 50, seed=1), "personal": numbers(2, 50, seed=2)},
        "count": torch.tensor([3, 4]),
        "mask": torch.tensor([[True, False], [False, False]]),
    }
    arrived = through(Channel(top=0.1), uploads, sent)
    assert int((arrived["params"]["shared"] != sent["params"]["shared"]).sum()) == 2 * 5
    assert torch.equal(arrived["params"]["personal"], uploads["params"]["personal"])
    arrived = through(Channel(clip=0.1, top=0.1, quantise="int8"), uploads, sent)
    assert torch.equal(arrived["count"], uploads["count"]) and torch.equal(arrived["mask"], uploads["mask"])


def test_absent_rows_stay_absent() -> None:
    present = torch.tensor([[True, False, True], [False, False, False]])
    rows = Rows(numbers(2, 3, 4) * present[..., None], present)
    known = Rows(torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
    for sent in ({}, {"prototypes": known}):
        for channel in (Channel(quantise="int8"), Channel(quantise="float16"), Channel(clip=1e6)):
            arrived = through(channel, {"prototypes": rows}, sent)["prototypes"]
            assert torch.equal(arrived.present, present)
            assert not arrived.values[~present].any()
            assert torch.allclose(arrived.values, rows.values, atol=0.02)
    cut = through(Channel(clip=0.5), {"prototypes": rows}, {"prototypes": known})["prototypes"]
    change = ((cut.values - 1) * present[..., None]).flatten(1).norm(dim=1)
    assert change.tolist() == pytest.approx([0.5, 0.0])  # who has no row changed nothing


def test_a_variance_is_never_negative() -> None:
    """A step of int8 is 10/127, so a change of −0.05 becomes one of −0.08."""
    sent, moved = torch.tensor([[0.05, 10.0]]), torch.tensor([[0.0, 20.0]])
    below = through(Channel(quantise="int8"), {"params": {"w": moved}}, {"params": {"w": sent}})["params"]["w"]
    assert below[0, 0] < 0
    name = "norm.running_var"
    variance = through(Channel(quantise="int8"), {"params": {name: moved}}, {"params": {name: sent}})["params"][name]
    assert variance[0, 0] == 0


def test_batch_normalisation_survives_every_code() -> None:
    fed = ft.load("digits", clients=3)
    for channel in (Channel(quantise="int8"), Channel(top=0.05, quantise="int8"), Channel(clip=0.5)):
        run = ft.simulate(
            ft.methods.FedAvg(),
            ft.network("cnn", fed, norm="batch"),
            fed,
            rounds=2,
            channel=channel,
            engine="sequential",
        )
        assert math.isfinite(run.records[-1]["loss_received"])
        assert all(bool((leaf >= 0).all()) for name, leaf in run.server["params"].items() if name.endswith("_var"))


# bytes are those of what crosses

BYTES: list[tuple[Channel, int, int]] = [  # of 1,000 and of 100,000 numbers in float32
    (Channel(), 4_000, 400_000),
    (Channel(clip=1.0), 4_000, 400_000),
    (Channel(quantise="float16"), 2_000, 200_000),
    (Channel(quantise="int8"), 1_004, 100_004),
    (Channel(top=0.01), 10 * (4 + 2), 1_000 * (4 + 4)),  # positions in 16 bits up to 65,536 numbers, then in 32
    (Channel(top=0.5), 500 * 4 + 125, 50_000 * 4 + 12_500),  # a bit for every number is less than positions
    (Channel(top=0.01, quantise="float16"), 10 * (2 + 2), 1_000 * (2 + 4)),
    (Channel(top=0.01, quantise="int8"), 10 * (1 + 2) + 4, 1_000 * (1 + 4) + 4),
    (Channel(top=0.1, quantise="int8"), 100 + 125 + 4, 10_000 + 12_500 + 4),
]


@pytest.mark.parametrize(("channel", "few", "many"), BYTES, ids=[str(number) for number in range(len(BYTES))])
def test_bytes_by_hand(channel: Channel, few: int, many: int) -> None:
    for shape, cost in (((10, 100), few), ((100_000,), many)):
        sent, moved = numbers(2, *shape), numbers(2, *shape, seed=1)
        assert count_bytes(channel.encode({"w": moved}, {"w": sent}, [0, 1], 1, 0), 2) == [cost, cost]


def test_bytes_of_one_number_and_of_rows() -> None:
    """A number's scale would be as long as the number; absent rows do not cross."""
    int8, present = Channel(quantise="int8"), torch.tensor([[True, True, False], [False, False, False]])
    for alone in (numbers(2), numbers(2, 1)):
        assert count_bytes(int8.encode({"n": alone}, {}, [0, 1], 1, 0), 2) == [4, 4]
    assert count_bytes(int8.encode({"t": Rows(numbers(2, 3, 5), present)}, {}, [0, 1], 1, 0), 2) == [2 * 5 + 4, 4]


@pytest.mark.parametrize(("quantise", "cost"), [("float16", 2 * 43), ("int8", 43 + 4 * 4)])
def test_bytes_in_a_record(quantise: Any, cost: int, net: nn.Module) -> None:
    """Four tensors of 43 numbers; what is sent down is not coded."""
    run = ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), rounds=2, channel=Channel(quantise=quantise))
    for record in run.records:
        assert record["per_client"]["bytes_up"] == dict.fromkeys(range(4), cost)
        assert record["bytes_up"] == 4 * cost and record["bytes_down"] == 4 * 4 * 43


# noise


def noise_of(
    channel: Channel, clients: Sequence[int], name: str = "w", round: int = 1, seed: int = 0, count: int = 20_000
) -> Tensor:
    """What arrives of uploads that changed nothing."""
    nothing = {name: torch.zeros(len(clients), count, dtype=torch.float64)}
    drawn: Tensor = through(channel, nothing, nothing, clients, round, seed)[name]
    return drawn


def test_noise_is_normal_with_the_deviation_that_was_asked_for() -> None:
    drawn = noise_of(Channel(clip=2.0, noise=1.5), range(20)).flatten().numpy() / 3.0
    count = len(drawn)
    assert abs(drawn.mean()) < 4 / math.sqrt(count)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / count)
    assert stats.kstest(drawn, "norm").pvalue > 0.001
    beyond = 2 * stats.norm.sf(4) * count  # also far from 0, where privacy is decided
    assert abs((np.abs(drawn) > 4).sum() - beyond) < 4 * math.sqrt(beyond)


def test_noise_is_another_for_every_client_round_tensor_and_seed() -> None:
    channel = Channel(clip=1.0, noise=1.0)
    draws = [noise_of(channel, [0, 1]), noise_of(channel, [0], round=2), noise_of(channel, [0], name="v")]
    drawn = torch.cat([*draws, noise_of(channel, [0], seed=1), draws[0][:1].roll(1, 1)])
    correlations = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert float(correlations.abs().max()) < 4.5 / math.sqrt(drawn.shape[1])


def test_noise_is_the_same_whoever_else_takes_part() -> None:
    uploads, sent = example(3)
    together = ALL_FOUR.encode(uploads, sent, [7, 2, 5], 3, 1)
    for place, client in enumerate([7, 2, 5]):
        own, told, wanted = (take(tree, torch.tensor([place])) for tree in (uploads, sent, together))
        assert same(ALL_FOUR.encode(own, told, [client], 3, 1), wanted)


def test_noise_in_float32_is_that_of_float64_rounded() -> None:
    channel, nothing = Channel(clip=1.0, noise=1.0), torch.zeros(2, 999)
    single, double = (through(channel, {"w": n}, {"w": n})["w"] for n in (nothing, nothing.double()))
    assert single.dtype == torch.float32 and torch.equal(single, double.float())


@pytest.mark.parametrize("clients", [1, 4, 25])
def test_a_trusted_server_adds_the_noise_once_to_the_sum(clients: int) -> None:
    channel = Channel(clip=2.0, noise=1.5, trusted=True)
    total = noise_of(channel, range(clients)).sum(0)
    assert float(total.var()) == pytest.approx(3.0**2, rel=4 * math.sqrt(2 / len(total)))
    each = noise_of(Channel(clip=2.0, noise=1.5), range(clients))
    assert float(each.var()) == pytest.approx(3.0**2, rel=4 * math.sqrt(2 / each.numel()))


def test_a_trusted_server_adds_the_noise_after_it_has_read_and_cut() -> None:
    """Of noisy uploads that were coded one by one, the sum would not be as private; nor if rounding exceeded C."""
    uploads, sent = example()
    noisy, quiet, plain = (
        Channel(clip=0.1, noise=z, trusted=z > 0, top=0.5, quantise="int8") for z in (1.0, 1e-9, 0.0)
    )
    assert same(noisy.encode(uploads, sent, [0, 1, 2], 1, 0), plain.encode(uploads, sent, [0, 1, 2], 1, 0))
    too_much = Channel(quantise="int8").encode(uploads, sent, [0, 1, 2], 1, 0)
    assert torch.allclose(norms(quiet.decode(too_much, sent, [0, 1, 2], 1, 0), sent), torch.full((3,), 0.1).double())


# privacy


def chance(eps: float, deviation: float) -> float:
    """δ(ε) of the Gaussian mechanism with sensitivity 1 (Balle and Wang 2018, Theorem 8)."""
    below = stats.norm.cdf(1 / (2 * deviation) - eps * deviation)
    return float(below - math.exp(eps) * stats.norm.cdf(-1 / (2 * deviation) - eps * deviation))


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("times", [1, 7, 100])
def test_epsilon_by_an_independent_formula(noise: float, times: int) -> None:
    found = epsilon(noise, times, 1e-5)
    assert chance(found, noise / math.sqrt(times)) == pytest.approx(1e-5, rel=1e-6)


def test_epsilon_bounds_what_an_onlooker_can_tell() -> None:
    """Who sees k noisy uploads and knows what the client's change, of length C, would be, weighs how likely they are
    with it and without: by e^ε at most, but for δ. Here by drawing uploads, not by a formula."""
    noise, times, delta = 2.0, 5, 0.01
    drawn = noise_of(Channel(clip=1.0, noise=noise), range(times), count=400_000) / noise  # in deviations, as if C = 1
    shift = 1 / noise
    loss = ((drawn + shift) * shift - shift**2 / 2).sum(0)  # log of the ratio of densities, uploads with the change
    excess = (1 - (epsilon(noise, times, delta) - loss).exp()).clamp(min=0)  # δ = E[(1 − e^(ε − loss))⁺]
    assert float(excess.mean()) == pytest.approx(delta, abs=4 * float(excess.std()) / math.sqrt(len(loss)))


@pytest.mark.parametrize("trusted", [False, True])
def test_the_record_has_the_epsilon_of_who_took_part_most_often(trusted: bool, net: nn.Module) -> None:
    channel = Channel(clip=1.0, noise=3.0, trusted=trusted, delta=1e-4)
    run = ft.simulate(
        ft.methods.FedAvg(weights="uniform"),
        net,
        tiny_federation(),
        schedule=[[0, 1], [2], [1, 3], [0, 1, 2, 3]],
        channel=channel,
    )
    for record, times in zip(run.records, [1, 1, 2, 3], strict=True):
        assert chance(record["epsilon"], 3.0 / math.sqrt(times)) == pytest.approx(1e-4, rel=1e-6)
    assert "epsilon" not in ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), rounds=1).records[0]


PLAIN_MEANS = {
    "fedavg": {"weights": "uniform"}, "fedavgft": {"weights": "uniform"}, "scaffold": {}, "fedadmm": {},
    "fedper": {"weights": "uniform"}, "fedrep": {"weights": "uniform"}, "fedbabu": {"weights": "uniform"},
    "lgfedavg": {}, "fedbn": {"weights": "uniform"}, "fedalt": {"weights": "uniform"},
    "fedsim": {"weights": "uniform"}, "fedas": {"weights": "uniform"}, "fedapm": {}, "local": {}, "lpproj": {},
    "perfedavg": {},
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN_MEANS)
def test_a_plain_mean_is_all_that_the_server_reads(name: str, net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """If every upload is replaced by the mean of all, the server becomes the same."""
    kind, plain = METHODS[name], METHODS[name].receive

    def receive(self: ft.Method, server: Tree, exchange: ft.Exchange) -> Tree:
        alike = ft.trees.repeat(mean(exchange.received), len(exchange.clients))
        return plain(self, server, ft.Exchange(**{**vars(exchange), "received": alike}))

    method = kind(**PLAIN_MEANS[name])
    assert method.plain_mean

    def server() -> Tree:
        return ft.simulate(
            method, net, tiny_federation(), rounds=2, dtype=torch.float64, engine="sequential", evaluate_every=2
        ).server

    usual = server()
    monkeypatch.setattr(kind, "receive", receive)
    assert same(server(), usual, tolerance=1e-12)


def test_no_other_method_says_it_reads_a_plain_mean() -> None:
    assert {name for name, kind in METHODS.items() if kind().plain_mean} <= PLAIN_MEANS.keys()
    for name, fields in PLAIN_MEANS.items():
        if "weights" in fields:
            assert not METHODS[name]().plain_mean
    assert not ft.methods.LAG(inner=ft.methods.FedAvg(weights="uniform")).plain_mean  # it looks at everyone's layers


# refusals


@pytest.mark.parametrize(
    "fields",
    [
        {"clip": 0}, {"clip": -1.0}, {"clip": math.nan}, {"clip": "1"}, {"clip": True}, {"clip": 1.0, "noise": -0.1},
        {"clip": 1.0, "noise": math.inf}, {"noise": 1.0}, {"delta": 0}, {"delta": 1}, {"trusted": "yes"},
        {"trusted": True}, {"top": 0}, {"top": 1.5}, {"quantise": "int4"}, {"quantise": None},
    ],
    ids=str,
)  # fmt: skip
def test_nonsense_is_refused(fields: dict[str, Any]) -> None:
    text = refusal(lambda: Channel(**fields))
    assert any(f"channel.{name}" in text for name in fields)


def test_what_noise_cannot_hide_is_refused_by_its_name() -> None:
    cases: dict[str, Any] = {
        "rows": Rows(numbers(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)),
        "mask": torch.zeros(2, 3, dtype=torch.bool),
        "counts": torch.zeros(2, 3, dtype=torch.int64),
        "norm.running_var": torch.ones(2, 3),
    }
    for name, leaf in cases.items():
        for trusted in (False, True):
            channel = Channel(clip=1.0, noise=1.0, trusted=trusted)
            uploads = {"params": {"w": numbers(2, 3), name: leaf}}
            assert f"'params/{name}'" in refusal(partial(channel.encode, uploads, {}, [0, 1], 1, 0))


def test_without_the_accountant_noise_is_refused_before_training(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    trained: list[dict[str, Any]] = []
    settings: dict[str, Any] = {"rounds": 1, "record": trained.append}

    def run(**fields: Any) -> ft.Run:
        return ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), channel=Channel(**fields), **settings)

    assert "fedtailor[privacy]" in refusal(lambda: run(clip=1.0, noise=1.0))
    assert not trained
    run(clip=1.0)  # without noise there is nothing to count
    assert trained


def test_a_trusted_server_must_take_the_plain_mean(net: nn.Module) -> None:
    def check(method: ft.Method) -> Callable[[], object]:
        return lambda: ft.simulate(
            method, net, tiny_federation(), rounds=1, channel=Channel(clip=1.0, noise=1.0, trusted=True)
        )

    assert "weights to 'uniform'" in refusal(check(ft.methods.FedAvg()))
    assert "channel.trusted false" in refusal(check(ft.methods.FedExP(weights="size")))
    check(ft.methods.FedAvg(weights="uniform"))()


# with every method

CHANNELS = {
    "clip": Channel(clip=0.5),
    "noise": Channel(clip=0.5, noise=0.1),
    "trusted": Channel(clip=0.5, noise=0.1, trusted=True),
    "top": Channel(top=0.2),
    "float16": Channel(quantise="float16"),
    "int8": Channel(quantise="int8"),
    "all four": ALL_FOUR,
}
ROWS_ALONE = {"fedproto", "fedgh", "fedaf"}
TELLING = ROWS_ALONE | {"fedpac", "dbe", "fedcac"}  # rows that are there, or bools
OWN_CHANGES = {"fedadmm", "fedapm", "apple", "fedfomo"}  # uploads that were not sent under the same name
REFUSED = {
    "noise": TELLING,
    "trusted": METHODS.keys() - {name for name, kind in METHODS.items() if kind().plain_mean},
    "top": ROWS_ALONE | OWN_CHANGES,
    "all four": TELLING | OWN_CHANGES,
}


@pytest.mark.parametrize("kind", CHANNELS)
@pytest.mark.parametrize("name", SOME_FAST)
def test_every_method_runs_or_is_refused_in_words(name: str, kind: str, net: nn.Module) -> None:
    """Never a NaN: neither at the server nor in anyone's loss."""

    def run() -> ft.Run:
        return ft.simulate(
            METHODS[name](), net, tiny_federation(), rounds=2, batch_size=4, dtype=torch.float64,
            engine="sequential", evaluate_every=2, channel=CHANNELS[kind],
        )  # fmt: skip

    if name in REFUSED.get(kind, set()):
        refusal(run)
        return
    found = run()
    assert all(bool(leaf.isfinite().all()) for leaf in flatten(found.server).values() if leaf.is_floating_point())
    assert math.isfinite(found.records[-1]["loss_trained"]) and math.isfinite(found.records[-1]["loss_received"])
    assert not found.records[-1]["failed"]


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedapa"])
def test_every_engine_gives_the_same(name: str, net: nn.Module) -> None:
    def run(engine: str) -> list[Tree]:
        found = ft.simulate(
            METHODS[name](), net, tiny_federation(), rounds=3, batch_size=4, dtype=torch.float64, engine=engine,
            channel=ALL_FOUR, device="cpu",
        )  # fmt: skip
        return [found.server, *models(found, "received")]

    usual = run("sequential")
    for engine in ("vectorized", "pool"):
        assert all(same(a, b, tolerance=1e-9) for a, b in zip(run(engine), usual, strict=True))
    assert all(same(a, b) for a, b in zip(run("sequential"), usual, strict=True))  # no hidden state


def test_int8_keeps_accuracy_at_a_quarter_of_the_bytes() -> None:
    fed = ft.load("digits", clients=10, partition="iid", seed=0)

    def run(channel: Channel) -> tuple[float, float]:
        found = ft.simulate(
            ft.methods.FedAvg(),
            ft.network("mlp", fed),
            fed,
            rounds=15,
            batch_size=16,
            evaluate_every=15,
            channel=channel,
        )
        return found.records[-1]["accuracy_received"], found.total("bytes_up")

    plain, coded = run(Channel()), run(Channel(quantise="int8"))
    assert plain[0] > 0.7 and abs(coded[0] - plain[0]) < 0.02
    assert coded[1] < 0.26 * plain[1]


# as a user asks for it


def test_flags_and_tables_are_the_fields() -> None:
    flags = ["--channel.clip", "1.0", "--channel.noise", "0.5", "--channel.top", "0.1", "--channel.quantise", "int8"]
    wanted = Channel(clip=1.0, noise=0.5, top=0.1, quantise="int8")
    assert make(read_flags(flags).over({})).channel == wanted
    assert make({"channel": {"clip": 1.0, "noise": 0.5, "top": 0.1, "quantise": "int8"}}).channel == wanted
    assert "channel.quantise" in refusal(lambda: make({"channel": {"quantise": "int4"}}))


def test_a_run_tells_its_channel(net: nn.Module) -> None:
    run = ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), rounds=1, channel=ALL_FOUR)
    assert run.experiment["channel"] == vars(ALL_FOUR)
