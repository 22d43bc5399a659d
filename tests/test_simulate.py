"""The round loop as a user meets it: schedules, moments, evaluation, records, summaries, refusals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import SIZES, Loud, TinyNet, refusal, same, tiny_federation
from fedtailor.schedule import make_schedule
from fedtailor.trees import Tree


def go(net: nn.Module, method: ft.Method | None = None, **settings: Any) -> ft.Run:
    defaults: dict[str, Any] = {"rounds": 3, "batch_size": 4, "dtype": torch.float64}
    if "schedule" in settings:
        del defaults["rounds"]
    return ft.simulate(method or ft.methods.FedAvg(), net, tiny_federation(), **(defaults | settings))


def accuracy(net: nn.Module, state: Any, client: int) -> float:
    """Computed apart from the library."""
    fed = tiny_federation()
    net.load_state_dict(state)
    own = fed.test[client]
    return float((net(fed.x[own]).argmax(1) == fed.y[own]).double().mean())


def test_the_record_says_what_happened(net: nn.Module) -> None:
    seen: list[Any] = []
    run = go(net, schedule=[[0, 2], [1]], record=seen.append)
    assert seen == run.records
    first = run.records[0]
    assert first["round"] == 1 and first["clients"] == [0, 2]
    size = 8 * sum(p.numel() for p in net.parameters())
    assert first["bytes_up"] == first["bytes_down"] == 2 * size
    assert first["per_client"]["bytes_up"] == {0: size, 2: size}
    assert set(first["per_client"]["accuracy_trained"]) == {0, 2}
    assert set(first["per_client"]["accuracy_received"]) == {0, 1, 2, 3}
    assert first["seconds"] > 0


def test_the_two_moments_are_what_they_say(net: nn.Module) -> None:
    """received: the average after this round; trained: the client's own weights before it."""
    run = go(net, schedule=[[0, 1, 2], [0, 2]])
    last = run.records[-1]["per_client"]
    twin = TinyNet().double()
    for client in range(4):
        assert accuracy(twin, run.server["params"], client) == last["accuracy_received"][client]
        assert same(run.personal(client, "received"), run.server["params"])
    for client in (0, 2):
        assert accuracy(twin, run.personal(client), client) == last["accuracy_trained"][client]
    round_one = go(net, schedule=[[0, 1, 2]])
    assert same(run.personal(1), round_one.personal(1))  # absent in round 2: as it last trained
    assert same(run.personal(3), net.state_dict())  # never took part: the initial model


def test_weighted_and_plain_means_differ_by_test_sizes(net: nn.Module) -> None:
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    fed = ft.Federation.from_arrays([(x, y, x[:1], y[:1]), (x, y, x[:3], y[:3])])
    record = ft.simulate(ft.methods.FedAvg(), net, fed, rounds=1, dtype=torch.float64).records[0]
    one, three = record["per_client"]["accuracy_received"].values()
    assert record["accuracy_received"] == pytest.approx((one + 3 * three) / 4)
    assert record["accuracy_received_mean"] == pytest.approx((one + three) / 2)


def test_loss_is_the_trained_models_on_its_own_training_data(net: nn.Module) -> None:
    run, fed = go(net, rounds=1), tiny_federation()
    twin = TinyNet().double()
    for client in range(4):
        twin.load_state_dict(run.personal(client))
        own = fed.train[client]
        loss = nn.functional.cross_entropy(twin(fed.x[own]), fed.y[own]).detach()
        assert run.records[0]["per_client"]["loss"][client] == pytest.approx(float(loss))


@pytest.mark.parametrize(("evaluate", "who"), [("all", [0, 1, 2, 3]), ("participants", [1, 2])])
def test_whom_to_evaluate(net: nn.Module, evaluate: str, who: list[int]) -> None:
    record = go(net, schedule=[[1, 2]], evaluate=evaluate).records[0]
    assert list(record["per_client"]["accuracy_received"]) == who


def test_a_number_of_clients_to_evaluate_stays_the_same_clients(net: nn.Module) -> None:
    records = go(net, evaluate=2).records
    chosen = [tuple(record["per_client"]["accuracy_received"]) for record in records]
    assert len(set(chosen)) == 1 and len(chosen[0]) == 2


def test_how_often_to_evaluate_changes_nothing_but_the_record(net: nn.Module) -> None:
    often, seldom = go(net, rounds=5), go(net, rounds=5, evaluate_every=2)
    evaluated = [record["round"] for record in seldom.records if record["accuracy_received"] is not None]
    assert evaluated == [2, 4, 5]  # the last always
    assert same(often.server, seldom.server)


def test_the_same_seed_repeats_and_another_does_not(net: nn.Module) -> None:
    assert same(go(net, seed=1).server, go(net, seed=1).server)
    assert not same(go(net, seed=1).server, go(net, seed=2).server)


def test_the_global_generator_is_left_alone() -> None:
    fed = ft.load("digits", clients=3)
    before = torch.random.get_rng_state()
    ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed), fed, rounds=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_named_network_starts_from_the_seed_and_a_module_from_its_own_weights(net: nn.Module) -> None:
    fed = ft.load("digits", clients=3)
    named = [ft.simulate(ft.methods.Local(), ft.network("mlp", fed), fed, schedule=[[0]], seed=s) for s in (0, 0, 1)]
    assert same(named[0].personal(2), named[1].personal(2))
    assert not same(named[0].personal(2), named[2].personal(2))
    own = go(net, ft.methods.Local(), schedule=[[0]], seed=7)
    assert same(own.personal(3), net.state_dict())


def test_initial_is_where_to_start(net: nn.Module) -> None:
    torch.manual_seed(9)
    other = TinyNet().double()
    run = go(net, ft.methods.Local(), schedule=[[0]], initial=other.state_dict())
    assert same(run.personal(3), other.state_dict())
    with pytest.raises(ft.Refused, match=r"has no 'head\.weight'"):
        go(net, initial={k: v for k, v in other.state_dict().items() if k != "head.weight"})
    with pytest.raises(ft.Refused, match="must be the same network"):
        go(net, initial=other.state_dict() | {"fc.bias": torch.zeros(9)})


def test_the_users_module_is_not_touched(net: nn.Module) -> None:
    before = {k: v.clone() for k, v in net.state_dict().items()}
    go(net)
    assert same(before, net.state_dict())


def test_validation_data_are_held_out_of_training(net: nn.Module) -> None:
    run = go(net, validation=0.3)
    trained_on = [client["train"] for client in run.info["clients"]]
    assert all(abs(0.7 * size - kept) < 1 for size, kept in zip(SIZES[:3], trained_on[:3], strict=True))
    assert trained_on[3] == 1  # its only sample stays
    assert set(run.records[0]["per_client"]["validation_received"]) == {0, 1, 2}
    assert run.summary()["received"]["best_validation"] is not None
    assert go(net).summary()["received"]["best_validation"] is None


def handmade(accuracies: list[dict[int, float]], moment: str = "received", **info: Any) -> ft.Run:
    """A run with these accuracies and nothing else."""
    clients = [{"name": str(i), "train": size, "test": size, "validation": 0} for i, size in enumerate((1, 3, 1))]
    values = [{f"accuracy_{moment}": a, f"loss_{moment}": a} for a in accuracies]
    records = [{"round": number, "per_client": value} for number, value in enumerate(values, start=1)]
    found = {"score": "accuracy", "higher_is_better": True, "clients": clients} | info
    return ft.Run({}, found, records, {}, lambda client: {}, lambda client, moment: {})


def test_a_summary_by_hand() -> None:
    run = handmade([{0: 1.0, 1: 0.8}, {0: 0.9, 1: 0.1}])
    alone = handmade([{0: 1.0, 1: 0.0}, {0: 0.9, 1: 0.0}])
    found = run.summary(alone)["received"]
    assert found["last"]["weighted"] == pytest.approx((0.9 + 3 * 0.1) / 4)
    assert found["last"]["mean"] == pytest.approx(0.5)
    assert found["last"]["worst_tenth"] == pytest.approx(0.1)
    assert found["last"]["better_than_alone"] == 0.5 and found["last"]["worse_than_alone"] == 0
    assert found["best_test"]["round"] == 1
    assert found["best_test"]["weighted"] == pytest.approx((1 + 3 * 0.8) / 4)
    assert run.summary()["trained"]["last"] is None  # nothing was evaluated at that moment


def test_lower_may_be_better() -> None:
    run = handmade([{0: 0.2, 1: 0.2}, {0: 0.9, 1: 0.3}], higher_is_better=False)
    found = run.summary(handmade([{0: 0.5, 1: 0.5}] * 2, higher_is_better=False))["received"]
    assert found["best_test"]["round"] == 1
    assert found["last"]["worst_tenth"] == 0.9
    assert found["last"]["better_than_alone"] == 0.5


def test_absent_clients_count_as_they_last_were() -> None:
    run = handmade([{0: 0.5, 1: 0.5}, {0: 0.9}], moment="trained")
    assert run.summary()["trained"]["last"]["mean"] == pytest.approx(0.7)


def test_at_the_end_everyone_counts_as_it_last_trained(net: nn.Module) -> None:
    """Also where it did so in a round that was not evaluated."""
    run = go(net, schedule=[[0], [1], [2]], evaluate_every=3)
    twin = TinyNet().double()
    assert run.scores("trained") == {client: accuracy(twin, run.personal(client), client) for client in range(4)}


def test_at_the_end_everyone_is_judged_on_validation_data(net: nn.Module) -> None:
    """As in a run whose every round is evaluated, where each client was judged when it trained."""
    schedule = [[0], [1], [2], [3], [0]]
    ends, always = (go(net, schedule=schedule, evaluate_every=every, validation=0.5) for every in (5, 1))
    found = [line["per_client"].get("validation_trained", {}) for line in always.records]
    judged = {client: value for values in found for client, value in values.items()}
    assert ends.records[-1]["last_trained"]["validation"] == judged and judged.keys() > {0}


def test_participation_draws_the_share_that_was_asked_for() -> None:
    assert all(len(clients) == 3 for clients in make_schedule(10, 50, 0.3))
    counts = {len(clients) for clients in make_schedule(10, 200, (0.6, 1.0))}
    assert counts == {6, 7, 8, 9, 10}
    assert make_schedule(10, 1, 0.001)[0]  # never nobody
    everyone = {client for clients in make_schedule(10, 100, 0.2) for client in clients}
    assert everyone == set(range(10))
    assert make_schedule(10, 5, 0.3, seed=0) != make_schedule(10, 5, 0.3, seed=1)
    assert make_schedule(10, 5, 0.3) == make_schedule(10, 9, 0.3)[:5]  # a longer run begins the same


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": [[0, 9]]}, "names client 9; there are 0 to 3"),
        ({"schedule": [[]]}, "Round 1 of the schedule has no clients"),
        ({"schedule": [[1, 1]]}, "names a client twice"),
        ({"schedule": [[0]], "rounds": 2}, "leave rounds out"),
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
        ({"evaluate": "nobody"}, "evaluate must be"),
        ({"engine": "sequentail"}, "did you mean 'sequential'"),
        ({"device": "cuda:77"}, "The device 'cuda:77' is not to be had here"),
        ({"dtype": torch.float16}, "dtype must be torch.float32 or torch.float64"),
        ({"device": "gpu"}, "The device 'gpu' is not to be had here"),
    ],
)
def test_senseless_settings_are_refused_in_words(net: nn.Module, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ft.Refused, match=words):
        go(net, **settings)


def test_a_model_that_does_not_fit_is_named_with_the_client() -> None:
    fed = ft.load("digits", clients=3)
    with pytest.raises(ft.Refused, match=r"does not take client 0's inputs, \(1, 8, 8\)"):
        ft.simulate(ft.methods.FedAvg(), TinyNet(), fed, rounds=1)
    with pytest.raises(ft.Refused, match="has labels beyond the model's 3 outputs"):
        small = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        ft.simulate(ft.methods.FedAvg(), ft.wrap(small, head="1"), fed, rounds=1)
    with pytest.raises(ft.Refused, match=r"no layer 'head'; .*head='1'"):
        ft.simulate(ft.methods.FedAvg(), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), fed, rounds=1)
    with pytest.raises(ft.Refused, match="one number an example"):
        model = ft.wrap(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), head="1", loss=lambda o, y: o.mean())
        ft.simulate(ft.methods.FedAvg(), model, fed, rounds=1)


def test_strangers_are_refused(net: nn.Module) -> None:
    run = go(net)
    with pytest.raises(ft.Refused, match="There is no client 4; there are 0 to 3"):
        run.personal(4)
    with pytest.raises(ft.Refused, match="'received' or 'trained'"):
        run.personal(0, moment="now")


def test_a_method_may_go_one_by_one(net: nn.Module) -> None:
    """Then each client of a round sees the server that the one before it left."""

    @dataclass(frozen=True)
    class Relay(ft.methods.FedAvg):
        one_by_one = True

    relay = go(net, Relay(), schedule=[[0, 1, 2]])
    rounds = go(net, ft.methods.FedAvg(), schedule=[[0]])
    assert same(relay.personal(0), rounds.personal(0))
    assert same(relay.server["params"], relay.personal(2))
    assert not same(relay.personal(1), go(net, schedule=[[0, 1, 2]]).personal(1), 1e-9)
    assert len(relay.records) == 1 and relay.records[0]["per_client"]["bytes_up"].keys() == {0, 1, 2}


def test_a_method_may_measure_for_the_record(net: nn.Module) -> None:
    @dataclass(frozen=True)
    class Drift(ft.methods.Local):
        def measure(self, local: ft.LocalView, state: Tree, message: Tree) -> Tree:
            return {"norm": state["params"]["fc.weight"].square().sum()}

    run = go(net, Drift())
    for client in range(4):
        norm = float(run.personal(client)["fc.weight"].square().sum())
        assert run.records[-1]["per_client"]["norm"][client] == pytest.approx(norm)
    assert run.records[-1]["bytes_up"] == 0  # never sent


def test_a_method_may_send_something_else_to_everyone(net: nn.Module) -> None:
    @dataclass(frozen=True)
    class Own(ft.Method):
        def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
            shift = torch.tensor(clients, dtype=torch.float64)
            return {"params": {n: p + shift.reshape(-1, *[1] * p.ndim) for n, p in server["params"].items()}}

        def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            return state, {}

    run = go(net, Own(), schedule=[[1, 3]])
    assert torch.equal(run.personal(3)["fc.bias"], net.state_dict()["fc.bias"] + 3)
    assert torch.equal(run.personal(2, "received")["fc.bias"], net.state_dict()["fc.bias"] + 2)


def test_a_state_that_changes_shape_is_an_error(net: nn.Module) -> None:
    @dataclass(frozen=True)
    class Growing(ft.Method):
        def init_client(self, setup: ft.Setup) -> Tree:
            return {"seen": torch.zeros(1)}

        def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            return {"seen": torch.cat([state["seen"], torch.ones(1)])}, {}

    with pytest.raises(ft.Refused, match="changed its names or shapes at 'seen'"):
        go(net, Growing())


def test_regression_and_own_metrics() -> None:
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


def test_pictures_kept_as_bytes_train_as_numbers_from_0_to_1() -> None:
    """uint8 and the same pictures divided by 255 give the same run."""
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (20, 1, 4, 4), generator=random, dtype=torch.uint8)
    y = (x.float().mean((1, 2, 3)) > 127).long()
    runs = []
    for kept in (x, x.float() / 255):
        fed = ft.Federation.from_arrays([(kept[:12], y[:12], kept[12:], y[12:])])
        runs.append(ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed), fed, rounds=2))
        assert fed.x.dtype == kept.dtype
    assert same(runs[0].server, runs[1].server)


def test_the_best_round_is_sought_over_the_same_clients() -> None:
    """A few lucky clients in an early round are no best round."""
    run = handmade([{0: 1.0}, {1: 0.2}, {0: 0.4, 1: 0.4}], moment="trained")
    assert run.summary()["trained"]["best_test"]["round"] == 2  # the first that knows both: (1.0 + 3 · 0.2) / 4 = 0.4
    run.records[2]["per_client"] = {name: {0: 0.9} for name in ("accuracy_trained", "loss_trained")}
    assert run.summary()["trained"]["best_test"]["clients"] == 2


def test_received_is_of_one_round_alone() -> None:
    """Scores under older server models do not count as received now."""
    run = handmade([{0: 1.0, 1: 1.0}, {1: 0.2}])
    assert run.summary()["received"]["last"]["clients"] == 1
    assert run.summary()["received"]["last"]["mean"] == pytest.approx(0.2)


def test_both_moments_speak_of_the_same_clients(net: nn.Module) -> None:
    for evaluate in ("participants", 2, "all"):
        last = {m: found["last"] for m, found in go(net, participation=0.5, evaluate=evaluate).summary().items()}
        assert last["received"]["clients"] == last["trained"]["clients"] > 0


def test_alone_must_be_the_same_clients(net: nn.Module) -> None:
    other = ft.simulate(ft.methods.Local(), net, tiny_federation((4, 4)), rounds=1, dtype=torch.float64)
    with pytest.raises(ft.Refused, match="on the same clients"):
        go(net).summary(alone=other)


def test_initial_brings_frozen_weights_too() -> None:
    """A pre-trained backbone that stays as it is must be the one that was given."""
    torch.manual_seed(1)
    given, module = TinyNet().double(), TinyNet().double()
    for net in (given, module):
        net.fc.requires_grad_(False)
    run = go(module, ft.methods.Local(), initial=given.state_dict())
    assert torch.equal(run.personal(0)["fc.weight"], given.state_dict()["fc.weight"])
    assert not torch.equal(run.personal(0)["head.weight"], given.state_dict()["head.weight"])
    assert run.info["parameters"] == 18
    with pytest.raises(ft.Refused, match=r"module\.state_dict\(\), not the module"):
        go(module, initial=given)


class Careless(TinyNet):
    """A module that cannot be repeated."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "draws" and self.training:
            x = nn.functional.dropout(x, 0.5, True)
        if self.how == "counts":
            self.get_buffer("seen").add_(1)
        return super().forward(x)


@pytest.mark.parametrize(("how", "words"), [("draws", "draws random numbers"), ("counts", "changes its buffer 'seen'")])
def test_a_module_that_cannot_be_repeated_is_refused(how: str, words: str) -> None:
    with pytest.raises(ft.Refused, match=words):
        go(Careless(how))
    assert go(Careless("not at all")).records


def test_divergence_is_named(net: nn.Module) -> None:
    assert go(net).records[-1]["diverged"] == []
    run = go(Loud().double(), ft.methods.Local(lr=1.0, epochs=1), batch_size=64, rounds=1)
    assert run.records[-1]["diverged"] == [0, 1, 2, 3]


def train_of(function: Any) -> ft.Method:
    """A method whose train is this function of (local, state, message)."""

    @dataclass(frozen=True)
    class Own(ft.Method):
        def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            return function(local, state, message)  # type: ignore[no-any-return]

    return Own()


def in_place(local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
    message["params"]["fc.bias"].add_(1)
    return state, {}


def test_a_state_changed_in_place_is_named_too(net: nn.Module) -> None:
    @dataclass(frozen=True)
    class Own(ft.methods.Local):
        def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            state["params"]["fc.bias"].add_(1)
            return state, {}

    with pytest.raises(ft.Refused, match="in place"):
        go(net, Own())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (in_place, r"changed 'params/fc\.bias' in place"),
        (
            lambda local, s, m: (s, m | {f"extra{int(local.index)}": m["params"]["fc.bias"]}),
            r"3 of 4 clients failed.*its upload 'extra0' is not there, others' is",
        ),
        (
            lambda local, s, m: (s, {"rows": torch.zeros(int(local.size))}),
            r"its upload 'rows' is float32 \(4,\), others' is float32 \(9,\)",
        ),
        (lambda local, s, m: m, "must return two dicts"),
        (lambda local, s, m: (s, {"count": 3}), "'upload/count' is no tensor"),
        (lambda local, s, m: (s | {"new": torch.zeros(1)}, {}), "changed its names or shapes at 'new'"),
    ],
)
def test_mistakes_in_an_own_method_are_named(net: nn.Module, function: Any, words: str) -> None:
    with pytest.raises(ft.Refused, match=words):
        go(net, train_of(function))


def test_what_is_no_method_is_refused(net: nn.Module) -> None:
    with pytest.raises(ft.Refused, match=r"ft\.methods\.FedAvg\(lr=0\.1\), not"):
        go(net, ft.methods.FedAvg)  # type: ignore[arg-type]

    class Plain(ft.methods.FedAvg):
        pass

    with pytest.raises(ft.Refused, match=r"@dataclass\(frozen=True\) above the class Plain"):
        go(net, Plain())

    @dataclass(frozen=True)
    class Silent(ft.methods.Local):
        def personalize(self, local: ft.LocalView, state: Tree, message: Tree) -> Tree:
            return ft.Method.personalize(self, local, state, message)

    with pytest.raises(ft.Refused, match=r"Silent\.personalize must say what the client's model is"):
        go(net, Silent())


def test_errors_count_downwards_unless_said_otherwise() -> None:
    def error(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).abs().mean()

    assert not ft.wrap(nn.Linear(2, 1), head=None, loss="regression", metrics={"mae": error}).higher_is_better
    assert ft.wrap(nn.Linear(2, 1), head=None, metrics={"own": error}).higher_is_better
    with pytest.raises(ft.Refused, match="cannot be named 'loss'"):
        ft.wrap(nn.Linear(2, 1), head=None, metrics={"loss": error})


def test_numbers_of_numpy_are_numbers(net: nn.Module) -> None:
    import numpy as np

    plain, numpy = go(net, seed=3, rounds=2), go(net, seed=np.int64(3), rounds=np.int32(2))
    assert same(plain.server, numpy.server)
    for wrong in ({"rounds": 2.0}, {"seed": "1"}, {"batch_size": 2.5}):
        with pytest.raises(ft.Refused, match="must be a whole number"):
            go(net, **wrong)


@pytest.mark.parametrize("schedule", [[["a"]], [1, 2], [[0.5, 1]], ["01"]])
def test_a_schedule_lists_clients_by_number(net: nn.Module, schedule: Any) -> None:
    assert "schedule" in refusal(lambda: go(net, schedule=schedule))


def test_what_is_asked_of_a_run_must_exist(net: nn.Module) -> None:
    run = go(net)
    assert "'received' or 'trained'" in refusal(lambda: run.numbers("trainedd"))
    assert "did you mean 'best_test'?" in refusal(lambda: run.scores("trained", "best_tst"))


@pytest.mark.parametrize("field", ["duals", "printed_loss"])
def test_a_switch_is_true_or_false(field: str) -> None:
    assert f"{field} must be true or false, not 'no'" in refusal(lambda: ft.methods.FedAPM(**{field: "no"}))  # type: ignore[arg-type]
