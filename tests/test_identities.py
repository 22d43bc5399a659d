"""Meaning: limits in which one method must equal another, and first rounds computed by hand."""

from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import alike, models, same, tiny_federation
from fedtailor.methods import Ditto, FedAvg, FedPer, FedProx, Local, PFedMe, Scaffold
from problem import Problem, Weights, average, make_problem

ROUNDS = [[0, 1, 2, 3], [0, 2], [1, 2, 3], [3]]


def go(method: ft.Method, net: nn.Module, fed: ft.Federation | None = None, **more: Any) -> ft.Run:
    settings: dict[str, Any] = {"schedule": ROUNDS, "batch_size": 3, "dtype": torch.float64} | more
    return ft.simulate(method, net, fed or tiny_federation(), **settings)


@pytest.mark.parametrize("extra", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_fedprox_without_pull_is_fedavg(net: nn.Module, extra: dict[str, Any]) -> None:
    prox, avg = go(FedProx(mu=0.0, **extra), net), go(FedAvg(**extra), net)
    assert same(prox.server, avg.server)


def test_fedprox_pulls_towards_the_received_model(net: nn.Module) -> None:
    """The larger μ, the less a client moves."""
    start = net.state_dict()
    moved = []
    for mu in (0.0, 0.5, 2.0):
        run = go(FedProx(mu=mu, lr=0.2), net, schedule=[[0, 1, 2, 3]])
        moved.append(sum(float((run.personal(0)[n] - start[n]).square().sum()) for n in start))
    assert moved[0] > moved[1] > moved[2] > 0


def test_ditto_without_pull_is_local(net: nn.Module) -> None:
    assert alike(models(go(Ditto(lam=0.0), net)), models(go(Local(), net)))


def test_the_common_model_of_ditto_is_fedavgs(net: nn.Module) -> None:
    assert same(go(Ditto(lam=0.7), net).server, go(FedAvg(), net).server)


def test_ditto_with_a_strong_pull_stays_with_the_received_model(net: nn.Module) -> None:
    """λ η = 1: a step lands on the received model less η times the gradient there."""
    run = go(Ditto(lam=10.0, lr=0.1, epochs=1), net, tiny_federation((3, 3)), schedule=[[0, 1]])
    avg = go(FedAvg(lr=0.1, epochs=1), net, tiny_federation((3, 3)), schedule=[[0, 1]])
    assert alike(models(run), models(avg), 1e-12)  # in round 1 own and received are the same


def test_scaffold_with_one_step_equal_sizes_and_everyone_is_fedavg(net: nn.Module) -> None:
    fed = tiny_federation((6, 6, 6))
    one_step = {"schedule": [[0, 1, 2]] * 4, "batch_size": 6}
    scaffold, avg = go(Scaffold(epochs=1), net, fed, **one_step), go(FedAvg(epochs=1), net, fed, **one_step)
    assert same(scaffold.server["params"], avg.server["params"], 1e-12)


def test_scaffold_controls_sum_to_the_servers(net: nn.Module) -> None:
    """c is the mean of all c_i, every round, under any participation; and they are not zero."""
    run = go(Scaffold(), net)
    mean = {n: sum(run.client(i)["control"][n] for i in range(4)) / 4 for n in run.server["control"]}
    assert same(mean, run.server["control"], 1e-12)
    assert all(float(c.abs().max()) > 0 for c in run.server["control"].values())


def test_scaffold_by_hand(net: nn.Module) -> None:
    """Two rounds of option II, written out with autograd: one client of three samples, whole batches, two steps."""
    fed = tiny_federation((3, 3))
    run = go(Scaffold(lr=0.1, epochs=2), net, fed, schedule=[[0, 1], [0]])
    names = [n for n, _ in net.named_parameters()]

    def gradient(weights: list[torch.Tensor], client: int) -> list[torch.Tensor]:
        live = [w.detach().requires_grad_() for w in weights]
        x, y = fed.x[fed.train[client]], fed.y[fed.train[client]]
        outputs = torch.func.functional_call(net, dict(zip(names, live, strict=True)), (x,))
        return list(torch.autograd.grad(nn.functional.cross_entropy(outputs, y), live))

    server = [p.detach().clone() for p in net.parameters()]
    control = [torch.zeros_like(p) for p in server]
    own = [[torch.zeros_like(p) for p in server] for _ in range(2)]
    for clients in ([0, 1], [0]):
        ends, deltas = [], []
        for i in clients:
            y = [p.clone() for p in server]
            for _ in range(2):
                y = [w - 0.1 * (g - ci + c) for w, g, ci, c in zip(y, gradient(y, i), own[i], control, strict=True)]
            new = [ci - c + (x - w) / (2 * 0.1) for ci, c, x, w in zip(own[i], control, server, y, strict=True)]
            deltas.append([n - o for n, o in zip(new, own[i], strict=True)])
            own[i] = new
            ends.append(y)
        server = [s + sum(e[k] - s for e in ends) / len(clients) for k, s in enumerate(server)]
        control = [c + sum(d[k] for d in deltas) / 2 for k, c in enumerate(control)]
    assert same(run.server["params"], dict(zip(names, server, strict=True)), 1e-10)
    assert same(run.server["control"], dict(zip(names, control, strict=True)), 1e-10)


def test_fedavg_by_hand_against_torch_optim(net: nn.Module) -> None:
    """One round with momentum and weight decay equals torch.optim.SGD on whole batches, weighted by samples."""
    fed = tiny_federation((3, 2))
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    run = go(FedAvg(epochs=3, **settings), net, fed, schedule=[[0, 1]])
    total = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for client, size in enumerate((3, 2)):
        torch.manual_seed(0)
        twin = type(net)().double()
        twin.load_state_dict(net.state_dict())
        optimiser = torch.optim.SGD(twin.parameters(), **settings)
        for _ in range(3):
            optimiser.zero_grad()
            x, y = fed.x[fed.train[client]], fed.y[fed.train[client]]
            torch.autograd.backward(nn.functional.cross_entropy(twin(x), y))
            optimiser.step()
        for n, p in twin.named_parameters():
            total[n] += p.detach() * size / 5
    assert same(run.server["params"], total, 1e-12)


def test_one_client_fedavg_is_local(net: nn.Module) -> None:
    fed = tiny_federation((8,))
    avg, local = (go(m, net, fed, schedule=[[0]] * 3) for m in (FedAvg(), Local()))
    assert alike(models(avg, "received"), models(local, "received"))


def test_uniform_weights_count_every_client_alike(net: nn.Module) -> None:
    run = go(FedAvg(weights="uniform"), net, schedule=[[0, 1, 2, 3]])
    mean = {n: sum(run.personal(i)[n] for i in range(4)) / 4 for n in run.server["params"]}
    assert same(run.server["params"], mean, 1e-12)


def test_fedper_shares_the_body_and_keeps_the_head(net: nn.Module) -> None:
    run = go(FedPer(), net, schedule=[[0, 1, 2, 3]])
    received, trained = models(run, "received"), models(run, "trained")
    assert all(torch.equal(m["fc.weight"], received[0]["fc.weight"]) for m in received)
    assert not torch.equal(received[0]["head.weight"], received[1]["head.weight"])
    assert all(torch.equal(r["head.weight"], t["head.weight"]) for r, t in zip(received, trained, strict=True))
    sizes = [9, 4, 7, 1]
    body = sum(t["fc.weight"] * n for t, n in zip(trained, sizes, strict=True)) / 21
    assert torch.allclose(received[0]["fc.weight"], body, atol=1e-12)


def test_fedper_of_one_client_is_local(net: nn.Module) -> None:
    fed = tiny_federation((8,))
    per, local = (go(m, net, fed, schedule=[[0]] * 3) for m in (FedPer(), Local()))
    assert alike(models(per, "received"), models(local, "received"))


def test_methods_differ_where_they_should(net: nn.Module) -> None:
    runs = [models(go(m, net)) for m in (Local(), FedAvg(), FedProx(mu=0.5), Scaffold(), FedPer(), Ditto())]
    for position, run in enumerate(runs):
        for other in runs[:position]:
            assert not alike(run, other, 1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedAvg(lr=0), "lr must be above 0"),
        (lambda: FedAvg(epochs=0), "epochs must be at least 1"),
        (lambda: FedAvg(momentum=1.0), "momentum must be below 1"),
        (lambda: FedProx(mu=-1), "mu must be at least 0"),
        (lambda: Ditto(lam=-1), "lam must be at least 0"),
    ],
)
def test_senseless_fields_are_refused_in_words(make: Any, words: str) -> None:
    with pytest.raises(ft.Refused, match=words):
        make()


def test_scaffold_has_no_momentum_or_weight_decay() -> None:
    assert not {"momentum", "weight_decay"} & set(Scaffold().descent)


def descend(problem: Problem, start: Weights, round: int, client: int, pull: Weights | None = None) -> Weights:
    """Two passes of SGD at 0.1, drawn to `pull` by 0.7 where there is one: as the papers write it."""
    weights = dict(start)
    for number in range(2):
        for batch in problem.batches(round, client, number):
            slope = problem.gradient(weights, batch)
            if pull is not None:
                slope = {n: slope[n] + 0.7 * (weights[n] - pull[n]) for n in slope}
            weights = {n: weights[n] - 0.1 * slope[n] for n in weights}
    return weights


def test_ditto_by_hand() -> None:
    """v_i is drawn to the received model, which is the mean of what was trained from it and knows nothing of v_i."""
    problem, rounds = make_problem(), [[0, 1, 2, 3, 4], [1, 3, 4], [0, 1]]
    run = problem.run(Ditto(lam=0.7), rounds)
    common, own = problem.start, [problem.start for _ in range(5)]
    for number, clients in enumerate(rounds, start=1):
        trained = [descend(problem, common, number, client) for client in clients]
        for client in clients:
            own[client] = descend(problem, own[client], number, client, pull=common)
        common = average(trained, [problem.sizes[client] for client in clients])
    assert same(run.server["params"], common, 1e-10)
    assert alike(models(run), own, 1e-10) and alike(models(run, "received"), own, 1e-10)


def test_fedper_and_local_by_hand() -> None:
    problem, rounds = make_problem(), [[0, 1, 2, 3, 4], [1, 3, 4], [0, 1]]
    per, local = problem.run(FedPer(), rounds), problem.run(Local(), rounds)
    shared = [name for name in problem.start if not name.startswith("head")]
    common, own = problem.start, [problem.start for _ in range(5)]
    alone = [problem.start for _ in range(5)]
    for number, clients in enumerate(rounds, start=1):
        for client in clients:
            own[client] = descend(problem, own[client] | {n: common[n] for n in shared}, number, client)
            alone[client] = descend(problem, alone[client], number, client)
        common = average([own[client] for client in clients], [problem.sizes[client] for client in clients])
    assert alike(models(per), own, 1e-10)
    assert alike(models(per, "received"), [own[i] | {n: common[n] for n in shared} for i in range(5)], 1e-10)
    assert alike(models(local), alone, 1e-10)


def test_pfedme_with_an_endless_pull_has_no_models_of_its_own(net: nn.Module) -> None:
    """λ → ∞: θ̃_i → w_i, and with ηλ below 1 nobody moves."""
    start = {name: weight.double() for name, weight in net.state_dict().items()}
    away = []
    for lam in (1e2, 1e4, 1e6):
        run = go(PFedMe(lam=lam, lr=0.5 / lam, personal_lr=0.5 / lam), net)
        away.append(max(float((run.personal(0)[n] - start[n]).abs().max()) for n in start))
    assert away[0] > 10 * away[1] > 100 * away[2] > 0
