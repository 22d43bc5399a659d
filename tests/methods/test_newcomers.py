"""Clients that join late: states grow, other clients are not affected, and newcomers start as documented."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import error_message, same, tiny_federation
from fedtailor import methods as m
from fedtailor.core.batch import SharedContext
from fedtailor.core.method import Exchange, Method, Setup
from fedtailor.core.trees import Rows, Tree, add, flatten, scale, stack, sub, take, zeros_like
from fedtailor.methods import METHODS
from fedtailor.training.channel.payload import mask_absent_rows
from fedtailor.training.client_failures import check_finite
from fedtailor.training.engines.sequential import Sequential
from fedtailor.training.sample_index import SampleIndex
from support.method_variants import ALL_METHODS, VARIANTS
from support.problem import Weights, make_normalized_net, select_names
from support.problem import average as weighted_average

SIZES = (6, 3, 5, 4, 2)  # three initial clients and two newcomers
FED = tiny_federation(SIZES)
ROUNDS = 6
EACH_METHOD = pytest.mark.parametrize(
    "name", [*METHODS, *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS)]
)
DEPENDS_ON_COUNT = {  # parts of a message that depend on the number of clients by the formula of the method
    "scaffold": "control", "lag, scaffold": "control", "selffl": "total_weight", "selffl, augmented": "total_weight",
    "apple": "cores", "apple, one core": "cores", "apple, two cores": "cores", "fedfomo": "models",
    "fedfomo, one model": "models", "pfedla": "params", "pfedla, softmax": "params", "heurpfedla": "params",
}  # fmt: skip
ROUNDED_SUMS = {  # sums with additional terms of 0 may be rounded differently
    "fedapa", "fedapa, all shared", "fedapa, code", "fedamp", "heurfedamp", "fedcac", "pfedhn", "pfedhn-pc",
    "pfedhn, turns",
}  # fmt: skip


class GrowingFederation:
    """A federation that clients can join: server state, client states, and the last uploads."""

    def __init__(self, method: Method, net: nn.Module, count: int = 3) -> None:
        self.method, self.model, self.count = method, ft.wrap(net), count
        self.number = 1  # the next round
        self.start = self.model.init(0)
        self.server = method.init_server(self.setup)
        self.states = {client: method.init_client(self.setup) for client in range(count)}
        self.uploads: dict[int, Tree] = {}

    @property
    def setup(self) -> Setup:
        return Setup(self.model, self.start, self.count, torch.tensor(SIZES[: self.count]), ROUNDS, seed=0)

    @property
    def engine(self) -> Sequential:
        shared = SharedContext(
            model=self.model.mode(training=True),
            x=FED.x,
            y=FED.y,
            prepare=lambda x: x,
            batch_size=2,
            rounds=ROUNDS,
            num_clients=self.count,
            total_size=sum(SIZES[: self.count]),
            seed=0,
            dtype=torch.float64,
        )
        return Sequential(shared, SampleIndex(FED.train, torch.device("cpu")))

    def sent(self, *clients: int) -> Tree:
        return mask_absent_rows(self.method.send(self.server, clients, self.number))

    @torch.no_grad()
    def train_round(self, *clients: int) -> "GrowingFederation":
        """Run a round with the given clients, or with all clients."""
        selected = clients or tuple(range(self.count))
        for cohort in [[client] for client in selected] if self.method.sequential_clients else [list(selected)]:
            self._train_cohort(cohort)
        self.number += 1
        return self

    def _train_cohort(self, clients: list[int]) -> None:
        def train(ctx: ft.ClientContext, state: Tree, message: Tree) -> Tree:
            new, upload = self.method.train(ctx, state, message)
            return {"state": new, "upload": upload}

        sent = self.sent(*clients)
        result = self.engine.apply(train, self.number, clients, stack([self.states[c] for c in clients]), sent)
        sizes, received = torch.tensor([SIZES[client] for client in clients]), mask_absent_rows(result["upload"])
        total = torch.tensor(sum(SIZES[: self.count]))
        exchange = Exchange(self.number, clients, self.count, sizes, self.model, sent, received, total)
        self.server = self.method.receive(self.server, exchange)
        for position, client in enumerate(clients):
            self.states[client] = take(result["state"], position)
            self.uploads[client] = take(received, position)

    @torch.no_grad()
    def grow(self, count: int = 4) -> "GrowingFederation":
        """Add clients until there are `count`."""
        before, self.count = self.count, count
        self.server = self.method.grow_server(self.server, self.setup, before)
        self.states = {client: self.method.grow_client(state, self.setup) for client, state in self.states.items()}
        for client in range(before, count):
            self.states[client] = self.method.init_newcomer(self.setup, take(self.sent(client), 0))
        return self

    @torch.no_grad()
    def models(self, *clients: int) -> Tree:
        """Return the personal models of clients at the start of the next round."""
        sent = mask_absent_rows(self.method.serve(self.server, clients, self.number))
        states = stack([self.states[client] for client in clients])
        return self.engine.apply(self.method.personalize, self.number, clients, states, sent)

    def uploaded(self, *clients: int, part: str = "params") -> list[dict[str, Tensor]]:
        return [self.uploads[client][part] for client in clients]


def average(trees: Sequence[Weights], weights: Sequence[float] | None = None) -> Weights:
    return weighted_average(trees, weights or [1.0] * len(trees))


def shapes(tree: Tree) -> dict[str, Any]:
    return {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(tree).items()}


def after_two_rounds(name: str, net: nn.Module) -> GrowingFederation:
    return GrowingFederation(ALL_METHODS[name], net).train_round().train_round()


def initial_head(federation: GrowingFederation) -> Tree:
    return federation.model.split(federation.start)[1]


# all methods


@EACH_METHOD
@pytest.mark.parametrize(
    "statistics", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "batch normalization"]
)
def test_two_clients_can_join_one_after_the_other(name: str, statistics: bool, net: nn.Module) -> None:
    """States have the names, shapes, and dtypes of a federation of the new size, and training continues."""
    federation = (
        GrowingFederation(ALL_METHODS[name], make_normalized_net() if statistics else net).train_round().train_round()
    )
    for count in (4, 5):
        federation.grow(count)
        for _ in range(2):  # directly after joining, and after a round with all clients
            assert shapes(federation.server) == shapes(federation.method.init_server(federation.setup))
            expected = shapes(federation.method.init_client(federation.setup))
            assert all(shapes(state) == expected for state in federation.states.values())
            check_finite(
                {"server": federation.server, "models": federation.models(*range(count))}, federation.number, str
            )
            check_finite(
                {str(client): tree for client, tree in (federation.states | federation.uploads).items()},
                federation.number,
                str,
            )
            federation.train_round()
    variances = [leaf for path, leaf in flatten(federation.models(3, 4)).items() if path.endswith("running_var")]
    assert all(float(leaf.min()) >= 0 for leaf in variances)


@EACH_METHOD
def test_joining_does_not_affect_existing_clients(name: str, net: nn.Module) -> None:
    """Messages, states, and personal models are bitwise equal unless a formula depends on the number of clients."""
    federation, some = GrowingFederation(ALL_METHODS[name], net).train_round().train_round(0, 1), (0, 1, 2)
    sent, states, models = federation.sent(*some), federation.states, federation.models(*some)
    federation.grow(5)
    dependent, tolerance = DEPENDS_ON_COUNT.get(name, ""), 1e-14 if name in ROUNDED_SUMS else 0.0
    unaffected = [key for key in sent if key != dependent]
    assert same(select_names(federation.sent(*some), unaffected), select_names(sent, unaffected), tolerance)
    if dependent not in ("cores", "models", "params"):
        assert same(federation.models(*some), models, tolerance)
    if dependent != "cores":
        assert all(same(federation.states[client], states[client]) for client in some)


@pytest.mark.slow
@EACH_METHOD
def test_growing_is_pure_and_newcomer_is_sent_current_model(name: str, net: nn.Module) -> None:
    """Growing by no clients changes nothing, and a message to a newcomer has no initial model parts."""
    federation = after_two_rounds(name, net)
    assert same(federation.method.grow_server(federation.server, federation.setup, before=3), federation.server)
    for state in federation.states.values():
        assert same(federation.method.grow_client(state, federation.setup), state)
    trees = {"server": federation.server, "states": {str(client): state for client, state in federation.states.items()}}
    copies = {path: leaf.clone() for path, leaf in flatten(trees).items()}
    message = take(federation.grow(5).sent(3), 0)
    assert same(flatten(trees), copies)
    for node in (message.get("params", {}), message.get("models", {}), message.get("cores", {})):
        for parameter, leaf in node.items():
            values = leaf.values[leaf.present] if isinstance(leaf, Rows) else leaf
            assert values.numel() == 0 or not torch.equal(values, federation.start[parameter].expand_as(values))


@pytest.mark.slow
@EACH_METHOD
def test_joining_before_round_1_equals_initial_membership(name: str, net: nn.Module) -> None:
    """All clients receive the messages of round 1 of a federation with four clients."""
    if name.startswith(("pfedhn", "pfedla", "heurpfedla", "apple, ", "fedfomo")):
        return  # random numbers of a newcomer, or random choices, differ
    grown, initial = (
        GrowingFederation(ALL_METHODS[name], net).grow(),
        GrowingFederation(ALL_METHODS[name], net, count=4),
    )
    assert same(grown.sent(0, 1, 2, 3), initial.sent(0, 1, 2, 3), tolerance=1e-14)
    assert same(grown.models(0, 1, 2, 3), initial.models(0, 1, 2, 3), tolerance=1e-14)


# the initial state of a newcomer, by source: the received model, the initial model, the initial model with the received
# part, or zero

INITIAL_PARTS = [
    *((name, part, "received") for name, part in {
        "fedadmm": "own", "fedapm": "shared", "ditto": "own", "pfedme": "own", "fedphp": "own", "fedamp": "params",
        "fedala": "own", "fedcp": "head", "selffl": "params",
    }.items()),
    *((name, part, "initial") for name, part in {
        "fedper": "personal", "fedrep": "personal", "fedbabu": "personal", "lgfedavg": "personal",
        "fedalt": "personal", "fedsim": "personal", "fedapm": "personal", "fedapa": "head", "gpfl": "head",
        "local": "params", "lpproj": "own", "fedproto": "params", "fedfomo": "params", "fedlag": "params",
        "lag": "params",
    }.items()),
    ("fedas", "params", "both"), ("fedgh", "params", "both"),
    ("scaffold", "control", "zero"), ("fedadmm", "dual", "zero"), ("fedapm", "dual", "zero"),
    ("fedrod", "head", "zero"), ("dbe", "memory", "zero"), ("ditto, kept optimizers", "own_optimizer", "zero"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "part", "source"), INITIAL_PARTS)
def test_newcomer_state_starts_as_documented(name: str, part: str, source: str, net: nn.Module) -> None:
    federation = after_two_rounds(name, net).grow()
    own, received = federation.states[3][part], take(federation.sent(3), 0).get("params", {})
    if source == "zero":
        assert not any(leaf.any() for leaf in flatten({"own": own}).values())
        return
    values = {"received": received, "initial": federation.start, "both": federation.start | received}[source]
    assert own and same(own, select_names(values, own))
    assert source == "initial" or not same(own, select_names(federation.start, own))


# the first model that a newcomer receives


def generate_model(network: Tree) -> Tree:
    """Return the model that the hypernetwork of pFedHN generates for the mean embedding, computed directly."""
    hidden = network["embeddings"].mean(0)
    for number in range(4):
        layer = network["trunk"][str(number)]
        hidden = layer["weight"] @ (hidden if number == 0 else hidden.clamp(min=0)) + layer["bias"]
    return {name: output["weight"] @ hidden + output["bias"] for name, output in network["outputs"].items()}


def mean_upload(federation: GrowingFederation) -> Tree:
    return average(federation.uploaded(0, 1, 2))


RECEIVED: dict[str, Callable[[GrowingFederation], Tree]] = {
    **dict.fromkeys(["fedapa", "fedapa, all shared", "fedapa, code"], mean_upload),
    **dict.fromkeys(["fedamp", "heurfedamp", "pfedla", "pfedla, softmax"], mean_upload),
    **dict.fromkeys(["pfedhn", "pfedhn, turns"], lambda f: generate_model(f.server["network"])),
    "fedcac": lambda f: average(f.uploaded(0, 1, 2), SIZES[:3]),
    "fedpac": lambda f: f.server["params"] | average([take(f.server["heads"], client) for client in range(3)]),
    "selffl": lambda f: f.server["params"],
}


STORED = ("fedapa", "fedapa, all shared", "fedamp", "pfedla")  # the server stores the last model of each client


@pytest.mark.parametrize("name", RECEIVED)
def test_newcomer_receives_documented_model(name: str, net: nn.Module) -> None:
    """A newcomer has no initial parts except those that are personal; what the server stores for it is the same."""
    federation = after_two_rounds(name, net)
    expected = RECEIVED[name](federation)
    federation.grow(5)
    for client in (3, 4):
        assert same(take(federation.sent(client), 0)["params"], expected, tolerance=1e-12)
        model = take(federation.models(client), 0)
        assert same(model, select_names(federation.start, model) | expected, tolerance=1e-12)
    for kind in {"models", "params"} & federation.server.keys() if name in STORED else ():
        assert same(take(federation.server[kind], 4), expected, tolerance=1e-12)
    if "weights" in federation.server:
        weights = federation.server["weights"]
        assert torch.allclose(weights[3:].sum(1), torch.ones(2).double(), rtol=0, atol=1e-12)
        assert not weights[:3, 3:].any()  # the others give no weight to the model of a newcomer


# individual methods


@pytest.mark.parametrize("method", [m.FedAPA(), m.FedAMP(), m.FedFomo(), m.FedPAC()], ids=lambda x: type(x).__name__)
def test_client_without_participation_is_not_in_mean(method: Method, net: nn.Module) -> None:
    federation = GrowingFederation(method, net).train_round(0, 2).train_round(0, 2).grow()
    rows = next(federation.server[kind] for kind in ("models", "heads", "params") if kind in federation.server)
    assert all(torch.equal(leaf[1], federation.start[name]) for name, leaf in rows.items())
    assert same(take(rows, 3), average([take(rows, 0), take(rows, 2)]), tolerance=1e-12)


def test_pfedhn_additional_embedding_entries_start_at_zero_and_learn(net: nn.Module) -> None:
    """An embedding has ⌊1 + N/4⌋ entries: one for three clients, two for four."""
    federation = GrowingFederation(m.PFedHN(), net).train_round()
    assert federation.server["network"]["embeddings"].shape == (3, 1)
    federation.grow()
    assert federation.server["network"]["embeddings"].shape == (4, 2)
    assert not federation.server["network"]["embeddings"][:, 1].any()
    federation.train_round()
    assert federation.server["network"]["embeddings"][:, 1].all()


@pytest.mark.parametrize("name", ["pfedla", "pfedla, softmax"])
def test_pfedla_newcomer_has_equal_shares_and_others_receive_share_of_mean_model(name: str, net: nn.Module) -> None:
    federation = after_two_rounds(name, net)
    mean, before = mean_upload(federation), take(federation.sent(0), 0)["params"]
    after = take(federation.grow().sent(0), 0)["params"]
    weights = federation.method._weights(federation.server["networks"], torch.arange(4))  # type: ignore[attr-defined]
    for layer, rows in weights.items():
        assert torch.allclose(rows.sum(1), torch.ones(4).double()) and bool((rows[:3, 3] > 0).all())
        assert torch.allclose(rows[3], torch.full((4,), 0.25).double())
        if name == "pfedla":  # shares of the other models keep their proportions
            moved = torch.lerp(before[f"{layer}.weight"], mean[f"{layer}.weight"], rows[0, 3])
            assert torch.allclose(after[f"{layer}.weight"], moved, rtol=0, atol=1e-12)


Invariant = Callable[[Tree, Tree], Tree]  # server and client state -> a term whose mean over all clients is 0
INVARIANTS: dict[str, Invariant] = {
    "fedapm": lambda server, own: add(own["dual"], scale(sub(own["shared"], server["params"]), 0.003)),  # ρ = 0.003
    "fedadmm": lambda server, own: sub(add(own["own"], scale(own["dual"], 1 / 0.01)), server["params"]),  # ρ = 0.01
    "scaffold": lambda server, own: sub(own["control"], server["control"]),
}


@pytest.mark.parametrize(
    ("name", "weights"),
    [("fedapm", None), *((name, weights) for name in ("fedadmm", "scaffold") for weights in ("uniform", "size"))],
)
def test_mean_over_all_clients_includes_newcomers(name: str, weights: str | None, net: nn.Module) -> None:
    """The mean of π_i + ρ(u_i − u) is 0, θ is the mean of w_i + y_i/ρ, and c is the mean of c_i."""
    method = METHODS[name](**{"weights": weights} if weights else {})
    shares = list(map(float, SIZES[:4])) if weights == "size" else None
    federation = GrowingFederation(method, net).train_round().train_round(0, 2).grow()
    for clients in ([], [0, 1], [1, 3], [0, 1, 2, 3]):
        federation = federation.train_round(*clients) if clients else federation
        terms = average([INVARIANTS[name](federation.server, own) for own in federation.states.values()], shares)
        assert len(federation.states) == 4 and same(terms, zeros_like(terms), tolerance=1e-11)


def test_fedlag_newcomer_receives_global_layers_and_keeps_initial_personal_layers(net: nn.Module) -> None:
    federation = GrowingFederation(m.FedLAG(layers="last", personal_layers=1), net).train_round().train_round()
    expected = {name: leaf for name, leaf in average(federation.uploaded(0, 1, 2)).items() if name.startswith("fc")}
    federation.grow()
    message = take(federation.sent(3), 0)
    assert same(message["params"], expected, tolerance=1e-12)
    assert same(take(federation.models(3), 0), initial_head(federation) | message["params"])
    assert same(take(federation.server["models"], 3), federation.start)
    assert same(select_names(federation.states[3]["params"], initial_head(federation)), initial_head(federation))


def test_lag_calls_grow_server_of_inner_method(net: nn.Module) -> None:
    federation = after_two_rounds("lag, scaffold", net)
    old, new = federation.server["inner"], federation.grow().server["inner"]
    assert same(new["control"], scale(old["control"], 3 / 4), tolerance=1e-15)


@dataclass(frozen=True)
class ClientCounter(m.FedAvg):
    """FedAvg whose clients store the number of clients, now and when they joined."""

    def init_client(self, setup: Setup) -> Tree:
        return {"now": torch.tensor(setup.num_clients), "when_joined": torch.tensor(setup.num_clients)}

    def grow_client(self, state: Tree, setup: Setup) -> Tree:
        return state | {"now": torch.tensor(setup.num_clients)}


def test_lag_calls_grow_client_of_inner_method(net: nn.Module) -> None:
    states = GrowingFederation(m.LAG(ClientCounter()), net).train_round().grow().train_round().grow(5).states
    found = [(int(state["inner"]["now"]), int(state["inner"]["when_joined"])) for state in states.values()]
    assert found == [(5, 3), (5, 3), (5, 3), (5, 4), (5, 5)]


def test_selffl_newcomer_has_mean_of_known_variances(net: nn.Module) -> None:
    federation = GrowingFederation(m.SelfFL(warmup=0, default_steps=2, max_steps=3), net)
    for _ in range(3):
        federation.train_round()
    between, known = federation.server["between"], federation.server["variances"]
    assert bool((known >= 0).all())
    federation.grow()
    own = [1 / (between + variance) for variance in [*known, known.mean()]]
    assert torch.allclose(take(federation.sent(3), 0)["total_weight"], torch.stack(own).sum(), rtol=1e-12)
    assert federation.server["variances"].tolist() == [*known.tolist(), -1.0]


def test_selffl_with_clusters_rejects_newcomers(net: nn.Module) -> None:
    federation = GrowingFederation(m.SelfFL(clusters=(0, 0, 1)), net).train_round()
    assert "cannot take newcomers" in error_message(federation.grow)


def test_dbe_newcomer_receives_consensus_once(net: nn.Module) -> None:
    federation = after_two_rounds("dbe", net).grow()
    consensus = federation.server["consensus"]
    assert federation.sent(0, 1, 2, 3)["consensus"].present[:, 0].tolist() == [False, False, False, True]
    federation.train_round()
    assert torch.equal(federation.states[3]["consensus"], consensus)
    assert not federation.sent(0, 1, 2, 3)["consensus"].present.any()


def test_fedfomo_newcomer_model_is_mean_until_uploaded(net: nn.Module) -> None:
    federation = after_two_rounds("fedfomo", net)
    models = federation.uploaded(0, 1, 2)
    federation.grow()
    sent = take(federation.sent(3), 0)["models"]
    for own in models:  # in any order
        assert any(same(take(sent, place), own) for place in range(3))
    expected = average(models)
    others = take(federation.sent(0), 0)["models"]
    assert any(same(take(others, place), expected, tolerance=1e-12) for place in range(3))


def test_apple_newcomer_core_is_weighted_mean_and_mixtures_stay(net: nn.Module) -> None:
    """p_0 is n_j / n over all clients; mixtures stay the same because the core of a newcomer is the old mixture."""
    federation = after_two_rounds("apple", net)
    expected, before = average(federation.uploaded(0, 1, 2), SIZES[:3]), federation.models(0, 1, 2)
    changes = {client: state["change"] for client, state in federation.states.items()}
    for count in (4, 5):
        federation.grow(count)
        assert same(federation.models(0, 1, 2), before, tolerance=1e-12)
        for newcomer in range(3, count):
            assert same(take(federation.server["cores"], newcomer), expected, tolerance=1e-12)
            assert same(federation.states[newcomer]["core"], expected, tolerance=1e-12)
            assert same(take(federation.models(newcomer), 0), expected, tolerance=1e-12)
    shares = torch.tensor(SIZES).double() / sum(SIZES)
    assert all(torch.allclose(state["shares"], shares, rtol=0, atol=1e-15) for state in federation.states.values())
    for client, change in changes.items():
        assert federation.states[client]["change"].tolist() == [*change.tolist(), 0.0, 0.0]


@pytest.mark.parametrize("limit", [1, 2])
def test_apple_with_limit_sends_only_requested_cores(limit: int, net: nn.Module) -> None:
    federation = GrowingFederation(m.APPLE(limit=limit), net).train_round().train_round()
    expected, wanted = federation.server["wanted"], federation.grow(5).server["wanted"]
    assert torch.equal(wanted[:3, :3], expected) and not wanted[:3, 3:].any()
    assert wanted.sum(1).tolist() == [limit] * 5 and not wanted.diagonal().any()


def test_apple_with_limit_replaces_unseen_cores_by_mean(net: nn.Module) -> None:
    federation = GrowingFederation(m.APPLE(limit=1), net).train_round().train_round().grow()
    state, seen = federation.states[0], federation.states[0]["seen"].nonzero()[:, 0].tolist()
    assert seen and 3 not in seen
    cores = [take(state["cache"], client) for client in seen]
    assert same(take(state["cache"], 3), average(cores, [SIZES[client] for client in seen]), tolerance=1e-12)
    requested = int(federation.server["wanted"][3].nonzero())
    assert same(take(federation.models(3), 0), federation.uploads[requested]["params"], tolerance=1e-12)
