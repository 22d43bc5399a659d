"""Clients that join late: states grow, other clients are not affected, and newcomers start as documented."""

from collections.abc import Sequence
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
from fedtailor.core.trees import Rows, Tree, flatten, stack, take
from fedtailor.methods import METHODS
from fedtailor.methods.catalog import as_markdown, catalog
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
        exchange = Exchange(self.number, clients, self.count, sizes, self.model, sent, received)
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
            check_finite({"server": federation.server, "models": federation.models(*range(count))}, federation.number)
            check_finite(
                {str(client): tree for client, tree in (federation.states | federation.uploads).items()},
                federation.number,
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
def test_growing_by_zero_clients_changes_nothing(name: str, net: nn.Module) -> None:
    federation = GrowingFederation(ALL_METHODS[name], net).train_round().train_round()
    assert same(federation.method.grow_server(federation.server, federation.setup, before=3), federation.server)
    for state in federation.states.values():
        assert same(federation.method.grow_client(state, federation.setup), state)


@pytest.mark.slow
@EACH_METHOD
def test_grow_hooks_are_pure(name: str, net: nn.Module) -> None:
    federation = GrowingFederation(ALL_METHODS[name], net).train_round().train_round()
    trees = {"server": federation.server, "states": {str(client): state for client, state in federation.states.items()}}
    copies = {path: leaf.clone() for path, leaf in flatten(trees).items()}
    federation.grow(5)
    assert same(flatten(trees), copies)


@pytest.mark.slow
@EACH_METHOD
def test_newcomer_is_not_sent_initial_model(name: str, net: nn.Module) -> None:
    """All model parts in the message to a newcomer are those of the current round."""
    federation = GrowingFederation(ALL_METHODS[name], net).train_round().train_round().grow()
    message = take(federation.sent(3), 0)
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


@pytest.mark.parametrize("name", METHODS)
def test_catalog_contains_newcomer_start(name: str) -> None:
    entry = catalog()[name]
    assert entry.newcomer_start and "|" not in entry.newcomer_start
    line = next(line for line in as_markdown().splitlines() if f"| `{name}` |" in line)
    assert f"| {entry.newcomer_start} |" in line


# the initial state of a newcomer

FROM_MESSAGE = {  # method -> part of the state that starts at the received model
    "fedadmm": "own", "fedapm": "shared", "ditto": "own", "pfedme": "own", "fedphp": "own", "fedamp": "params",
    "fedala": "own", "fedcp": "head", "selffl": "params",
}  # fmt: skip
FROM_START = {  # method -> part of the state that starts at the initial model
    "fedper": "personal", "fedrep": "personal", "fedbabu": "personal", "lgfedavg": "personal", "fedalt": "personal",
    "fedsim": "personal", "fedapm": "personal", "fedapa": "head", "gpfl": "head", "local": "params", "lpproj": "own",
    "fedproto": "params", "fedfomo": "params", "fedlag": "params", "lag": "params",
}  # fmt: skip


@pytest.mark.parametrize("name", FROM_MESSAGE)
def test_newcomer_state_starts_at_received_model(name: str, net: nn.Module) -> None:
    federation = GrowingFederation(METHODS[name](), net).train_round().train_round().grow()
    own, message = federation.states[3][FROM_MESSAGE[name]], take(federation.sent(3), 0)
    assert (
        own and same(own, select_names(message["params"], own)) and not same(own, select_names(federation.start, own))
    )


@pytest.mark.parametrize("name", FROM_START)
def test_newcomer_state_that_is_not_sent_starts_at_initial_model(name: str, net: nn.Module) -> None:
    federation = GrowingFederation(METHODS[name](), net).train_round().train_round().grow()
    own = federation.states[3][FROM_START[name]]
    assert own and same(own, select_names(federation.start, own))


@pytest.mark.parametrize("name", ["fedas", "fedgh"])
def test_newcomer_model_combines_initial_model_and_message(name: str, net: nn.Module) -> None:
    federation = GrowingFederation(METHODS[name](), net).train_round().train_round().grow()
    assert same(federation.states[3]["params"], federation.start | take(federation.sent(3), 0)["params"])


@pytest.mark.parametrize(
    ("name", "key"),
    [("scaffold", "control"), ("fedadmm", "dual"), ("fedapm", "dual"), ("fedrod", "head"), ("dbe", "memory")],
)
def test_newcomer_accumulators_start_at_zero(name: str, key: str, net: nn.Module) -> None:
    own = {"own": GrowingFederation(METHODS[name](), net).train_round().train_round().grow().states[3][key]}
    assert all(not leaf.any() for leaf in flatten(own).values())


# individual methods


@pytest.mark.parametrize("name", ["fedapa", "fedapa, all shared", "fedapa, code"])
def test_fedapa_newcomer_receives_mean_body(name: str, net: nn.Module) -> None:
    federation = GrowingFederation(ALL_METHODS[name], net).train_round().train_round()
    expected = average(federation.uploaded(0, 1, 2))
    federation.grow(5)
    for client in (3, 4):
        assert same(take(federation.sent(client), 0)["params"], expected, tolerance=1e-12)
        assert same(take(federation.server["params"], client), expected, tolerance=1e-12)
        assert same(take(federation.models(client), 0), initial_head(federation) | expected, tolerance=1e-12)
        assert float(federation.server["weights"][client].sum()) == pytest.approx(1, abs=1e-12)
    assert not federation.server["weights"][:3, 3:].any()  # the others give no weight to the body of a newcomer


def test_fedapa_newcomer_receives_current_mean_body_later(net: nn.Module) -> None:
    federation = (
        GrowingFederation(m.FedAPA(), net).train_round().train_round().grow().train_round(0, 1, 2).train_round(1, 2)
    )
    assert same(take(federation.sent(3), 0)["params"], average(federation.uploaded(0, 1, 2)), tolerance=1e-12)


@pytest.mark.parametrize("method", [m.FedAPA(), m.FedAMP(), m.FedFomo(), m.FedPAC()], ids=lambda x: type(x).__name__)
def test_client_without_participation_is_not_in_mean(method: Method, net: nn.Module) -> None:
    federation = GrowingFederation(method, net).train_round(0, 2).train_round(0, 2).grow()
    rows = next(federation.server[kind] for kind in ("models", "heads", "params") if kind in federation.server)
    assert all(torch.equal(leaf[1], federation.start[name]) for name, leaf in rows.items())
    rows = federation.server["heads"] if isinstance(method, m.FedPAC) else rows
    expected = average([take(rows, 0), take(rows, 2)])
    assert same(take(rows, 3), expected, tolerance=1e-12)


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_fedamp_newcomer_receives_mean_model(name: str, net: nn.Module) -> None:
    federation = GrowingFederation(ALL_METHODS[name], net).train_round().train_round()
    expected = average(federation.uploaded(0, 1, 2))
    federation.grow()
    assert same(take(federation.sent(3), 0)["params"], expected, tolerance=1e-12)
    assert same(take(federation.models(3), 0), expected, tolerance=1e-12)
    for _ in range(2):
        assert torch.allclose(federation.server["weights"].sum(1), torch.ones(4).double(), rtol=0, atol=1e-12)
        federation.train_round()


def generate_model(network: Tree, embedding: Tensor) -> Tree:
    """Return the model that the hypernetwork of pFedHN generates, computed directly."""
    hidden = embedding
    for number in range(4):
        layer = network["trunk"][str(number)]
        hidden = layer["weight"] @ (hidden if number == 0 else hidden.clamp(min=0)) + layer["bias"]
    return {name: output["weight"] @ hidden + output["bias"] for name, output in network["outputs"].items()}


@pytest.mark.parametrize("name", ["pfedhn", "pfedhn, turns"])
def test_pfedhn_newcomer_receives_model_of_mean_embedding(name: str, net: nn.Module) -> None:
    federation = GrowingFederation(ALL_METHODS[name], net).train_round().train_round()
    old = federation.server["network"]
    expected = generate_model(old, old["embeddings"].mean(0))
    federation.grow()
    assert same(take(federation.sent(3), 0)["params"], expected, tolerance=1e-12)


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
def test_pfedla_newcomer_receives_equal_shares_of_all_models(name: str, net: nn.Module) -> None:
    federation = GrowingFederation(ALL_METHODS[name], net).train_round().train_round()
    expected = average(federation.uploaded(0, 1, 2))
    federation.grow()
    assert same(take(federation.sent(3), 0)["params"], expected, tolerance=1e-12)
    assert same(take(federation.server["models"], 3), expected, tolerance=1e-12)
    weights = federation.method._weights(federation.server["networks"], torch.arange(4))  # type: ignore[attr-defined]
    for rows in weights.values():
        assert torch.allclose(rows.sum(1), torch.ones(4).double()) and bool((rows[:3, 3] > 0).all())
        assert torch.allclose(rows[3], torch.full((4,), 0.25).double())


def test_pfedla_other_clients_receive_share_of_mean_model(net: nn.Module) -> None:
    federation = GrowingFederation(m.PFedLA(), net).train_round().train_round()
    mean, before = average(federation.uploaded(0, 1, 2)), federation.sent(0)
    federation.grow()
    after = federation.sent(0)
    share = federation.method._weights(federation.server["networks"], torch.arange(4))["fc"][0, 3]  # type: ignore[attr-defined]
    for name in ("fc.weight", "fc.bias"):
        moved = (1 - share) * before["params"][name][0] + share * mean[name]
        assert torch.allclose(after["params"][name][0], moved, rtol=0, atol=1e-12)


def mean_dual_gap(federation: GrowingFederation) -> Tree:
    """Return the mean of π_i + ρ (u_i − u) over all clients."""
    rho, shared = federation.method.rho, federation.server["params"]  # type: ignore[attr-defined]
    terms = [
        {name: state["dual"][name] + rho * (state["shared"][name] - shared[name]) for name in shared}
        for state in federation.states.values()
    ]
    return average(terms)


def test_fedapm_dual_identity_holds_with_newcomers(net: nn.Module) -> None:
    """A newcomer starts at the shared part with a zero dual variable, so the identity holds in all later rounds."""
    federation = GrowingFederation(m.FedAPM(), net).train_round().train_round(0, 2)
    shared = federation.server["params"]
    federation.grow()
    assert same(federation.server["params"], shared) and same(federation.states[3]["shared"], shared)
    zero = {name: torch.zeros_like(leaf) for name, leaf in shared.items()}
    for clients in ([], [0, 1], [1, 3], [0, 1, 2, 3]):
        federation = federation.train_round(*clients) if clients else federation
        assert same(mean_dual_gap(federation), zero, tolerance=1e-14)
    federation.grow(5).train_round(0, 4)
    assert same(mean_dual_gap(federation), zero, tolerance=1e-14)


def test_fedadmm_global_model_stays_mean_with_newcomers(net: nn.Module) -> None:
    """θ is the mean of w_i + y_i/ρ over all clients, including newcomers."""
    federation = GrowingFederation(m.FedADMM(), net).train_round().train_round(0, 2).grow()
    for clients in ([], [0, 1], [1, 3], [0, 1, 2, 3]):
        federation = federation.train_round(*clients) if clients else federation
        terms = [
            {name: state["own"][name] + state["dual"][name] / 0.01 for name in state["own"]}
            for state in federation.states.values()
        ]
        assert same(federation.server["params"], average(terms), tolerance=1e-11)


def test_scaffold_server_control_stays_mean_with_newcomers(net: nn.Module) -> None:
    federation = GrowingFederation(m.Scaffold(), net).train_round().train_round(0, 2).grow()
    for clients in ([], [1, 3], [0, 1, 2, 3]):
        federation = federation.train_round(*clients) if clients else federation
        controls = [state["control"] for state in federation.states.values()]
        assert len(controls) == 4 and same(federation.server["control"], average(controls), tolerance=1e-12)


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
    federation = GrowingFederation(ALL_METHODS["lag, scaffold"], net).train_round().train_round()
    old = federation.server["inner"]["control"]
    federation.grow()
    assert same(
        federation.server["inner"]["control"], {name: leaf * 3 / 4 for name, leaf in old.items()}, tolerance=1e-15
    )


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
    federation = (
        GrowingFederation(m.SelfFL(warmup=0, default_steps=2, max_steps=3), net)
        .train_round()
        .train_round()
        .train_round()
    )
    shared, between, known = federation.server["params"], federation.server["between"], federation.server["variances"]
    assert bool((known >= 0).all())
    federation.grow()
    message = take(federation.sent(3), 0)
    own = [1 / (between + variance) for variance in [*known, known.mean()]]
    assert torch.allclose(message["total_weight"], torch.stack(own).sum(), rtol=1e-12)
    assert same(message["params"], shared) and same(take(federation.models(3), 0), shared)
    assert federation.server["variances"].tolist() == [*known.tolist(), -1.0]


def test_selffl_with_clusters_rejects_newcomers(net: nn.Module) -> None:
    federation = GrowingFederation(m.SelfFL(clusters=(0, 0, 1)), net).train_round()
    assert "cannot take newcomers" in error_message(federation.grow)


def test_fedproto_newcomer_receives_global_prototypes(net: nn.Module) -> None:
    federation = GrowingFederation(m.FedProto(), net).train_round().train_round()
    federation.grow()
    message = take(federation.sent(3), 0)["prototypes"]
    for label in range(3):
        owners = [upload for upload in federation.uploads.values() if upload["prototypes"].present[label]]
        counts = [float(upload["counts"].values[label]) for upload in owners]
        if owners:
            mean = average([{"c": upload["prototypes"].values[label]} for upload in owners], counts)["c"]
            assert bool(message.present[label]) and torch.allclose(message.values[label], mean, rtol=0, atol=1e-12)
    assert same(select_names(take(federation.models(3), 0), federation.start), federation.start)


def test_fedpac_newcomer_receives_global_body_and_mean_head(net: nn.Module) -> None:
    federation = GrowingFederation(m.FedPAC(), net).train_round().train_round()
    heads = [take(federation.server["heads"], client) for client in range(3)]
    expected = federation.server["params"] | average(heads)
    assert same(take(federation.grow().sent(3), 0)["params"], expected, tolerance=1e-12)


def test_fedcac_newcomer_receives_global_model(net: nn.Module) -> None:
    federation = GrowingFederation(m.FedCAC(), net).train_round().train_round().grow()
    expected = average(federation.uploaded(0, 1, 2), SIZES[:3])
    assert same(take(federation.sent(3), 0)["params"], expected, tolerance=1e-12)


def test_dbe_newcomer_receives_consensus_once(net: nn.Module) -> None:
    federation = GrowingFederation(m.DBE(), net).train_round().train_round().grow()
    consensus = federation.server["consensus"]
    assert federation.sent(0, 1, 2, 3)["consensus"].present[:, 0].tolist() == [False, False, False, True]
    federation.train_round()
    assert torch.equal(federation.states[3]["consensus"], consensus)
    assert not federation.sent(0, 1, 2, 3)["consensus"].present.any()


def test_fedfomo_newcomer_model_is_mean_until_uploaded(net: nn.Module) -> None:
    federation = GrowingFederation(m.FedFomo(), net).train_round().train_round()
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
    federation = GrowingFederation(m.APPLE(), net).train_round().train_round()
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
    expected = federation.server["wanted"]
    federation.grow(5)
    assert torch.equal(federation.server["wanted"][:3, :3], expected) and not federation.server["wanted"][:3, 3:].any()
    assert (
        federation.server["wanted"].sum(1).tolist() == [limit] * 5 and not federation.server["wanted"].diagonal().any()
    )


def test_apple_with_limit_replaces_unseen_cores_by_mean(net: nn.Module) -> None:
    federation = GrowingFederation(m.APPLE(limit=1), net).train_round().train_round().grow()
    state, seen = federation.states[0], federation.states[0]["seen"].nonzero()[:, 0].tolist()
    assert seen and 3 not in seen
    cores = [take(state["cache"], client) for client in seen]
    assert same(take(state["cache"], 3), average(cores, [SIZES[client] for client in seen]), tolerance=1e-12)
    requested = int(federation.server["wanted"][3].nonzero())
    assert same(take(federation.models(3), 0), federation.uploads[requested]["params"], tolerance=1e-12)
