"""Limiting cases in which one method equals another, and literal versions of simple methods."""

from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import all_same, models, same, tiny_federation
from fedtailor.methods import Ditto, FedAvg, FedPer, FedProx, Local, PFedMe, Scaffold
from support.problem import Problem, Weights, average, make_problem

ROUNDS = [[0, 1, 2, 3], [0, 2], [1, 2, 3], [3]]


def simulate(method: ft.Method, net: nn.Module, fed: ft.Federation | None = None, **more: Any) -> ft.Run:
    settings: dict[str, Any] = {"schedule": ROUNDS, "batch_size": 3, "dtype": torch.float64} | more
    return ft.simulate(method, net, fed or tiny_federation(), **settings)


@pytest.mark.parametrize("extra", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_fedprox_without_proximal_term_equals_fedavg(net: nn.Module, extra: dict[str, Any]) -> None:
    prox, avg = simulate(FedProx(mu=0.0, **extra), net), simulate(FedAvg(**extra), net)
    assert same(prox.server, avg.server)


def test_fedprox_larger_mu_reduces_local_change(net: nn.Module) -> None:
    """The local change decreases as μ increases."""
    start = net.state_dict()
    moved = []
    for mu in (0.0, 0.5, 2.0):
        run = simulate(FedProx(mu=mu, lr=0.2), net, schedule=[[0, 1, 2, 3]])
        moved.append(sum(float((run.personal(0)[n] - start[n]).square().sum()) for n in start))
    assert moved[0] > moved[1] > moved[2] > 0


def test_ditto_without_proximal_term_equals_local_training(net: nn.Module) -> None:
    assert all_same(models(simulate(Ditto(lam=0.0), net)), models(simulate(Local(), net)))


def test_ditto_global_model_equals_fedavg(net: nn.Module) -> None:
    assert same(simulate(Ditto(lam=0.7), net).server, simulate(FedAvg(), net).server)


def test_ditto_with_strong_proximal_term_equals_fedavg_update(net: nn.Module) -> None:
    """With λ η = 1, one step leads to the received model minus η times its gradient."""
    run = simulate(Ditto(lam=10.0, lr=0.1, epochs=1), net, tiny_federation((3, 3)), schedule=[[0, 1]])
    avg = simulate(FedAvg(lr=0.1, epochs=1), net, tiny_federation((3, 3)), schedule=[[0, 1]])
    assert all_same(models(run), models(avg), 1e-12)  # in round 1, personal and received model are equal


def test_scaffold_with_one_step_and_full_participation_equals_fedavg(net: nn.Module) -> None:
    fed = tiny_federation((6, 6, 6))
    one_step = {"schedule": [[0, 1, 2]] * 4, "batch_size": 6}
    scaffold, avg = simulate(Scaffold(epochs=1), net, fed, **one_step), simulate(FedAvg(epochs=1), net, fed, **one_step)
    assert same(scaffold.server["params"], avg.server["params"], 1e-12)


def test_scaffold_server_control_is_mean_of_client_controls(net: nn.Module) -> None:
    """c is the mean of all c_i under any participation and is not zero."""
    run = simulate(Scaffold(), net)
    mean = {n: sum(run.client(i)["control"][n] for i in range(4)) / 4 for n in run.server["control"]}
    assert same(mean, run.server["control"], 1e-12)
    assert all(float(c.abs().max()) > 0 for c in run.server["control"].values())


def test_scaffold_equals_literal_algorithm(net: nn.Module) -> None:
    """Two rounds of option II with autograd: clients of three samples, full batches, two steps."""
    fed = tiny_federation((3, 3))
    run = simulate(Scaffold(lr=0.1, epochs=2), net, fed, schedule=[[0, 1], [0]])
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


def test_fedavg_equals_torch_optim_sgd(net: nn.Module) -> None:
    """One round with momentum and weight decay equals torch.optim.SGD on full batches, averaged by size."""
    fed = tiny_federation((3, 2))
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    run = simulate(FedAvg(epochs=3, **settings), net, fed, schedule=[[0, 1]])
    total = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for client, size in enumerate((3, 2)):
        torch.manual_seed(0)
        copy = type(net)().double()
        copy.load_state_dict(net.state_dict())
        optimizer = torch.optim.SGD(copy.parameters(), **settings)
        for _ in range(3):
            optimizer.zero_grad()
            x, y = fed.x[fed.train[client]], fed.y[fed.train[client]]
            torch.autograd.backward(nn.functional.cross_entropy(copy(x), y))
            optimizer.step()
        for n, p in copy.named_parameters():
            total[n] += p.detach() * size / 5
    assert same(run.server["params"], total, 1e-12)


def test_fedavg_with_one_client_equals_local_training(net: nn.Module) -> None:
    fed = tiny_federation((8,))
    avg, local = (simulate(m, net, fed, schedule=[[0]] * 3) for m in (FedAvg(), Local()))
    assert all_same(models(avg, "received"), models(local, "received"))


def test_fedavg_uniform_weights_give_plain_mean(net: nn.Module) -> None:
    run = simulate(FedAvg(weights="uniform"), net, schedule=[[0, 1, 2, 3]])
    mean = {n: sum(run.personal(i)[n] for i in range(4)) / 4 for n in run.server["params"]}
    assert same(run.server["params"], mean, 1e-12)


def test_fedper_averages_bodies_and_not_heads(net: nn.Module) -> None:
    run = simulate(FedPer(), net, schedule=[[0, 1, 2, 3]])
    received, trained = models(run, "received"), models(run, "trained")
    assert all(torch.equal(m["fc.weight"], received[0]["fc.weight"]) for m in received)
    assert not torch.equal(received[0]["head.weight"], received[1]["head.weight"])
    assert all(torch.equal(r["head.weight"], t["head.weight"]) for r, t in zip(received, trained, strict=True))
    sizes = [9, 4, 7, 1]
    body = sum(t["fc.weight"] * n for t, n in zip(trained, sizes, strict=True)) / 21
    assert torch.allclose(received[0]["fc.weight"], body, atol=1e-12)


def test_fedper_with_one_client_equals_local_training(net: nn.Module) -> None:
    fed = tiny_federation((8,))
    per, local = (simulate(m, net, fed, schedule=[[0]] * 3) for m in (FedPer(), Local()))
    assert all_same(models(per, "received"), models(local, "received"))


def test_different_methods_give_different_models(net: nn.Module) -> None:
    runs = [models(simulate(m, net)) for m in (Local(), FedAvg(), FedProx(mu=0.5), Scaffold(), FedPer(), Ditto())]
    for position, run in enumerate(runs):
        for other in runs[:position]:
            assert not all_same(run, other, 1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedAvg(lr=0), "lr must be above 0"),
        (lambda: FedAvg(epochs=0), "epochs must be at least 1"),
        (lambda: FedAvg(momentum=1.0), "momentum must be at least 0 and below 1"),
        (lambda: FedProx(mu=-1), "mu must be at least 0"),
        (lambda: Ditto(lam=-1), "lam must be at least 0"),
    ],
)
def test_invalid_fields_raise(make: Any, message: str) -> None:
    with pytest.raises(ft.FedTailorError, match=message):
        make()


def test_scaffold_optimizer_options_exclude_momentum_and_weight_decay() -> None:
    assert not {"momentum", "weight_decay"} & set(Scaffold().optimizer_options)


def sgd(problem: Problem, start: Weights, round: int, client: int, center: Weights | None = None) -> Weights:
    """Run two epochs of SGD with learning rate 0.1, optionally with a proximal term of weight 0.7 toward `center`."""
    weights = dict(start)
    for number in range(2):
        for batch in problem.batches(round, client, number):
            grad = problem.gradient(weights, batch)
            if center is not None:
                grad = {n: grad[n] + 0.7 * (weights[n] - center[n]) for n in grad}
            weights = {n: weights[n] - 0.1 * grad[n] for n in weights}
    return weights


def test_ditto_equals_literal_algorithm() -> None:
    """The proximal term pulls v_i toward the global model, which does not depend on any v_i."""
    problem, rounds = make_problem(), [[0, 1, 2, 3, 4], [1, 3, 4], [0, 1]]
    run = problem.run(Ditto(lam=0.7), rounds)
    global_model, own = problem.start, [problem.start for _ in range(5)]
    for number, clients in enumerate(rounds, start=1):
        trained = [sgd(problem, global_model, number, client) for client in clients]
        for client in clients:
            own[client] = sgd(problem, own[client], number, client, center=global_model)
        global_model = average(trained, [problem.sizes[client] for client in clients])
    assert same(run.server["params"], global_model, 1e-10)
    assert all_same(models(run), own, 1e-10) and all_same(models(run, "received"), own, 1e-10)


def test_fedper_and_local_training_equal_literal_algorithms() -> None:
    problem, rounds = make_problem(), [[0, 1, 2, 3, 4], [1, 3, 4], [0, 1]]
    per, local = problem.run(FedPer(), rounds), problem.run(Local(), rounds)
    shared = [name for name in problem.start if not name.startswith("head")]
    global_model, own = problem.start, [problem.start for _ in range(5)]
    local_models = [problem.start for _ in range(5)]
    for number, clients in enumerate(rounds, start=1):
        for client in clients:
            own[client] = sgd(problem, own[client] | {n: global_model[n] for n in shared}, number, client)
            local_models[client] = sgd(problem, local_models[client], number, client)
        global_model = average([own[client] for client in clients], [problem.sizes[client] for client in clients])
    assert all_same(models(per), own, 1e-10)
    assert all_same(models(per, "received"), [own[i] | {n: global_model[n] for n in shared} for i in range(5)], 1e-10)
    assert all_same(models(local), local_models, 1e-10)


def test_pfedme_with_infinite_lambda_keeps_initial_model(net: nn.Module) -> None:
    """For λ → ∞, θ̃_i → w_i; with ηλ below 1, no model changes."""
    start = {name: weight.double() for name, weight in net.state_dict().items()}
    distances = []
    for lam in (1e2, 1e4, 1e6):
        run = simulate(PFedMe(lam=lam, lr=0.5 / lam, personal_lr=0.5 / lam), net)
        distances.append(max(float((run.personal(0)[n] - start[n]).abs().max()) for n in start))
    assert distances[0] > 10 * distances[1] > 100 * distances[2] > 0
