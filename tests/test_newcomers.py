"""Clients that join late: there is room for them, nobody else notices, and they get what their method says."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import refusal, same, tiny_federation
from fedtailor import methods as m
from fedtailor.batch import Common
from fedtailor.catalogue import as_markdown, catalogue
from fedtailor.engines.sequential import Sequential
from fedtailor.faults import check_finite
from fedtailor.method import Exchange, Method, Setup
from fedtailor.methods import METHODS
from fedtailor.samples import Samples
from fedtailor.trees import Rows, Tree, flatten, grown, stack, take
from fedtailor.wire import deliver

SIZES = (6, 3, 5, 4, 2)  # of the three who begin, and of those who join
FED = tiny_federation(SIZES)
ROUNDS = 6
VARIANTS: dict[str, Method] = {
    "fedapa, all shared": m.FedAPA(share="all"),
    "fedapa, code": m.FedAPA(variant="code"),
    "heurfedamp": m.FedAMP(attention="cosine"),
    "apple, one core": m.APPLE(limit=1),
    "apple, two cores": m.APPLE(limit=2),
    "heurpfedla": m.PFedLA(retained=1),
    "pfedla, softmax": m.PFedLA(normalize="softmax"),
    "pfedhn-pc": m.PFedHN(local_head=True),
    "pfedhn, turns": m.PFedHN(turns=True),
    "gpfl, own contexts": m.GPFL(contexts="own"),
    "fedfomo, one model": m.FedFomo(models=1),
    "fedadmm, code": m.FedADMM(variant="code"),
    "selffl, augmented": m.SelfFL(augmented=True, minimum_steps=3),
    "lag, scaffold": m.LAG(m.Scaffold(), layers="last"),
    "lag, ditto": m.LAG(m.Ditto(), layers="last"),
}
EVERY = {name: kind() for name, kind in METHODS.items()} | VARIANTS
EACH = pytest.mark.parametrize("name", [*METHODS, *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS)])
COUNTS_EVERYONE = {  # parts of a message that depend on how many clients there are, by the method's formula
    "scaffold": "control", "lag, scaffold": "control", "selffl": "total_weight", "selffl, augmented": "total_weight",
    "apple": "cores", "apple, one core": "cores", "apple, two cores": "cores", "fedfomo": "models",
    "fedfomo, one model": "models", "pfedla": "params", "pfedla, softmax": "params", "heurpfedla": "params",
}  # fmt: skip
SUMS = {  # of more terms, which are 0, may round otherwise
    "fedapa", "fedapa, all shared", "fedapa, code", "fedamp", "heurfedamp", "fedcac", "pfedhn", "pfedhn-pc",
    "pfedhn, turns",
}  # fmt: skip


class Party:
    """A federation driven by hand that clients may join: everyone's state, the server, what was last uploaded."""

    def __init__(self, method: Method, net: nn.Module, count: int = 3) -> None:
        self.method, self.model, self.count, self.number = method, ft.wrap(net), count, 1  # of the next round
        self.start = self.model.init(0)
        self.server = method.init_server(self.setup)
        self.states = {client: method.init_client(self.setup) for client in range(count)}
        self.uploads: dict[int, Tree] = {}

    @property
    def setup(self) -> Setup:
        return Setup(self.model, self.start, self.count, torch.tensor(SIZES[: self.count]), ROUNDS, seed=0)

    @property
    def engine(self) -> Sequential:
        common = Common(
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
        return Sequential(common, Samples(FED.train, torch.device("cpu")))

    def sent(self, *clients: int) -> Tree:
        return deliver(self.method.send(self.server, clients, self.number))

    @torch.no_grad()
    def play(self, *clients: int) -> "Party":
        """A round of these clients, or of everyone."""
        everyone = clients or tuple(range(self.count))
        for cohort in [[client] for client in everyone] if self.method.one_by_one else [list(everyone)]:
            self._take(cohort)
        self.number += 1
        return self

    def _take(self, clients: list[int]) -> None:
        def work(local: ft.LocalView, state: Tree, message: Tree) -> Tree:
            kept, upload = self.method.train(local, state, message)
            return {"state": kept, "upload": upload}

        sent = self.sent(*clients)
        result = self.engine.apply(work, self.number, clients, stack([self.states[c] for c in clients]), sent)
        sizes, received = torch.tensor([SIZES[client] for client in clients]), deliver(result["upload"])
        exchange = Exchange(self.number, clients, self.count, sizes, self.model, sent, received)
        self.server = self.method.receive(self.server, exchange)
        for position, client in enumerate(clients):
            self.states[client] = take(result["state"], position)
            self.uploads[client] = take(received, position)

    @torch.no_grad()
    def grow(self, count: int = 4) -> "Party":
        """Clients join until there are so many."""
        before, self.count = self.count, count
        self.server = self.method.welcome(self.server, self.setup, before)
        self.states = {client: self.method.widen(state, self.setup) for client, state in self.states.items()}
        for client in range(before, count):
            self.states[client] = self.method.join(self.setup, take(self.sent(client), 0))
        return self

    @torch.no_grad()
    def models(self, *clients: int) -> Tree:
        """Everyone's own model if a round began now."""
        sent = deliver(self.method.serve(self.server, clients, self.number))
        states = stack([self.states[client] for client in clients])
        return self.engine.apply(self.method.personalize, self.number, clients, states, sent)

    def uploaded(self, *clients: int, part: str = "params") -> list[dict[str, Tensor]]:
        return [self.uploads[client][part] for client in clients]


def average(trees: Sequence[dict[str, Tensor]], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """A mean written out."""
    shares = weights or [1.0] * len(trees)
    return {
        name: sum((share * tree[name] for share, tree in zip(shares, trees, strict=True)), torch.zeros(()))
        / sum(shares)
        for name in trees[0]
    }


def kinds(tree: Tree) -> dict[str, Any]:
    return {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(tree).items()}


def part(tree: Tree, names: Any) -> Tree:
    return {name: tree[name] for name in names}


def body_of(party: Party) -> Tree:
    return party.model.split(party.start)[0]


def head_of(party: Party) -> Tree:
    return party.model.split(party.start)[1]


def with_statistics() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(fc=nn.Linear(4, 5), norm=nn.BatchNorm1d(5), head=nn.Linear(5, 3))).double()


# grown


def test_what_grew_keeps_its_corner_and_is_fresh_beyond() -> None:
    old = {"a": {"m": torch.tensor([[1, 2], [3, 4]])}, "n": torch.tensor(5.0)}
    fresh = {"n": torch.tensor(0.0), "a": {"m": torch.arange(9).reshape(3, 3) * 10}}
    found = grown(old, fresh)
    assert found["a"]["m"].tolist() == [[1, 2, 20], [3, 4, 50], [60, 70, 80]]
    assert found["n"] is old["n"] and list(found) == ["a", "n"]


def test_growing_touches_neither_tree_and_makes_room_in_what_is_repeated() -> None:
    old, row = torch.tensor([[1.0, 2.0]]), torch.tensor([7.0, 8.0])
    found = grown({"a": old}, {"a": row.expand(3, 2)})["a"]
    assert found.tolist() == [[1.0, 2.0], [7.0, 8.0], [7.0, 8.0]]
    found += 1
    assert old.tolist() == [[1.0, 2.0]] and row.tolist() == [7.0, 8.0]


def test_bits_stay_as_they_are() -> None:
    old = torch.tensor([0.1, -0.0, float("nan"), 5e-324], dtype=torch.float64)
    found = grown({"a": old}, {"a": torch.zeros(6, dtype=torch.float64)})["a"]
    assert torch.equal(found[:4].view(torch.int64), old.view(torch.int64))


def test_tables_with_absent_rows_grow_too() -> None:
    old = Rows(torch.tensor([[1.0]]), torch.tensor([True]))
    found = grown({"r": old}, {"r": Rows(torch.zeros(2, 1), torch.tensor([False, False]))})["r"]
    assert found.values.tolist() == [[1.0], [0.0]] and found.present.tolist() == [True, False]


ONE = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("old", "fresh", "named"),
    [
        pytest.param({"a": ONE}, {"a": torch.ones(3, 1)}, "'a' is (2, 2)", id="shrank"),
        pytest.param({"a": ONE}, {"a": torch.ones(2, 2, 1)}, "'a' is (2, 2)", id="another axis"),
        pytest.param({"t": {"a": ONE}}, {"t": {"b": ONE}}, "'t/a'", id="another name"),
        pytest.param({"a": ONE, "b": ONE}, {"a": ONE}, "'b'", id="a name less"),
        pytest.param({"a": ONE}, {"a": ONE, "b": ONE}, "'b'", id="a name more"),
        pytest.param({"t": {"a": ONE}}, {"t": {"a": ONE.double()}}, "'t/a'", id="another dtype"),
        pytest.param({"a": ONE}, {"a": {"b": ONE}}, "'a'", id="a tree for a tensor"),
        pytest.param({"a": ONE}, {"a": Rows(ONE, ONE[0] > 0)}, "'a'", id="rows for a tensor"),
    ],
)
def test_what_did_not_only_grow_is_refused(old: Tree, fresh: Tree, named: str) -> None:
    assert named in refusal(lambda: grown(old, fresh))


# every method


@EACH
@pytest.mark.parametrize(
    "statistics", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "batch normalisation"]
)
def test_a_fourth_and_a_fifth_client_may_join(name: str, statistics: bool, net: nn.Module) -> None:
    """Names, shapes and dtypes of all states are those of a federation of that size; rounds go on with everyone."""
    party = Party(EVERY[name], with_statistics() if statistics else net).play().play()
    for count in (4, 5):
        party.grow(count)
        for _ in range(2):  # as welcomed, and after a round with everyone
            assert kinds(party.server) == kinds(party.method.init_server(party.setup))
            wanted = kinds(party.method.init_client(party.setup))
            assert all(kinds(state) == wanted for state in party.states.values())
            check_finite({"server": party.server, "models": party.models(*range(count))}, party.number)
            check_finite({str(client): tree for client, tree in (party.states | party.uploads).items()}, party.number)
            party.play()
    variances = [leaf for path, leaf in flatten(party.models(3, 4)).items() if path.endswith("running_var")]
    assert all(float(leaf.min()) >= 0 for leaf in variances)


@EACH
def test_those_who_were_there_do_not_notice(name: str, net: nn.Module) -> None:
    """What they are sent, what they keep and what they use stay to the last bit, where no formula counts everyone."""
    party, some = Party(EVERY[name], net).play().play(0, 1), (0, 1, 2)
    sent, states, models = party.sent(*some), party.states, party.models(*some)
    party.grow(5)
    counted, tolerance = COUNTS_EVERYONE.get(name, ""), 1e-14 if name in SUMS else 0.0
    stays = [key for key in sent if key != counted]
    assert same(part(party.sent(*some), stays), part(sent, stays), tolerance)
    if counted not in ("cores", "models", "params"):
        assert same(party.models(*some), models, tolerance)
    if counted != "cores":
        assert all(same(party.states[client], states[client]) for client in some)


@pytest.mark.slow
@EACH
def test_nobody_joining_changes_nothing(name: str, net: nn.Module) -> None:
    party = Party(EVERY[name], net).play().play()
    assert same(party.method.welcome(party.server, party.setup, before=3), party.server)
    for state in party.states.values():
        assert same(party.method.widen(state, party.setup), state)


@pytest.mark.slow
@EACH
def test_welcoming_is_pure(name: str, net: nn.Module) -> None:
    party = Party(EVERY[name], net).play().play()
    held = {"server": party.server, "states": {str(client): state for client, state in party.states.items()}}
    copies = {path: leaf.clone() for path, leaf in flatten(held).items()}
    party.grow(5)
    assert same(flatten(held), copies)


@pytest.mark.slow
@EACH
def test_a_newcomer_is_not_sent_the_model_of_round_one(name: str, net: nn.Module) -> None:
    """Where the others are by now is where it begins, in all that is sent of a model."""
    party = Party(EVERY[name], net).play().play().grow()
    message = take(party.sent(3), 0)
    for node in (message.get("params", {}), message.get("models", {}), message.get("cores", {})):
        for parameter, leaf in node.items():
            values = leaf.values[leaf.present] if isinstance(leaf, Rows) else leaf
            assert values.numel() == 0 or not torch.equal(values, party.start[parameter].expand_as(values))


@pytest.mark.slow
@EACH
def test_joining_before_anyone_trained_is_being_there_from_the_start(name: str, net: nn.Module) -> None:
    """Everyone is sent what a federation of four is sent in round 1, but where a few numbers stand for a client."""
    if name.startswith(("pfedhn", "pfedla", "heurpfedla", "apple, ", "fedfomo")):
        return  # a newcomer's numbers are the mean, not drawn; who gets whose core or model is drawn
    late, early = Party(EVERY[name], net).grow(), Party(EVERY[name], net, count=4)
    assert same(late.sent(0, 1, 2, 3), early.sent(0, 1, 2, 3), tolerance=1e-14)
    assert same(late.models(0, 1, 2, 3), early.models(0, 1, 2, 3), tolerance=1e-14)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_what_a_newcomer_gets(name: str) -> None:
    entry = catalogue()[name]
    assert entry.newcomer and "|" not in entry.newcomer
    line = next(line for line in as_markdown().splitlines() if line.startswith((f"| {name} |", f"| [{name}]")))
    assert f"| {entry.newcomer} |" in line


# what stays with a newcomer

RECEIVED = {  # method -> what of its state begins at the model it is sent
    "fedadmm": "own", "fedapm": "shared", "ditto": "own", "pfedme": "own", "fedphp": "own", "fedamp": "params",
    "fedala": "own", "fedcp": "head", "selffl": "params",
}  # fmt: skip
STARTS = {  # method -> what of its state is as everyone's before round 1
    "fedper": "personal", "fedrep": "personal", "fedbabu": "personal", "lgfedavg": "personal", "fedalt": "personal",
    "fedsim": "personal", "fedapm": "personal", "fedapa": "head", "gpfl": "head", "local": "params", "lpproj": "own",
    "fedproto": "params", "fedfomo": "params", "fedlag": "params", "lag": "params",
}  # fmt: skip


@pytest.mark.parametrize("name", RECEIVED)
def test_its_own_model_begins_at_the_one_received(name: str, net: nn.Module) -> None:
    party = Party(METHODS[name](), net).play().play().grow()
    own, message = party.states[3][RECEIVED[name]], take(party.sent(3), 0)
    assert own and same(own, part(message["params"], own)) and not same(own, part(party.start, own))


@pytest.mark.parametrize("name", STARTS)
def test_what_never_crosses_begins_at_the_start(name: str, net: nn.Module) -> None:
    party = Party(METHODS[name](), net).play().play().grow()
    own = party.states[3][STARTS[name]]
    assert own and same(own, part(party.start, own))


@pytest.mark.parametrize("name", ["fedas", "fedgh"])
def test_its_own_model_is_the_start_with_what_it_received(name: str, net: nn.Module) -> None:
    party = Party(METHODS[name](), net).play().play().grow()
    assert same(party.states[3]["params"], party.start | take(party.sent(3), 0)["params"])


@pytest.mark.parametrize(
    ("name", "what"),
    [("scaffold", "control"), ("fedadmm", "dual"), ("fedapm", "dual"), ("fedrod", "head"), ("dbe", "memory")],
)
def test_what_counts_from_nothing_begins_at_nothing(name: str, what: str, net: nn.Module) -> None:
    own = {"own": Party(METHODS[name](), net).play().play().grow().states[3][what]}
    assert all(not leaf.any() for leaf in flatten(own).values())


# method by method, by hand


@pytest.mark.parametrize("name", ["fedapa", "fedapa, all shared", "fedapa, code"])
def test_fedapa_a_newcomer_starts_from_the_mean_body(name: str, net: nn.Module) -> None:
    party = Party(EVERY[name], net).play().play()
    wanted = average(party.uploaded(0, 1, 2))
    party.grow(5)
    for client in (3, 4):
        assert same(take(party.sent(client), 0)["params"], wanted, tolerance=1e-12)
        assert same(take(party.server["params"], client), wanted, tolerance=1e-12)
        assert same(take(party.models(client), 0), head_of(party) | wanted, tolerance=1e-12)
        assert float(party.server["weights"][client].sum()) == pytest.approx(1, abs=1e-12)
    assert not party.server["weights"][:3, 3:].any()  # the others do not mix a body that nobody trained


def test_fedapa_a_newcomer_that_comes_later_gets_the_mean_of_then(net: nn.Module) -> None:
    party = Party(m.FedAPA(), net).play().play().grow().play(0, 1, 2).play(1, 2)
    assert same(take(party.sent(3), 0)["params"], average(party.uploaded(0, 1, 2)), tolerance=1e-12)


@pytest.mark.parametrize("method", [m.FedAPA(), m.FedAMP(), m.FedFomo(), m.FedPAC()], ids=lambda x: type(x).__name__)
def test_who_never_took_part_is_not_in_the_mean(method: Method, net: nn.Module) -> None:
    party = Party(method, net).play(0, 2).play(0, 2).grow()
    rows = next(party.server[kind] for kind in ("models", "heads", "params") if kind in party.server)
    assert all(torch.equal(leaf[1], party.start[name]) for name, leaf in rows.items())
    rows = party.server["heads"] if isinstance(method, m.FedPAC) else rows
    wanted = average([take(rows, 0), take(rows, 2)])
    assert same(take(rows, 3), wanted, tolerance=1e-12)


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_fedamp_a_newcomer_gets_the_mean_model(name: str, net: nn.Module) -> None:
    party = Party(EVERY[name], net).play().play()
    wanted = average(party.uploaded(0, 1, 2))
    party.grow()
    assert same(take(party.sent(3), 0)["params"], wanted, tolerance=1e-12)
    assert same(take(party.models(3), 0), wanted, tolerance=1e-12)
    for _ in range(2):
        assert torch.allclose(party.server["weights"].sum(1), torch.ones(4).double(), rtol=0, atol=1e-12)
        party.play()


def generated(network: Tree, embedding: Tensor) -> Tree:
    """pFedHN's network, written out."""
    hidden = embedding
    for number in range(4):
        layer = network["trunk"][str(number)]
        hidden = layer["weight"] @ (hidden if number == 0 else hidden.clamp(min=0)) + layer["bias"]
    return {name: output["weight"] @ hidden + output["bias"] for name, output in network["outputs"].items()}


@pytest.mark.parametrize("name", ["pfedhn", "pfedhn, turns"])
def test_pfedhn_a_newcomer_gets_the_model_of_the_mean_embedding(name: str, net: nn.Module) -> None:
    party = Party(EVERY[name], net).play().play()
    old = party.server["network"]
    wanted = generated(old, old["embeddings"].mean(0))
    party.grow()
    assert same(take(party.sent(3), 0)["params"], wanted, tolerance=1e-12)


def test_pfedhn_embeddings_widen_without_changing_a_model_and_then_learn(net: nn.Module) -> None:
    """⌊1 + N/4⌋ numbers: one of three clients, two of four."""
    party = Party(m.PFedHN(), net).play()
    assert party.server["network"]["embeddings"].shape == (3, 1)
    party.grow()
    assert party.server["network"]["embeddings"].shape == (4, 2)
    assert not party.server["network"]["embeddings"][:, 1].any()
    party.play()
    assert party.server["network"]["embeddings"][:, 1].all()


@pytest.mark.parametrize("name", ["pfedla", "pfedla, softmax"])
def test_pfedla_a_newcomer_gets_equal_shares_of_all_models_and_is_heard(name: str, net: nn.Module) -> None:
    party = Party(EVERY[name], net).play().play()
    wanted = average(party.uploaded(0, 1, 2))
    party.grow()
    assert same(take(party.sent(3), 0)["params"], wanted, tolerance=1e-12)
    assert same(take(party.server["models"], 3), wanted, tolerance=1e-12)
    weights = party.method._weights(party.server["networks"], torch.arange(4))  # type: ignore[attr-defined]
    for rows in weights.values():
        assert torch.allclose(rows.sum(1), torch.ones(4).double()) and bool((rows[:3, 3] > 0).all())
        assert torch.allclose(rows[3], torch.full((4,), 0.25).double())


def test_pfedla_the_others_move_towards_the_mean_by_the_newcomers_share(net: nn.Module) -> None:
    party = Party(m.PFedLA(), net).play().play()
    mean, before = average(party.uploaded(0, 1, 2)), party.sent(0)
    party.grow()
    after = party.sent(0)
    share = party.method._weights(party.server["networks"], torch.arange(4))["fc"][0, 3]  # type: ignore[attr-defined]
    for name in ("fc.weight", "fc.bias"):
        moved = (1 - share) * before["params"][name][0] + share * mean[name]
        assert torch.allclose(after["params"][name][0], moved, rtol=0, atol=1e-12)


def dual_gap(party: Party) -> Tree:
    """Σ_i [π_i + ρ (u_i − u)] over all clients."""
    rho, shared = party.method.rho, party.server["params"]  # type: ignore[attr-defined]
    terms = [
        {name: state["dual"][name] + rho * (state["shared"][name] - shared[name]) for name in shared}
        for state in party.states.values()
    ]
    return average(terms)


def test_fedapm_the_sum_of_duals_stays_with_newcomers(net: nn.Module) -> None:
    """At the consensus with a dual of 0, a newcomer adds nothing to it; whoever takes part next, and when."""
    party = Party(m.FedAPM(), net).play().play(0, 2)
    shared = party.server["params"]
    party.grow()
    assert same(party.server["params"], shared) and same(party.states[3]["shared"], shared)
    nothing = {name: torch.zeros_like(leaf) for name, leaf in shared.items()}
    for clients in ([], [0, 1], [1, 3], [0, 1, 2, 3]):
        party = party.play(*clients) if clients else party
        assert same(dual_gap(party), nothing, tolerance=1e-14)
    party.grow(5).play(0, 4)
    assert same(dual_gap(party), nothing, tolerance=1e-14)


def test_fedadmm_the_common_model_stays_the_mean_with_newcomers(net: nn.Module) -> None:
    """θ is the mean of w_i + y_i/ρ of all clients, of those that joined too."""
    party = Party(m.FedADMM(), net).play().play(0, 2).grow()
    for clients in ([], [0, 1], [1, 3], [0, 1, 2, 3]):
        party = party.play(*clients) if clients else party
        places = [
            {name: state["own"][name] + state["dual"][name] / 0.01 for name in state["own"]}
            for state in party.states.values()
        ]
        assert same(party.server["params"], average(places), tolerance=1e-11)


def test_scaffold_the_common_control_stays_the_mean(net: nn.Module) -> None:
    party = Party(m.Scaffold(), net).play().play(0, 2).grow()
    for clients in ([], [1, 3], [0, 1, 2, 3]):
        party = party.play(*clients) if clients else party
        controls = [state["control"] for state in party.states.values()]
        assert len(controls) == 4 and same(party.server["control"], average(controls), tolerance=1e-12)


def test_fedlag_a_newcomer_gets_global_layers_and_starts_the_others_where_the_server_thinks(net: nn.Module) -> None:
    party = Party(m.FedLAG(layers="last", personal_layers=1), net).play().play()
    wanted = {name: leaf for name, leaf in average(party.uploaded(0, 1, 2)).items() if name.startswith("fc")}
    party.grow()
    message = take(party.sent(3), 0)
    assert same(message["params"], wanted, tolerance=1e-12)
    assert same(take(party.models(3), 0), head_of(party) | message["params"])
    assert same(take(party.server["models"], 3), party.start)
    assert same(part(party.states[3]["params"], head_of(party)), head_of(party))


def test_lag_asks_the_method_inside(net: nn.Module) -> None:
    party = Party(EVERY["lag, scaffold"], net).play().play()
    old = party.server["inner"]["control"]
    party.grow()
    assert same(party.server["inner"]["control"], {name: leaf * 3 / 4 for name, leaf in old.items()}, tolerance=1e-15)


@dataclass(frozen=True)
class Guestbook(m.FedAvg):
    """FedAvg whose clients keep how many they are, and how many they were when they came."""

    def init_client(self, setup: Setup) -> Tree:
        return {"now": torch.tensor(setup.num_clients), "then": torch.tensor(setup.num_clients)}

    def widen(self, state: Tree, setup: Setup) -> Tree:
        return state | {"now": torch.tensor(setup.num_clients)}


def test_lag_lets_the_method_inside_widen_what_it_keeps(net: nn.Module) -> None:
    states = Party(m.LAG(Guestbook()), net).play().grow().play().grow(5).states
    found = [(int(state["inner"]["now"]), int(state["inner"]["then"])) for state in states.values()]
    assert found == [(5, 3), (5, 3), (5, 3), (5, 4), (5, 5)]


def test_selffl_a_newcomer_counts_as_the_usual_client(net: nn.Module) -> None:
    party = Party(m.SelfFL(warmup=0, default_steps=2, max_steps=3), net).play().play().play()
    common, between, known = party.server["params"], party.server["between"], party.server["variances"]
    assert bool((known >= 0).all())
    party.grow()
    message = take(party.sent(3), 0)
    own = [1 / (between + variance) for variance in [*known, known.mean()]]
    assert torch.allclose(message["total_weight"], torch.stack(own).sum(), rtol=1e-12)
    assert same(message["params"], common) and same(take(party.models(3), 0), common)
    assert party.server["variances"].tolist() == [*known.tolist(), -1.0]


def test_selffl_with_clusters_says_that_it_cannot_take_newcomers(net: nn.Module) -> None:
    party = Party(m.SelfFL(clusters=(0, 0, 1)), net).play()
    assert "cannot take newcomers" in refusal(party.grow)


def test_fedproto_a_newcomer_gets_the_common_prototypes(net: nn.Module) -> None:
    party = Party(m.FedProto(), net).play().play()
    party.grow()
    message = take(party.sent(3), 0)["prototypes"]
    for label in range(3):
        owners = [upload for upload in party.uploads.values() if upload["prototypes"].present[label]]
        counts = [float(upload["counts"].values[label]) for upload in owners]
        if owners:
            mean = average([{"c": upload["prototypes"].values[label]} for upload in owners], counts)["c"]
            assert bool(message.present[label]) and torch.allclose(message.values[label], mean, rtol=0, atol=1e-12)
    assert same(part(take(party.models(3), 0), party.start), party.start)


def test_fedpac_a_newcomer_gets_the_common_body_and_the_mean_head(net: nn.Module) -> None:
    party = Party(m.FedPAC(), net).play().play()
    heads = [take(party.server["heads"], client) for client in range(3)]
    wanted = party.server["params"] | average(heads)
    assert same(take(party.grow().sent(3), 0)["params"], wanted, tolerance=1e-12)


def test_fedcac_a_newcomer_gets_the_common_model(net: nn.Module) -> None:
    party = Party(m.FedCAC(), net).play().play().grow()
    wanted = average(party.uploaded(0, 1, 2), SIZES[:3])
    assert same(take(party.sent(3), 0)["params"], wanted, tolerance=1e-12)


def test_dbe_a_newcomer_is_told_the_consensus_once(net: nn.Module) -> None:
    party = Party(m.DBE(), net).play().play().grow()
    consensus = party.server["consensus"]
    assert party.sent(0, 1, 2, 3)["consensus"].present[:, 0].tolist() == [False, False, False, True]
    party.play()
    assert torch.equal(party.states[3]["consensus"], consensus)
    assert not party.sent(0, 1, 2, 3)["consensus"].present.any()


def test_fedfomo_a_newcomer_is_sent_models_of_others_and_they_the_mean_for_its_own(net: nn.Module) -> None:
    party = Party(m.FedFomo(), net).play().play()
    models = party.uploaded(0, 1, 2)
    party.grow()
    sent = take(party.sent(3), 0)["models"]
    for own in models:  # in any order
        assert any(same(take(sent, place), own) for place in range(3))
    wanted = average(models)
    there = take(party.sent(0), 0)["models"]
    assert any(same(take(there, place), wanted, tolerance=1e-12) for place in range(3))


def test_apple_everyones_model_stays_and_the_newcomers_is_the_mean_by_samples(net: nn.Module) -> None:
    """p_0 is n_j / n of all clients there are; it mixes the same model, for the newcomer's core is the old mixture."""
    party = Party(m.APPLE(), net).play().play()
    wanted, before = average(party.uploaded(0, 1, 2), SIZES[:3]), party.models(0, 1, 2)
    changes = {client: state["change"] for client, state in party.states.items()}
    for count in (4, 5):
        party.grow(count)
        assert same(party.models(0, 1, 2), before, tolerance=1e-12)
        for newcomer in range(3, count):
            assert same(take(party.server["cores"], newcomer), wanted, tolerance=1e-12)
            assert same(party.states[newcomer]["core"], wanted, tolerance=1e-12)
            assert same(take(party.models(newcomer), 0), wanted, tolerance=1e-12)
    shares = torch.tensor(SIZES).double() / sum(SIZES)
    assert all(torch.allclose(state["shares"], shares, rtol=0, atol=1e-15) for state in party.states.values())
    for client, change in changes.items():
        assert party.states[client]["change"].tolist() == [*change.tolist(), 0.0, 0.0]


@pytest.mark.parametrize("limit", [1, 2])
def test_apple_with_a_limit_nobody_is_sent_more_cores_than_it_asked_for(limit: int, net: nn.Module) -> None:
    party = Party(m.APPLE(limit=limit), net).play().play()
    wanted = party.server["wanted"]
    party.grow(5)
    assert torch.equal(party.server["wanted"][:3, :3], wanted) and not party.server["wanted"][:3, 3:].any()
    assert party.server["wanted"].sum(1).tolist() == [limit] * 5 and not party.server["wanted"].diagonal().any()


def test_apple_with_a_limit_takes_unseen_cores_for_the_mean_of_those_it_has(net: nn.Module) -> None:
    party = Party(m.APPLE(limit=1), net).play().play().grow()
    state, seen = party.states[0], party.states[0]["seen"].nonzero()[:, 0].tolist()
    assert seen and 3 not in seen
    cores = [take(state["cache"], client) for client in seen]
    assert same(take(state["cache"], 3), average(cores, [SIZES[client] for client in seen]), tolerance=1e-12)
    asked = int(party.server["wanted"][3].nonzero())
    assert same(take(party.models(3), 0), party.uploads[asked]["params"], tolerance=1e-12)
