"""pFedLA and pFedHN compared with versions that use modules and optimizers of PyTorch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import same
from fedtailor.core.trees import Tree, flatten
from fedtailor.methods import PFedHN, PFedLA
from support.problem import Problem, Weights, make_normalized_net, make_problem

PROBLEM = make_problem()
SCHEDULE = [[0, 1, 2, 3, 4], [1, 3, 4], [0, 2, 3]]
LAYERS = ("fc1", "fc2", "head")
SIZES = {"fc1": 25, "fc2": 24, "head": 15}  # parameters of each layer
SMALL = {"hidden": 6, "embedding": 4}


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


Learner = tuple[Weights, torch.optim.Optimizer]  # weights of a client, and the optimizer that changes them in place


def make_learner(weights: Weights, m: PFedHN) -> Learner:
    live: Weights = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    return live, torch.optim.SGD(live.values(), lr=m.lr, momentum=m.momentum, weight_decay=m.weight_decay)


def torch_sgd(
    problem: Problem, weights: Weights, batches: Sequence[Tensor], clipped_names: Sequence[str], m: PFedHN,
    learner: Learner,
) -> Weights:  # fmt: skip
    """Run torch.optim.SGD on these batches, with gradient clipping for the given names."""
    live, optimizer = learner
    for name, weight in weights.items():
        live[name].data.copy_(weight)
    for batch in batches:
        optimizer.zero_grad()
        problem.loss(live, batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([live[name] for name in clipped_names], m.clip)
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in live.items()}


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
    learners = [make_learner(problem.start, m) for _ in problem.sizes]
    for t, cohort in enumerate(schedule, start=1):
        for clients in [[i] for i in cohort] if m.turns else [cohort]:
            generated = [network(i) for i in clients]
            upstream = []
            for i, weights in zip(clients, generated, strict=True):
                before = {name: w.detach() for name, w in weights.items()}
                stream = problem.stream(t, i)
                batches = [next(stream) for _ in range(m.steps)]
                learner = learners[i] if m.keep_optimizer_state else make_learner(problem.start, m)
                after = trained[i] = torch_sgd(problem, {**before, **heads[i]}, batches, list(before), m, learner)
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
    "changed", [{}, {"turns": True}, {"clip": 0.3}, {"clip": 0.05, "lr": 2.0}, {"local_head": True},
                {"printed_sign": True}, {"local_head": True, "clip": 0.2, "turns": True},
                {"hyper_momentum": 0.0, "hyper_weight_decay": 0.1}, {"momentum": 0.0, "weight_decay": 0.1},
                {"keep_optimizer_state": True, "local_head": True}], ids=str,
)  # fmt: skip
def test_pfedhn_equals_literal_version(changed: dict[str, Any]) -> None:
    method = PFedHN(**HYPER | changed)
    run = PROBLEM.run(method, SCHEDULE)
    received, trained = literal_pfedhn(PROBLEM, method, PROBLEM.initial_server(method), SCHEDULE)
    for client in range(5):
        assert same(run.personal(client, "received"), {n: w.detach() for n, w in received[client].items()}, 1e-10)
        assert same(run.personal(client, "trained"), {n: w.detach() for n, w in trained[client].items()}, 1e-10)
    for record, clients in zip(run.records, SCHEDULE, strict=True):
        sent = dict.fromkeys(clients, 8 * (49 if method.local_head else 64))  # a local head is not sent
        assert record["per_client"]["bytes_up"] == record["per_client"]["bytes_down"] == sent


def test_hypernetwork_initialization_follows_pytorch() -> None:
    before = torch.get_rng_state()
    network = PROBLEM.initial_server(PFedHN())["network"]
    assert torch.equal(before, torch.get_rng_state())  # the global generator was not used
    assert network["embeddings"].shape == (5, 2)  # 1 + N/4
    assert [network["trunk"][str(n)]["weight"].shape for n in range(4)] == [(100, 2), *[(100, 100)] * 3]
    for layer in (network["trunk"]["1"], network["outputs"]["fc1.weight"]):  # uniform, at most 1/√100
        for values in layer.values():
            assert 0.09 < float(values.abs().max()) <= 0.1 and abs(float(values.mean())) < 0.03
    many = PROBLEM.initial_server(PFedLA())["networks"]["embedding"]
    assert abs(float(many.mean())) < 0.15 and abs(float(many.std()) - 1) < 0.1 and float(many.abs().max()) > 2
    assert same(network, PROBLEM.initial_server(PFedHN())["network"])
    other = PROBLEM.initial_server(PFedHN(), seed=1)["network"]
    assert not any(torch.equal(a, b) for a, b in zip(flatten(network).values(), flatten(other).values(), strict=True))


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
) -> tuple[list[Weights], list[Weights], list[dict[int, list[str]]]]:
    """Return the final models as received and as last trained, and the retained layers of each round."""
    clients = range(problem.num_clients)
    networks = [LayerWeights(start["networks"], i) for i in clients]
    models = [problem.start for _ in clients]  # the server's
    own = [problem.start for _ in clients]  # the clients'
    retained: list[dict[int, list[str]]] = []

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
        retained.append({i: kept for i, (_, kept) in sent.items()})
        for i, (mixed, _) in sent.items():
            start = {name: mixed[name].detach() if name in mixed else own[i][name] for name in problem.start}
            weights = own[i] = problem.sgd(
                start, t, i, lr=m.lr, epochs=m.epochs, momentum=m.momentum, weight_decay=m.weight_decay
            )
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
    return received, own, retained


MIXED: dict[str, Any] = {"lr": 0.1, "hyper_lr": 2.0, **SMALL}


@pytest.mark.parametrize(
    "changed", [{}, {"normalize": "softmax"}, {"retained": 1}, {"retained": 2, "hyper_lr": 20.0},
               {"retained": 1, "normalize": "softmax"}, {"retained": 3}, {"printed_sign": True}, {"hyper_lr": 300.0},
               {"momentum": 0.5, "weight_decay": 0.01}], ids=str,
)  # fmt: skip
def test_pfedla_equals_literal_version(changed: dict[str, Any]) -> None:
    method, schedule = PFedLA(**MIXED | changed), [*SCHEDULE, [0, 1, 2]]
    run = PROBLEM.run(method, schedule)
    server = PROBLEM.initial_server(method)
    received, trained, retained = literal_pfedla(PROBLEM, method, server, schedule)
    for client in range(5):
        assert same(run.personal(client, "received"), received[client], 1e-10)
        assert same(run.personal(client, "trained"), trained[client], 1e-10)
    for record, kept in zip(run.records, retained, strict=True):  # retained layers are not sent
        expected = {i: 8 * sum(SIZES[layer] for layer in LAYERS if layer not in own) for i, own in kept.items()}
        assert record["per_client"]["bytes_up"] == record["per_client"]["bytes_down"] == expected
    if changed == {"retained": 2, "hyper_lr": 20.0}:
        assert len({tuple(kept[0]) for kept in retained if 0 in kept}) > 1  # retained layers are sent again later


def test_pfedla_without_positive_outputs_uses_own_model_only() -> None:
    assert PFedLA()._to_shares(torch.tensor([-1.0, 0.0, -2.0]), own=torch.tensor(1)).tolist() == [0.0, 1.0, 0.0]


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
    server = PROBLEM.initial_server(method)
    server["networks"]["outputs"] = ft.trees.zeros_like(server["networks"]["outputs"])  # own weight 1 in each layer
    reversed_networks = {**server["networks"], "outputs": dict(reversed(server["networks"]["outputs"].items()))}
    one, other = (method.send(s, [0, 3], 1) for s in (server, {**server, "networks": reversed_networks}))
    assert same(one, other)
