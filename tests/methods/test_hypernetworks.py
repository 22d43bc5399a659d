"""pFedLA and pFedHN compared with versions that use modules and optimizers of PyTorch.

The tests also check cases in which the methods equal local training or do not change, and the sign of the gradient, in
which public implementations differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import same
from fedtailor.core.method import Exchange
from fedtailor.core.trees import Rows, Tree, flatten
from fedtailor.methods import Local, PFedHN, PFedLA
from fedtailor.training.channel.payload import mask_absent_rows
from fedtailor.training.simulated_clients import SimulatedClients
from fedtailor.training.trainer import Trainer
from support.problem import PARTIAL, Problem, Weights, make_normalized_net, make_problem

PROBLEM = make_problem()
SCHEDULE = [[0, 1, 2, 3, 4], [1, 3, 4], [0, 2, 3]]
LAYERS = ("fc1", "fc2", "head")
SMALL = {"hidden": 6, "embedding": 4}


def make_simulation(method: ft.Method, schedule: Any = SCHEDULE, seed: int = 0) -> Trainer[SimulatedClients]:
    return replace(PROBLEM, seed=seed).trainer(method, schedule)


def exchanges(method: ft.Method, schedule: Any = SCHEDULE) -> list[tuple[Tree, Tree, Exchange]]:
    """Return the server state before and after each round, and the exchange."""
    recorded: list[tuple[Tree, Tree, Exchange]] = []

    @dataclass(frozen=True)
    class Recording(type(method)):  # type: ignore[misc]
        def receive(self, server: Tree, exchange: Exchange) -> Tree:
            after: Tree = super().receive(server, exchange)
            recorded.append((server, after, exchange))
            return after

    simulated = make_simulation(
        Recording(**{f.name: getattr(method, f.name) for f in fields(method)}), schedule=schedule
    )
    for number, clients in enumerate(schedule, start=1):
        simulated.train_round(number, clients)
    return recorded


def linear(values: Tree) -> nn.Linear:
    """Create a linear layer of PyTorch with these values."""
    outputs, inputs = values["weight"].shape
    layer = nn.Linear(inputs, outputs, dtype=torch.float64)
    layer.load_state_dict(values)
    return layer


def make_trunk(values: Tree, end: Sequence[nn.Module] = ()) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number in range(len(values)):
        layers += [*([nn.ReLU()] if number else []), linear(values[str(number)])]
    return nn.Sequential(*layers, *end)


def torch_sgd(
    problem: Problem, weights: Weights, batches: Sequence[Tensor], clipped_names: Sequence[str], m: PFedHN
) -> Weights:
    """Run torch.optim.SGD on these batches, with gradient clipping for the given names."""
    live: Weights = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    optimizer = torch.optim.SGD(live.values(), lr=m.lr, momentum=m.momentum, weight_decay=m.weight_decay)
    for batch in batches:
        optimizer.zero_grad()
        problem.loss(live, batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([live[name] for name in clipped_names], m.clip)
        optimizer.step()
    return {name: weight.detach() for name, weight in live.items()}


# pFedHN


class Hypernetwork(nn.Module):
    """An embedding, a trunk, and one linear layer per tensor of the model."""

    def __init__(self, network: Tree) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*network["embeddings"].shape, _weight=network["embeddings"].clone())  # type: ignore[misc]
        self.trunk = make_trunk(network["trunk"])
        self.shapes = {name: output["bias"].shape for name, output in network["outputs"].items()}
        flat = {
            n: {"weight": o["weight"].flatten(0, -2), "bias": o["bias"].flatten()}
            for n, o in network["outputs"].items()
        }
        self.outputs = nn.ModuleList([linear(output) for output in flat.values()])

    def forward(self, client: int) -> Weights:
        hidden = self.trunk(self.embedding(torch.tensor(client)))
        return {
            name: out(hidden).view(shape) for out, (name, shape) in zip(self.outputs, self.shapes.items(), strict=True)
        }


def literal_pfedhn(
    problem: Problem, m: PFedHN, start: Tree, schedule: Sequence[Sequence[int]]
) -> tuple[list[Weights], list[Weights]]:
    """Return the final models of all clients, as received and as last trained."""
    network = Hypernetwork(start["network"])
    optimizer = torch.optim.SGD(
        network.parameters(), lr=m.hyper_lr, momentum=m.hyper_momentum, weight_decay=m.hyper_weight_decay
    )
    heads = [{n: w for n, w in problem.start.items() if m.local_head and n.startswith("head.")} for _ in problem.sizes]
    trained = [{**network(i), **heads[i]} for i in range(problem.num_clients)]
    for t, cohort in enumerate(schedule, start=1):
        for clients in [[i] for i in cohort] if m.turns else [cohort]:
            generated = [network(i) for i in clients]
            upstream = []
            for i, weights in zip(clients, generated, strict=True):
                before = {name: w.detach() for name, w in weights.items()}
                stream = problem.stream(t, i)
                batches = [next(stream) for _ in range(m.steps)]
                after = trained[i] = torch_sgd(problem, {**before, **heads[i]}, batches, list(before), m)
                heads[i] = {name: after[name] for name in heads[i]}
                sign = -1 if m.printed_sign else 1
                upstream.append([sign * (before[name] - after[name]) / len(clients) for name in before])
            optimizer.zero_grad()
            outputs = [w for weights in generated for w in weights.values()]
            torch.autograd.backward(outputs, [u for each in upstream for u in each])
            torch.nn.utils.clip_grad_norm_(network.parameters(), m.clip)
            optimizer.step()
    received = [{**network(i), **heads[i]} for i in range(problem.num_clients)]
    return received, trained


HYPER: dict[str, Any] = {"lr": 0.05, "steps": 4, "hidden": 6, "hyper_lr": 0.3}


@pytest.mark.parametrize(
    "changed", [{}, {"turns": True}, {"clip": 0.3}, {"local_head": True}, {"printed_sign": True},
                {"local_head": True, "clip": 0.2, "turns": True}, {"hyper_momentum": 0.0, "hyper_weight_decay": 0.1},
                {"momentum": 0.0, "weight_decay": 0.1}], ids=str,
)  # fmt: skip
def test_pfedhn_equals_literal_version(changed: dict[str, Any]) -> None:
    method = PFedHN(**HYPER | changed)
    run = PROBLEM.run(method, SCHEDULE)
    received, trained = literal_pfedhn(PROBLEM, method, make_simulation(method).server.initial_state, SCHEDULE)
    for client in range(5):
        assert same(run.personal(client, "received"), {n: w.detach() for n, w in received[client].items()}, 1e-10)
        assert same(run.personal(client, "trained"), {n: w.detach() for n, w in trained[client].items()}, 1e-10)


def test_hypernetwork_initialization_follows_pytorch() -> None:
    before = torch.get_rng_state()
    network = make_simulation(PFedHN()).server.initial_state["network"]
    assert torch.equal(before, torch.get_rng_state())  # the global generator was not used
    assert network["embeddings"].shape == (5, 2)  # 1 + N/4
    assert [network["trunk"][str(n)]["weight"].shape for n in range(4)] == [(100, 2), *[(100, 100)] * 3]
    for layer in (network["trunk"]["1"], network["outputs"]["fc1.weight"]):  # uniform, at most 1/√100
        for values in layer.values():
            assert 0.09 < float(values.abs().max()) <= 0.1 and abs(float(values.mean())) < 0.03
    many = make_simulation(PFedLA()).server.initial_state["networks"]["embedding"]
    assert abs(float(many.mean())) < 0.15 and abs(float(many.std()) - 1) < 0.1 and float(many.abs().max()) > 2
    assert same(network, make_simulation(PFedHN()).server.initial_state["network"])
    other = make_simulation(PFedHN(), seed=1).server.initial_state["network"]
    assert not any(torch.equal(a, b) for a, b in zip(flatten(network).values(), flatten(other).values(), strict=True))


@pytest.mark.parametrize("head", [False, True])
def test_pfedhn_with_zero_hyper_lr_sends_same_models(head: bool) -> None:
    rounds = exchanges(PFedHN(**HYPER | {"hyper_lr": 0.0, "local_head": head}), [[0, 1, 2, 3, 4]] * 3)
    assert all(same(rounds[0][2].sent, exchange.sent) for _, _, exchange in rounds)
    assert not same(rounds[0][2].received, rounds[0][2].sent)
    assert same(rounds[0][2].received, rounds[1][2].received) is False  # the order of batches differs


def proxy(sent: Weights, returned: Weights) -> Tensor:
    """Return J_i = ½‖sent − returned‖² of each client."""
    return torch.stack([(sent[n] - returned[n]).square().flatten(1).sum(1) for n in sent]).sum(0) / 2


@pytest.mark.parametrize("turns", [False, True])
def test_pfedhn_step_decreases_proxy_and_printed_sign_increases_it(turns: bool) -> None:
    for printed in (False, True):
        method = PFedHN(
            lr=0.05, steps=4, hidden=6, hyper_lr=1e-3, hyper_momentum=0, hyper_weight_decay=0, turns=turns,
            printed_sign=printed,
        )  # fmt: skip
        for _, after, exchange in exchanges(method):
            again = method.send(after, exchange.clients, 1)["params"]
            now, before = (proxy(sent, exchange.received["params"]) for sent in (again, exchange.sent["params"]))
            assert bool((now.sum() > before.sum()) if printed else (now.sum() < before.sum()))


def test_pfedhn_gradient_equals_finite_differences_of_proxy() -> None:
    """Compared in three random directions."""
    method = PFedHN(lr=0.05, steps=4, hidden=6, hyper_lr=1.0, hyper_momentum=0, hyper_weight_decay=0, clip=1e9)
    before, after, exchange = exchanges(method)[-1]
    old, new = (flatten(server["network"]) for server in (before, after))

    def value(network: Weights) -> Tensor:
        sent = method.send({**before, "network": ft.trees.unflatten(network)}, exchange.clients, 1)["params"]
        return proxy(sent, exchange.received["params"]).mean()

    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        direction = {n: torch.randn(w.shape, generator=generator, dtype=w.dtype) for n, w in old.items()}
        derivative = sum(float(((old[n] - new[n]) * direction[n]).sum()) for n in old)
        forward, backward = (value({n: old[n] + h * direction[n] for n in old}) for h in (1e-6, -1e-6))
        assert float(forward - backward) / 2e-6 == pytest.approx(derivative, rel=1e-6)


def test_pfedhn_turns_depend_on_order_of_clients() -> None:
    """With one client per round, `turns` has no effect; with several, the order matters only if clients take turns."""
    servers = [PROBLEM.run(PFedHN(**HYPER, turns=turns), [[0], [3], [1]]).server for turns in (False, True)]
    assert same(servers[0], servers[1])
    for turns in (False, True):
        one, other = (PROBLEM.run(PFedHN(**HYPER, turns=turns), [order]).server for order in ([0, 1, 2], [2, 1, 0]))
        assert same(one, other, 1e-12) != turns


def test_pfedhn_momentum_and_weight_decay_change_embeddings_of_absent_clients() -> None:
    """PyTorch's optimizer treats embedding tables in the same way; without both, only participants change."""
    for changed, moves in (({}, True), ({"hyper_momentum": 0.0, "hyper_weight_decay": 0.0}, False)):
        (_, _, _), (before, after, _) = exchanges(PFedHN(**HYPER | changed), [[0, 1, 2, 3], [0, 1]])
        moved = (before["network"]["embeddings"] != after["network"]["embeddings"]).any(1)
        assert moved.tolist() == [True, True, moves, moves, moves]


def test_pfedhn_local_head_is_not_sent_or_generated() -> None:
    run = PROBLEM.run(PFedHN(**HYPER, local_head=True), SCHEDULE)
    body = sum(w.numel() for n, w in PROBLEM.start.items() if not n.startswith("head."))
    for record, clients in zip(run.records, SCHEDULE, strict=True):
        assert (
            record["per_client"]["bytes_up"] == record["per_client"]["bytes_down"] == dict.fromkeys(clients, 8 * body)
        )
    received, trained = run.personal(0, "received"), run.personal(0, "trained")
    assert torch.equal(received["head.weight"], trained["head.weight"])
    assert not torch.equal(received["fc1.weight"], trained["fc1.weight"])
    assert "head.weight" not in run.server["network"]["outputs"]


def test_pfedhn_averages_running_statistics() -> None:
    net = make_normalized_net()
    run = ft.simulate(
        PFedHN(**HYPER), net, PROBLEM.fed, schedule=[[0, 1, 2, 3, 4], [0, 2]], batch_size=3, dtype=torch.float64
    )
    for name in ("norm.running_mean", "norm.running_var"):
        assert name not in run.server["network"]["outputs"]
        own = [run.personal(client, "trained")[name] for client in (0, 2)]
        average = (9 * own[0] + 7 * own[1]) / 16  # over the clients of the last round, by size
        assert all(torch.allclose(run.personal(c, "received")[name], average, atol=1e-12) for c in range(5))
    assert "norm.weight" in run.server["network"]["outputs"]


# pFedLA


class LayerWeights(nn.Module):
    """The hypernetwork of one client."""

    def __init__(self, networks: Tree, client: int) -> None:
        super().__init__()
        own = ft.trees.take(networks, client)
        self.client, self.embedding = client, nn.Parameter(own["embedding"].clone())
        self.trunk = make_trunk(own["trunk"], [nn.ReLU()])
        self.outputs = nn.ModuleDict({layer: linear(output) for layer, output in own["outputs"].items()})

    def forward(self, normalize: str) -> Weights:
        hidden, shares = self.trunk(self.embedding), {}
        for layer, output in self.outputs.items():
            values = output(hidden)
            if normalize == "softmax":
                shares[layer] = torch.exp(values) / torch.exp(values).sum()
            elif not F.relu(values).any():
                shares[layer] = F.one_hot(torch.tensor(self.client), len(values)).double()
            else:
                shares[layer] = F.relu(values) / F.relu(values).sum()
        return shares


def literal_pfedla(
    problem: Problem, m: PFedLA, start: Tree, schedule: Sequence[Sequence[int]]
) -> tuple[list[Weights], list[Weights], int]:
    """Return the final models as received and as last trained, and how often the retained layers changed."""
    clients = range(problem.num_clients)
    networks = [LayerWeights(start["networks"], i) for i in clients]
    models = [problem.start for _ in clients]  # the server's
    own = [problem.start for _ in clients]  # the clients'
    kept_before: list[list[str]] = [[] for _ in clients]
    changes = 0

    def send(i: int) -> tuple[Weights, list[str]]:
        shares = networks[i](m.normalize)
        kept = sorted(LAYERS, key=lambda layer: -shares[layer][i].item())[: m.retained]
        mixed = {}
        for name in problem.start:
            layer = name.split(".")[0]
            if layer not in kept:
                mixed[name] = sum((shares[layer][j] * models[j][name] for j in clients), torch.zeros(()))
        return mixed, kept

    for t, cohort in enumerate(schedule, start=1):
        sent = {i: send(i) for i in cohort}
        for i, (mixed, kept) in sent.items():
            changes += kept != kept_before[i]
            kept_before[i] = kept
            weights = {name: mixed[name].detach() if name in mixed else own[i][name] for name in problem.start}
            velocity = {name: torch.zeros_like(w) for name, w in weights.items()}
            for e in range(m.epochs):
                for batch in problem.batches(t, i, e):
                    gradient = problem.gradient(weights, batch)
                    for name in weights:
                        velocity[name] = m.momentum * velocity[name] + gradient[name] + m.weight_decay * weights[name]
                        weights[name] = weights[name] - m.lr * velocity[name]
            own[i] = weights
            if mixed:
                parameters = list(networks[i].parameters())
                sign = -1 if m.printed_sign else 1
                upstream = [sign * (mixed[name].detach() - weights[name]) for name in mixed]
                grads = torch.autograd.grad(list(mixed.values()), parameters, upstream, materialize_grads=True)
                with torch.no_grad():
                    for parameter, grad in zip(parameters, grads, strict=True):
                        parameter.sub_(m.hyper_lr * grad)
        for i, (mixed, _) in sent.items():
            models[i] = {name: own[i][name] if name in mixed else models[i][name] for name in problem.start}
    received = []
    for i in clients:
        mixed, _ = send(i)
        received.append({name: mixed[name].detach() if name in mixed else own[i][name] for name in problem.start})
    return received, own, changes


MIXED: dict[str, Any] = {"lr": 0.1, "hyper_lr": 2.0, **SMALL}


@pytest.mark.parametrize(
    "changed", [{}, {"normalize": "softmax"}, {"retained": 1}, {"retained": 2, "hyper_lr": 20.0},
               {"retained": 1, "normalize": "softmax"}, {"retained": 3}, {"printed_sign": True}, {"hyper_lr": 300.0},
               {"momentum": 0.5, "weight_decay": 0.01}], ids=str,
)  # fmt: skip
def test_pfedla_equals_literal_version(changed: dict[str, Any]) -> None:
    method, schedule = PFedLA(**MIXED | changed), [*SCHEDULE, [0, 1, 2]]
    run = PROBLEM.run(method, schedule)
    received, trained, changes = literal_pfedla(PROBLEM, method, make_simulation(method).server.initial_state, schedule)
    for client in range(5):
        assert same(run.personal(client, "received"), received[client], 1e-10)
        assert same(run.personal(client, "trained"), trained[client], 1e-10)
    if changed == {"retained": 2, "hyper_lr": 20.0}:
        assert changes > 5  # retained layers are sent again later


def test_pfedla_with_zero_outputs_equals_local_training() -> None:
    """With outputs of 0, each client uses only its own model, and the gradient is 0."""
    mixed, local = make_simulation(PFedLA(**MIXED), PARTIAL), make_simulation(Local(lr=0.1), PARTIAL)
    networks = mixed.server.state["networks"]
    mixed.server.state |= {"networks": networks | {"outputs": ft.trees.zeros_like(networks["outputs"])}}
    for number, clients in enumerate(PARTIAL, start=1):
        mixed.train_round(number, clients)
        local.train_round(number, clients)
        models = [
            {
                "received": trainer.clients.received_models(trainer.server, range(5), number + 1),
                "trained": trainer.clients.trained_models(trainer.server, clients),
            }
            for trainer in (mixed, local)
        ]
        assert same(models[0], models[1], 1e-12)


@pytest.mark.parametrize("normalize", ["sum", "softmax"])
def test_pfedla_retaining_all_layers_equals_local_training(normalize: Any) -> None:
    run, local = (PROBLEM.run(m, PARTIAL) for m in (PFedLA(**MIXED, retained=3, normalize=normalize), Local(lr=0.1)))
    for client in range(5):
        assert all(
            same(run.personal(client, moment), local.personal(client, moment)) for moment in ("received", "trained")
        )
    assert all(record["bytes_up"] == record["bytes_down"] == 0 for record in run.records)


def test_pfedla_with_one_client_equals_local_training() -> None:
    problem, schedule = make_problem((8,)), [[0]] * 3
    run, local = (problem.run(m, schedule) for m in (PFedLA(**MIXED), Local(lr=0.1)))
    assert same(run.personal(0, "received"), local.personal(0, "received"), 1e-12)


def test_pfedla_with_zero_hyper_lr_keeps_initial_shares() -> None:
    """With a learning rate of 0, each layer is mixed with the initial shares."""
    method = PFedLA(**MIXED | {"hyper_lr": 0.0})
    rounds = exchanges(method)
    assert all(same(before["networks"], after["networks"]) for before, after, _ in rounds)
    shares = method._weights(rounds[0][0]["networks"], torch.arange(5))
    for layer in shares.values():
        assert torch.allclose(layer.sum(1), torch.ones(5).double()) and float(layer.min()) >= 0
    last = rounds[-1][1]
    for name, sent in method.send(last, [4], 9)["params"].items():
        expected = torch.tensordot(shares[name.split(".")[0]][4], last["models"][name], dims=1)
        assert torch.allclose(sent[0], expected, atol=1e-12)


@pytest.mark.parametrize("normalize", ["sum", "softmax"])
@pytest.mark.parametrize("retained", [0, 1])
def test_pfedla_step_decreases_proxy_and_printed_sign_increases_it(normalize: Any, retained: int) -> None:
    """Public code uses returned − sent, which ascends. In round 1, all models are equal, and the gradient is 0."""

    def values(tree: Tree) -> Weights:
        return {n: leaf.values[:, 0] if isinstance(leaf, Rows) else leaf for n, leaf in tree.items()}

    for printed in (False, True):
        changed: dict[str, Any] = {"normalize": normalize, "retained": retained, "printed_sign": printed}
        method = PFedLA(**MIXED | {"hyper_lr": 1e-3} | changed)
        for before, after, exchange in exchanges(method)[1:]:
            again = mask_absent_rows(method.send(before | {"networks": after["networks"]}, exchange.clients, 1))[
                "params"
            ]
            now, then = (
                proxy(values(x), values(exchange.received["params"])) for x in (again, exchange.sent["params"])
            )
            assert bool((now > then).all() if printed else (now < then).all())


def test_pfedla_retained_layers_have_largest_own_weight_and_are_not_sent() -> None:
    sizes = {layer: sum(w.numel() for n, w in PROBLEM.start.items() if n.split(".")[0] == layer) for layer in LAYERS}
    method = PFedLA(**MIXED, retained=1)
    run, chosen = PROBLEM.run(method, SCHEDULE), set()
    for (before, after, exchange), record in zip(exchanges(method), run.records, strict=True):
        clients = torch.tensor(exchange.clients)
        shares = method._weights(ft.trees.take(before["networks"], clients), clients)
        for place, client in enumerate(exchange.clients):
            kept = max(LAYERS, key=lambda layer, p=place, c=client: float(shares[layer][p, c]))  # type: ignore[misc]
            chosen.add(kept)
            expected = 8 * (sum(sizes.values()) - sizes[kept])
            assert record["per_client"]["bytes_up"][client] == record["per_client"]["bytes_down"][client] == expected
            for name in PROBLEM.start:
                unchanged = torch.equal(before["models"][name][client], after["models"][name][client])
                assert unchanged == (name.split(".")[0] == kept)
    assert len(chosen) > 1  # clients differ


def test_pfedla_mixes_running_statistics_with_their_layer() -> None:
    net, method = make_normalized_net(), PFedLA(**MIXED)
    run = ft.simulate(method, net, PROBLEM.fed, schedule=SCHEDULE, batch_size=3, dtype=torch.float64)
    shares = method._weights(run.server["networks"], torch.arange(5))
    assert set(shares) == {"fc", "norm", "head"}
    for name in ("norm.running_mean", "norm.running_var", "norm.weight"):
        expected = torch.tensordot(shares["norm"][1], run.server["models"][name], dims=1)
        assert torch.allclose(run.personal(1, "received")[name], expected, atol=1e-12)


def test_pfedla_retained_layers_do_not_depend_on_order_of_names() -> None:
    """In a resumed run, the server state may have another order of layers, and own weights may be equal."""
    method = PFedLA(**MIXED, retained=1)
    server = make_simulation(method).server.initial_state
    server["networks"]["outputs"] = ft.trees.zeros_like(server["networks"]["outputs"])  # own weight 1 in each layer
    reversed_networks = {**server["networks"], "outputs": dict(reversed(server["networks"]["outputs"].items()))}
    one, other = (method.send(s, [0, 3], 1) for s in (server, {**server, "networks": reversed_networks}))
    assert same(one, other)
