"""Tests of `ft.simulate`: schedules, moments, evaluation, records, summaries, and error messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import SIZES, DivergingNet, TinyNet, error_message, same, tiny_federation
from fedtailor.core.trees import Tree
from fedtailor.training.participation import make_schedule
from support.simulation import simulate


def accuracy(net: nn.Module, state: Any, client: int) -> float:
    """Compute a client's test accuracy without the library."""
    fed = tiny_federation()
    net.load_state_dict(state)
    own = fed.test[client]
    return float((net(fed.x[own]).argmax(1) == fed.y[own]).double().mean())


def test_record_contains_clients_bytes_and_scores(net: nn.Module) -> None:
    seen: list[Any] = []
    run = simulate(net, schedule=[[0, 2], [1]], on_round_end=seen.append)
    assert seen == run.records
    first = run.records[0]
    assert first["round"] == 1 and first["clients"] == [0, 2]
    size = 8 * sum(p.numel() for p in net.parameters())
    assert first["bytes_up"] == first["bytes_down"] == 2 * size
    assert first["per_client"]["bytes_up"] == {0: size, 2: size}
    assert set(first["per_client"]["loss"]) == {0, 2}  # the training loss
    assert set(first["per_client"]["accuracy_trained"]) == set(first["per_client"]["accuracy_received"]) == {0, 1, 2, 3}
    assert first["seconds"] > 0


def test_moments_received_and_trained_match_models(net: nn.Module) -> None:
    """received: the average after this round; trained: the model that a client holds, before averaging."""
    run = simulate(net, schedule=[[0, 1, 2], [0, 2]])
    last = run.records[-1]["per_client"]
    twin = TinyNet().double()
    for client in range(4):
        assert accuracy(twin, run.server["params"], client) == last["accuracy_received"][client]
        assert same(run.personal(client, "received"), run.server["params"])
    for client in range(4):
        assert accuracy(twin, run.personal(client), client) == last["accuracy_trained"][client]
    weights = [SIZES[client] / (SIZES[0] + SIZES[2]) for client in (0, 2)]
    average = {n: weights[0] * run.personal(0)[n] + weights[1] * run.personal(2)[n] for n in net.state_dict()}
    assert same(run.server["params"], average, 1e-12)
    round_one = simulate(net, schedule=[[0, 1, 2]])
    assert same(run.personal(1), round_one.personal(1))  # absent in round 2: model of its last training
    assert same(run.personal(3), run.server["params"])  # has not trained yet: the model it would receive


def test_record_means_are_weighted_by_test_size_and_plain(net: nn.Module) -> None:
    x, y = tiny_federation().x[:4], torch.tensor([0, 1, 2, 0])
    fed = ft.Federation.from_arrays([(x, y, x[:1], y[:1]), (x, y, x[:3], y[:3])])
    record = ft.simulate(ft.methods.FedAvg(), net, fed, rounds=1, dtype=torch.float64).records[0]
    one, three = record["per_client"]["loss_received"].values()
    assert abs(one - three) > 0.01
    assert record["loss_received"] == pytest.approx((one + 3 * three) / 4)
    assert record["loss_received_mean"] == pytest.approx((one + three) / 2)


def test_record_loss_is_trained_model_on_training_data(net: nn.Module) -> None:
    run, fed = simulate(net, rounds=1), tiny_federation()
    twin = TinyNet().double()
    for client in range(4):
        twin.load_state_dict(run.personal(client))
        own = fed.train[client]
        loss = nn.functional.cross_entropy(twin(fed.x[own]), fed.y[own]).detach()
        assert run.records[0]["per_client"]["loss"][client] == pytest.approx(float(loss))


@pytest.mark.parametrize(("evaluate", "clients"), [("all", [0, 1, 2, 3]), ("participants", [1, 2])])
def test_evaluate_option_selects_clients(net: nn.Module, evaluate: str, clients: list[int]) -> None:
    record = simulate(net, schedule=[[1, 2]], evaluate=evaluate).records[0]
    assert list(record["per_client"]["accuracy_received"]) == clients


def test_evaluate_all_covers_more_clients_than_one_chunk(net: nn.Module) -> None:
    """Clients are evaluated in chunks of 64; one of 130 trains, and all of them are evaluated."""
    run = ft.simulate(ft.methods.FedAvg(), net, tiny_federation((1,) * 130), schedule=[[0]], dtype=torch.float64)
    assert list(run.records[0]["per_client"]["accuracy_received"]) == list(range(130))
    assert list(run.records[0]["per_client"]["accuracy_trained"]) == list(range(130))


def test_evaluate_with_number_keeps_same_clients(net: nn.Module) -> None:
    records = simulate(net, evaluate=2).records
    chosen = [tuple(record["per_client"]["accuracy_received"]) for record in records]
    assert len(set(chosen)) == 1 and len(chosen[0]) == 2


def test_evaluate_every_does_not_change_server(net: nn.Module) -> None:
    often, seldom = simulate(net, rounds=5), simulate(net, rounds=5, evaluate_every=2)
    evaluated = [record["round"] for record in seldom.records if record["accuracy_received"] is not None]
    assert evaluated == [2, 4, 5]  # the last round is always evaluated
    assert same(often.server, seldom.server)


def test_same_seed_gives_same_bits_and_other_seed_differs(net: nn.Module) -> None:
    assert same(simulate(net, seed=1).server, simulate(net, seed=1).server)
    assert not same(simulate(net, seed=1).server, simulate(net, seed=2).server)


def test_simulate_does_not_use_global_generator() -> None:
    fed = ft.load("digits", clients=3)
    before = torch.random.get_rng_state()
    ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed), fed, rounds=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_named_network_starts_from_seed_and_module_from_its_weights(net: nn.Module) -> None:
    fed = ft.load("digits", clients=3)
    method = ft.methods.Local(sampled=True)
    named = [ft.simulate(method, ft.network("mlp", fed), fed, schedule=[[0]], seed=s) for s in (0, 0, 1)]
    assert same(named[0].personal(2), named[1].personal(2))
    assert not same(named[0].personal(2), named[2].personal(2))
    own = simulate(net, method, schedule=[[0]], seed=7)
    assert same(own.personal(3), net.state_dict())


def test_initial_weights_are_starting_point(net: nn.Module) -> None:
    torch.manual_seed(9)
    other = TinyNet().double()
    run = simulate(net, ft.methods.Local(sampled=True), schedule=[[0]], initial_weights=other.state_dict())
    assert same(run.personal(3), other.state_dict())
    with pytest.raises(ft.FedTailorError, match=r"has no 'head\.weight'"):
        simulate(net, initial_weights={k: v for k, v in other.state_dict().items() if k != "head.weight"})
    with pytest.raises(ft.FedTailorError, match="must be the same network"):
        simulate(net, initial_weights=other.state_dict() | {"fc.bias": torch.zeros(9)})


def test_simulate_does_not_change_module(net: nn.Module) -> None:
    before = {k: v.clone() for k, v in net.state_dict().items()}
    simulate(net)
    assert same(before, net.state_dict())


def test_validation_samples_are_held_out_of_training(net: nn.Module) -> None:
    run = simulate(net, validation=0.3)
    trained_on = [client["train"] for client in run.info["clients"]]
    assert all(abs(0.7 * size - kept) < 1 for size, kept in zip(SIZES[:3], trained_on[:3], strict=True))
    assert trained_on[3] == 1  # its only sample stays in training
    assert set(run.records[0]["per_client"]["validation_received"]) == {0, 1, 2}
    assert run.summary()["received"]["best_validation"] is not None
    assert simulate(net).summary()["received"]["best_validation"] is None


def test_scores_trained_cover_clients_absent_from_evaluated_rounds(net: nn.Module) -> None:
    """Clients that trained only in rounds without evaluation have scores too."""
    run = simulate(net, schedule=[[0], [1], [2]], evaluate_every=3)
    twin = TinyNet().double()
    assert run.scores("trained") == {client: accuracy(twin, run.personal(client), client) for client in range(4)}


def test_evaluate_every_does_not_change_values_of_last_round(net: nn.Module) -> None:
    schedule = [[0], [1], [0]]
    at_end, always = (simulate(net, schedule=schedule, evaluate_every=every, validation=0.5) for every in (3, 1))
    assert at_end.records[-1]["per_client"] == always.records[-1]["per_client"]
    for moment, choices in always.summary().items():  # one population per term
        assert choices["last"]["weighted"] == always.records[-1][f"accuracy_{moment}"]
    assert at_end.records[-1]["per_client"]["validation_trained"].keys() > {0}


@pytest.mark.parametrize(
    "settings",
    [{"participation": 0.25}, {"schedule": [[0], [1], [0]]}, {"unreliable": ft.Unreliable(dropout=0.5)}],
    ids=["participation", "schedule", "unreliable"],
)
def test_local_training_does_not_depend_on_server(net: nn.Module, settings: dict[str, Any]) -> None:
    everyone = simulate(net, ft.methods.Local(), rounds=3)
    run = simulate(net, ft.methods.Local(), **({} if "schedule" in settings else {"rounds": 3}), **settings)
    assert all(record["clients"] == [0, 1, 2, 3] and not record["missed"] for record in run.records)
    assert all(same(run.personal(client), everyone.personal(client)) for client in range(4))


def test_sampled_local_training_trains_in_rounds_of_selected_clients(net: nn.Module) -> None:
    """Two rounds of training in a run of three rounds equal a run of two rounds."""
    run = simulate(net, ft.methods.Local(sampled=True), schedule=[[0, 1], [0], [2]])
    assert [record["clients"] for record in run.records] == [[0, 1], [0], [2]]
    assert same(run.personal(3), net.state_dict())
    assert same(run.personal(1), simulate(net, ft.methods.Local(), rounds=1).personal(1))
    assert same(run.personal(0), simulate(net, ft.methods.Local(), rounds=2).personal(0))


def test_make_schedule_draws_fraction_of_clients() -> None:
    assert all(len(clients) == 3 for clients in make_schedule(10, 50, 0.3))
    counts = {len(clients) for clients in make_schedule(10, 200, (0.6, 1.0))}
    assert counts == {6, 7, 8, 9, 10}
    assert make_schedule(10, 1, 0.001)[0]  # at least one client
    selected = {client for clients in make_schedule(10, 100, 0.2) for client in clients}
    assert selected == set(range(10))
    assert make_schedule(10, 5, 0.3, seed=0) != make_schedule(10, 5, 0.3, seed=1)
    assert make_schedule(10, 5, 0.3) == make_schedule(10, 9, 0.3)[:5]  # a longer run starts with the same rounds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": [[0, 9]]}, "names client 9; clients are numbered 0 to 3"),
        ({"schedule": [[]]}, "Round 1 of the schedule has no clients"),
        ({"schedule": [[1, 1]]}, "names a client twice"),
        ({"schedule": [[0]], "rounds": 2}, "omit rounds"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"participation": 0.0}, "participation must be"),
        ({"participation": (0.9, 0.1)}, "participation must be"),
        ({"participation": (0.1, 0.2, 0.3)}, "participation must be"),
        ({"participation": "half"}, "participation must be"),
        ({"schedule": []}, "The schedule has no rounds"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"seed": -1}, "seed must be"),
        ({"validation": 1.0}, "validation must be"),
        ({"evaluate_every": 0}, "evaluate_every must be"),
        ({"evaluate": "none"}, "evaluate must be"),
        ({"engine": "sequentail"}, "did you mean 'sequential'"),
        ({"device": "cuda:77"}, "The device 'cuda:77' is not available"),
        ({"dtype": torch.float16}, "dtype must be 'float32' or 'float64'"),
        ({"device": "gpu"}, "The device 'gpu' is not available"),
        ({"schedule": [["a"]]}, "schedule must list clients"),
        ({"schedule": [1, 2]}, "schedule must list the clients of every round"),
        ({"schedule": [[0.5, 1]]}, "schedule must list clients"),
        ({"schedule": ["01"]}, "schedule must list the clients of every round"),
        ({"rounds": 2.0}, "must be an integer"),
        ({"seed": "1"}, "must be an integer"),
        ({"batch_size": 2.5}, "must be an integer"),
        ({"augmentation": {"flip": True}}, "augmentation must be an ft.Augmentation(...)"),
        ({"channel": "int8"}, "channel must be an ft.Channel(...)"),
    ],
)
def test_simulate_with_invalid_settings_raises_config_error(
    net: nn.Module, settings: dict[str, Any], message: str
) -> None:
    assert message in error_message(lambda: simulate(net, **settings))


def test_integers_in_a_network_for_numbers_raise_with_the_fix() -> None:
    """A table of integers is not converted silently, because integers may be tokens."""
    x, y = np.arange(12).reshape(6, 2), np.arange(6) % 2
    fed = ft.Federation.from_arrays([(x, y, x, y)], classes=2)
    message = error_message(lambda: ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed), fed, rounds=1))
    assert message.endswith("If these integers are numbers, not tokens, convert them to float32.")


def test_simulate_with_unfitting_model_names_client_and_problem() -> None:
    fed = ft.load("digits", clients=3)
    with pytest.raises(ft.FedTailorError, match=r"fails on client 0's inputs of shape \(1, 8, 8\)"):
        ft.simulate(ft.methods.FedAvg(), TinyNet(), fed, rounds=1)
    with pytest.raises(ft.FedTailorError, match="has labels beyond the model's 3 outputs"):
        small = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        ft.simulate(ft.methods.FedAvg(), ft.wrap(small, head="1"), fed, rounds=1)
    with pytest.raises(ft.FedTailorError, match=r"no layer 'head'; .*head='1'"):
        ft.simulate(ft.methods.FedAvg(), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), fed, rounds=1)
    with pytest.raises(ft.FedTailorError, match="one value per example, got a scalar"):
        model = ft.wrap(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), head="1", loss=lambda o, y: o.mean())
        ft.simulate(ft.methods.FedAvg(), model, fed, rounds=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.personal(4), "There is no client 4; clients are numbered 0 to 3"),
        (lambda run: run.personal(0, moment="now"), "'received' or 'trained'"),
        (lambda run: run.summarize("trainedd"), "'received' or 'trained'"),
        (lambda run: run.scores("trained", "best_tst"), "did you mean 'best_test'?"),
    ],
)
def test_run_with_unknown_client_moment_or_choice_raises(call: Any, message: str, net: nn.Module) -> None:
    run = simulate(net, rounds=1)
    assert message in error_message(lambda: call(run))


def test_sequential_clients_receive_state_of_previous_client(net: nn.Module) -> None:
    @dataclass(frozen=True)
    class Relay(ft.methods.FedAvg):
        sequential_clients = True

    relay = simulate(net, Relay(), schedule=[[0, 1, 2]])
    rounds = simulate(net, ft.methods.FedAvg(), schedule=[[0]])
    assert same(relay.personal(0), rounds.personal(0))
    assert same(relay.server["params"], relay.personal(2))
    assert not same(relay.personal(1), simulate(net, schedule=[[0, 1, 2]]).personal(1), 1e-9)
    assert len(relay.records) == 1 and relay.records[0]["per_client"]["bytes_up"].keys() == {0, 1, 2}


def test_evaluation_metrics_are_recorded_and_not_sent(net: nn.Module) -> None:
    @dataclass(frozen=True)
    class Drift(ft.methods.Local):
        def evaluation_metrics(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> Tree:
            return {"norm": state["params"]["fc.weight"].square().sum(), "number": torch.tensor(ctx.round)}

    run = simulate(net, Drift())
    for client in range(4):
        norm = float(run.personal(client)["fc.weight"].square().sum())
        assert run.records[-1]["per_client"]["norm"][client] == pytest.approx(norm)
    assert [record["per_client"]["number"][0] for record in run.records] == [2, 3, 4]  # as if the next round started
    assert run.records[-1]["bytes_up"] == 0  # never sent


def test_send_may_differ_per_client(net: nn.Module) -> None:
    @dataclass(frozen=True)
    class Shifted(ft.Method):
        def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
            shift = torch.tensor(clients, dtype=torch.float64)
            return {"params": {n: p + shift.reshape(-1, *[1] * p.ndim) for n, p in server["params"].items()}}

        def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            return state, {}

    run = simulate(net, Shifted(), schedule=[[1, 3]])
    assert torch.equal(run.personal(3)["fc.bias"], net.state_dict()["fc.bias"] + 3)
    assert torch.equal(run.personal(2, "received")["fc.bias"], net.state_dict()["fc.bias"] + 2)


def test_regression_with_builtin_and_custom_metrics() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 40, 2, generator=random)
    y = x @ torch.tensor([1.0, -2.0]) + 0.5
    fed = ft.Federation.from_arrays([(a[:30], b[:30], a[30:], b[30:]) for a, b in zip(x, y, strict=True)])
    run = ft.simulate(ft.methods.FedAvg(lr=0.1), ft.network("logistic", fed), fed, rounds=20, batch_size=10)
    assert run.records[-1]["mse_received"] < 0.01 < run.records[0]["mse_received"]
    assert run.summary()["received"]["best_test"]["weighted"] == min(r["mse_received"] for r in run.records)

    def mae(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).abs().mean()

    model = ft.wrap(nn.Linear(2, 1), head=None, loss="regression", metrics={"mae": ft.Metric(mae, False)})
    run = ft.simulate(ft.methods.FedAvg(lr=0.1), model, fed, rounds=20, batch_size=10)
    assert run.records[-1]["mae_received"] < run.records[0]["mae_received"]
    assert run.info["score"] == "mae"


def test_summary_moments_cover_same_clients(net: nn.Module) -> None:
    for evaluate in ("participants", 2, "all"):
        last = {m: found["last"] for m, found in simulate(net, participation=0.5, evaluate=evaluate).summary().items()}
        assert last["received"]["clients"] == last["trained"]["clients"] > 0


def test_summary_with_local_run_of_other_clients_raises(net: nn.Module) -> None:
    other = ft.simulate(ft.methods.Local(), net, tiny_federation((4, 4)), rounds=1, dtype=torch.float64)
    with pytest.raises(ft.FedTailorError, match="on the same clients"):
        simulate(net).summary(local=other)


def test_initial_weights_include_frozen_parameters() -> None:
    """A frozen pre-trained backbone must be the given one."""
    torch.manual_seed(1)
    given, module = TinyNet().double(), TinyNet().double()
    for net in (given, module):
        net.fc.requires_grad_(False)
    run = simulate(module, ft.methods.Local(), initial_weights=given.state_dict())
    assert torch.equal(run.personal(0)["fc.weight"], given.state_dict()["fc.weight"])
    assert not torch.equal(run.personal(0)["head.weight"], given.state_dict()["head.weight"])
    assert run.info["parameters"] == 18
    with pytest.raises(ft.FedTailorError, match=r"module\.state_dict\(\) instead of the module"):
        simulate(module, initial_weights=given)


class Nondeterministic(TinyNet):
    """A module whose forward draws random numbers or changes a buffer."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.problem == "draws" and self.training:
            x = x + torch.rand_like(x)
        if self.problem == "counts":
            self.get_buffer("seen").add_(1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("problem", "message"), [("draws", "draws random numbers"), ("counts", "changes its buffer 'seen'")]
)
def test_simulate_with_nondeterministic_module_raises(problem: str, message: str) -> None:
    with pytest.raises(ft.FedTailorError, match=message):
        simulate(Nondeterministic(problem))
    assert simulate(Nondeterministic("none")).records


def test_record_lists_diverged_clients(net: nn.Module) -> None:
    assert simulate(net).records[-1]["diverged"] == []
    run = simulate(DivergingNet().double(), ft.methods.Local(lr=1.0, epochs=1), batch_size=64, rounds=1)
    assert run.records[-1]["diverged"] == [0, 1, 2, 3]


def make_method(function: Any) -> ft.Method:
    """Return a method with this function as `train`."""

    @dataclass(frozen=True)
    class Custom(ft.Method):
        def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            return function(ctx, state, message)  # type: ignore[no-any-return]

    return Custom()


def modify_in_place(ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
    message["params"]["fc.bias"].add_(1)
    return state, {}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (modify_in_place, r"modified 'params/fc\.bias' in place"),
        (
            lambda ctx, s, m: (s, m | {f"extra{int(ctx.index)}": m["params"]["fc.bias"]}),
            r"3 of 4 clients failed.*its upload 'extra0' is missing, others' is",
        ),
        (
            lambda ctx, s, m: (s, {"rows": torch.zeros(int(ctx.size))}),
            r"its upload 'rows' is float32 \(4,\), others' is float32 \(9,\)",
        ),
        (lambda ctx, s, m: m, "must return two dicts"),
        (lambda ctx, s, m: (s, {"count": 3}), "'upload/count' is not a tensor"),
        (lambda ctx, s, m: (s | {"new": torch.zeros(1)}, {}), "must keep its names and shapes, but 'new' changed"),
    ],
)
def test_custom_method_with_mistake_raises(net: nn.Module, function: Any, message: str) -> None:
    with pytest.raises(ft.FedTailorError, match=message):
        simulate(net, make_method(function))


def test_simulate_with_invalid_method_raises(net: nn.Module) -> None:
    with pytest.raises(ft.FedTailorError, match=r"ft\.methods\.FedAvg\(lr=0\.1\), got"):
        simulate(net, ft.methods.FedAvg)  # type: ignore[arg-type]

    class Plain(ft.methods.FedAvg):
        pass

    with pytest.raises(ft.FedTailorError, match=r"The method Plain .* @dataclass\(frozen=True\)"):
        simulate(net, Plain())

    @dataclass(frozen=True)
    class WithoutModel(ft.methods.Local):
        def personalize(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> Tree:
            return ft.Method.personalize(self, ctx, state, message)

    with pytest.raises(ft.FedTailorError, match=r"WithoutModel\.personalize must return the client's model"):
        simulate(net, WithoutModel())


def test_wrap_with_metric_named_loss_raises() -> None:
    with pytest.raises(ft.FedTailorError, match="cannot be named 'loss'"):
        ft.wrap(nn.Linear(2, 1), head=None, metrics={"loss": lambda outputs, targets: outputs.mean()})


def test_simulate_accepts_name_of_dtype(net: nn.Module) -> None:
    assert same(simulate(net, dtype="float64").server, simulate(net, dtype=torch.float64).server)


def test_simulate_accepts_numpy_integers(net: nn.Module) -> None:
    plain, numpy = simulate(net, seed=3, rounds=2), simulate(net, seed=np.int64(3), rounds=np.int32(2))
    assert same(plain.server, numpy.server)


@pytest.mark.parametrize("field", ["duals", "printed_loss"])
def test_method_flag_with_non_boolean_raises(field: str) -> None:
    assert f"{field} must be true or false, got 'no'" in error_message(lambda: ft.methods.FedAPM(**{field: "no"}))  # type: ignore[arg-type]
