"""FedRep, FedBABU, LG-FedAvg, FedBN, FedAS and FedCAC: rounds by hand, and the limits in which they are others."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import alike, refusal, same, tiny_federation
from fedtailor.methods import FedAlt, FedAS, FedAvg, FedBABU, FedBN, FedCAC, FedPer, FedRep, FedSim, LGFedAvg, Local
from fedtailor.methods.split_by_data import overlaps
from fedtailor.trees import stack
from problem import Problem, Weights, average, make_problem

EXACT = 1e-10
SCHEDULE = [[0, 1, 2, 3, 4], [1, 3, 4], [0, 3]]  # all; then some; then one who was away
EVERYONE = [[0, 1, 2, 3, 4]] * 3
HEAD, BODY = ("head.weight", "head.bias"), ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def models(run: ft.Run, moment: str = "received") -> list[dict[str, Any]]:
    return [run.personal(client, moment) for client in range(run.num_clients)]


# 1. by hand


def only(weights: Weights, names: Iterable[str]) -> Weights:
    return {name: weights[name] for name in names}


@dataclass(frozen=True)
class Descent:
    """SGD as the papers write it; what is not moved is not touched, by momentum or weight decay either."""

    problem: Problem
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __call__(self, weights: Weights, names: Sequence[str], t: int, client: int, epochs: int) -> Weights:
        weights, velocity = dict(weights), {name: torch.zeros_like(weights[name]) for name in names}
        for e in range(epochs):
            for batch in self.problem.batches(t, client, e):
                gradient = self.problem.gradient(weights, batch)
                for name in names:
                    step = gradient[name] + self.weight_decay * weights[name]
                    velocity[name] = self.momentum * velocity[name] + step
                    weights[name] = weights[name] - self.lr * velocity[name]
        return weights


SGD = pytest.mark.parametrize(
    "sgd", [{}, {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}], ids=["plain", "momentum"]
)


@SGD
def test_fedrep_by_hand(sgd: dict[str, Any]) -> None:
    """First the head on the received body, then the body under the new head; the frozen part does not drift."""
    problem = make_problem()
    run, descend = problem.run(FedRep(head_epochs=3, epochs=2, **sgd), SCHEDULE), Descent(problem, **sgd)
    body = only(problem.start, BODY)
    heads = [only(problem.start, HEAD)] * 5
    trained = [problem.start] * 5
    for t, clients in enumerate(SCHEDULE, start=1):
        for i in clients:
            with_new_head = descend({**body, **heads[i]}, HEAD, t, i, epochs=3)
            trained[i] = descend(with_new_head, BODY, t, i, epochs=2)
            heads[i] = only(trained[i], HEAD)
        body = average([only(trained[i], BODY) for i in clients], [problem.sizes[i] for i in clients])
    assert same(run.server["params"], body, EXACT)
    assert alike(models(run), [{**body, **head} for head in heads], EXACT)
    assert alike(models(run, "trained"), trained, EXACT)


@SGD
def test_fedbabu_by_hand(sgd: dict[str, Any]) -> None:
    """The body is trained under the head of the start; to be used, a copy of all of it is fine-tuned, and forgotten."""
    problem = make_problem()
    run, descend = problem.run(FedBABU(tuning_epochs=3, **sgd), SCHEDULE), Descent(problem, **sgd)
    body, head = only(problem.start, BODY), only(problem.start, HEAD)
    trained = [problem.start] * 5
    for t, clients in enumerate(SCHEDULE, start=1):
        for i in clients:
            trained[i] = descend({**body, **head}, BODY, t, i, epochs=2)
        body = average([only(trained[i], BODY) for i in clients], [problem.sizes[i] for i in clients])
    next_round = len(SCHEDULE) + 1
    tuned = [descend({**body, **head}, BODY + HEAD, next_round, i, epochs=3) for i in range(5)]
    assert same(run.server["params"], body, EXACT)
    assert alike(models(run), tuned, EXACT)
    assert alike([run.personal(i, "trained") for i in (0, 1, 3, 4)], [trained[i] for i in (0, 1, 3, 4)], EXACT)


@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_lg_fedavg_by_hand(weights: Any) -> None:
    problem = make_problem()
    run, descend = problem.run(LGFedAvg(weights=weights), SCHEDULE), Descent(problem)
    head = only(problem.start, HEAD)
    trained = [problem.start] * 5
    for t, clients in enumerate(SCHEDULE, start=1):
        for i in clients:
            trained[i] = descend({**trained[i], **head}, BODY + HEAD, t, i, epochs=2)
        shares = [problem.sizes[i] if weights == "size" else 1 for i in clients]
        head = average([only(trained[i], HEAD) for i in clients], shares)
    assert same(run.server["params"], head, EXACT)
    assert alike(models(run), [{**own, **head} for own in trained], EXACT)
    assert alike(models(run, "trained"), trained, EXACT)


class Shortcut(nn.Module):
    """Its batch normalisation is called `downsample.1`, as in a well-known network: nothing says "bn"."""

    def __init__(self) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.downsample(x)))  # type: ignore[no-any-return]


def shortcut(sizes: Sequence[int] = (6, 3, 9)) -> Problem:
    """Whole batches only: a part of one is filled up, which would change its statistics."""
    torch.manual_seed(0)
    return Problem(tiny_federation(sizes), Shortcut().double())


def test_fedbn_by_hand() -> None:
    """γ, β and the running statistics of every client stay its own; the rest is averaged."""
    problem, lr = shortcut(), 0.1
    fed, schedule = problem.fed, [[0, 1, 2], [1, 2]]
    run = problem.run(FedBN(lr=lr), schedule)
    shared, normal = ["downsample.0.weight", "downsample.0.bias", *HEAD], ["downsample.1.weight", "downsample.1.bias"]

    def before(w: Weights, samples: Tensor) -> Tensor:
        """What is normalised."""
        return F.linear(fed.x[samples], w["downsample.0.weight"], w["downsample.0.bias"])

    def loss(w: Weights, samples: Tensor) -> Tensor:
        x = before(w, samples)
        z = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt() * w[normal[0]] + w[normal[1]]
        return F.cross_entropy(F.linear(torch.tanh(z), w["head.weight"], w["head.bias"]), fed.y[samples])

    common = only(problem.start, shared)
    begin = {"downsample.1.running_mean": torch.zeros(5), "downsample.1.running_var": torch.ones(5)}
    own = [{**only(problem.start, normal), **{n: v.double() for n, v in begin.items()}} for _ in range(3)]
    trained: list[Weights] = [{} for _ in range(3)]
    for t, clients in enumerate(schedule, start=1):
        for i in clients:
            w = {**common, **own[i]}
            for e in range(2):
                for batch in problem.batches(t, i, e):
                    live = {name: w[name].detach().requires_grad_() for name in shared + normal}
                    slopes = torch.autograd.grad(loss(live, batch), list(live.values()))
                    w |= {name: live[name].detach() - lr * g for name, g in zip(live, slopes, strict=True)}
            parts = [before(w, batch) for batch in torch.split(problem.everything(i), 3)]
            w["downsample.1.running_mean"] = torch.stack([x.mean(0) for x in parts]).mean(0)
            w["downsample.1.running_var"] = torch.stack([x.var(0) for x in parts]).mean(0)
            trained[i], own[i] = w, only(w, own[i])
        common = average([only(trained[i], shared) for i in clients], [problem.sizes[i] for i in clients])
    assert same(run.server["params"], common, EXACT)
    for i in range(3):
        received, held = run.personal(i, "received"), run.personal(i, "trained")
        assert same(only(received, [*shared, *own[i]]), {**common, **own[i]}, EXACT)
        assert same(only(held, trained[i]), trained[i], EXACT)


def features(problem: Problem, w: Weights, samples: Tensor) -> Tensor:
    x = torch.tanh(F.linear(problem.fed.x[samples], w["fc1.weight"], w["fc1.bias"]))
    return torch.tanh(F.linear(x, w["fc2.weight"], w["fc2.bias"]))


def align(problem: Problem, received: Weights, own: Weights, lr: float, t: int, i: int) -> Weights:
    """One epoch that brings features of the received body near the class means of the own one's."""
    everything, y = problem.everything(i), problem.fed.y
    means = {
        k: features(problem, own, everything[y[everything] == k]).mean(0) for k in set(y[everything].tolist())
    }  # q_k
    body = only(received, BODY)
    for batch in problem.batches(t, i, 0):
        live = {name: w.detach().requires_grad_() for name, w in body.items()}
        loss = torch.zeros(())
        for k in set(y[batch].tolist()):
            members = features(problem, live, batch[y[batch] == k])
            loss = loss + F.mse_loss(members, means[k].expand_as(members))
        slopes = torch.autograd.grad(loss, list(live.values()))
        body = {name: w.detach() - lr * g for (name, w), g in zip(live.items(), slopes, strict=True)}
    return body


def fisher(problem: Problem, w: Weights, i: int) -> float:
    """Σ over batches of the squared norm of the gradient of the batch's mean loss."""
    return sum(
        float(sum(g.square().sum() for g in problem.gradient(w, batch).values()))
        for batch in torch.split(problem.everything(i), problem.batch_size)
    )


def test_fedas_by_hand() -> None:
    problem = make_problem()
    run, descend = problem.run(FedAS(align_lr=0.5), SCHEDULE), Descent(problem)
    body = only(problem.start, BODY)
    own = [problem.start] * 5
    for t, clients in enumerate(SCHEDULE, start=1):
        weights = []
        for i in clients:
            aligned = align(problem, body, own[i], 0.5, t, i)
            own[i] = descend({**aligned, **only(own[i], HEAD)}, BODY + HEAD, t, i, epochs=2)
            weights.append(fisher(problem, own[i], i))
        body = average([only(own[i], BODY) for i in clients], weights)
    assert same(run.server["params"], body, EXACT)
    assert alike(models(run), own, EXACT) and alike(models(run, "trained"), own, EXACT)


Mask = set[tuple[str, int]]  # critical numbers: their tensor, and their place in it


def most_sensitive(pre: Weights, post: Weights, tau: float) -> Mask:
    mask: Mask = set()
    for name in post:
        c = ((post[name] - pre[name]) * post[name]).abs().flatten().tolist()
        largest = sorted(c, reverse=True)[: int(tau * len(c))]
        mask |= {(name, place) for place, value in enumerate(c) if value >= min(largest, default=1e9)}
    return mask


def mix(mask: Mask, custom: Weights, common: Weights) -> Weights:
    mixed = {}
    for name, weight in common.items():
        values = weight.flatten().clone()
        for place in range(len(values)):
            if (name, place) in mask:
                values[place] = custom[name].flatten()[place]
        mixed[name] = values.reshape(weight.shape)
    return mixed


@pytest.mark.parametrize(("tau", "beta"), [(0.5, 100), (0.3, 4), (0.7, 2)])
def test_fedcac_by_hand(tau: float, beta: int) -> None:
    """A server that mixes; it keeps the last model and mask of everyone who ever took part."""
    problem, schedule = make_problem(), [[0, 1, 2], [1, 3, 4], [0, 3]]
    run, descend = problem.run(FedCAC(tau=tau, beta=beta), schedule), Descent(problem)
    common = problem.start
    last: dict[int, Weights] = {}
    masks: dict[int, Mask] = {}
    nxt = [problem.start] * 5  # where everyone would start
    for t, clients in enumerate(schedule):
        for i in clients:
            last[i] = descend(nxt[i], BODY + HEAD, t + 1, i, epochs=2)
            masks[i] = most_sensitive(nxt[i], last[i], tau)
        common = average([last[i] for i in clients], [problem.sizes[i] for i in clients])
        overlap = {(i, j): 1 - len(masks[i] ^ masks[j]) / (2 * len(masks[i])) for i in masks for j in masks if i != j}
        usual = sum(overlap.values()) / len(overlap)
        threshold = usual + (t + 1) / beta * (max(overlap.values()) - usual)
        for i in range(5):
            if i not in masks:
                nxt[i] = common
                continue
            group = [j for j in masks if j == i or overlap[i, j] >= threshold]
            nxt[i] = mix(masks[i], average([last[j] for j in group], [1] * len(group)), common)
    assert same(run.server["params"], common, EXACT)
    assert alike(models(run), nxt, EXACT)
    assert alike(models(run, "trained"), [last.get(i, problem.start) for i in range(5)], EXACT)


# 2. limits


def test_fedrep_without_head_epochs_trains_the_body_of_fedbabu() -> None:
    problem = make_problem()
    rep, babu = (problem.run(m, SCHEDULE) for m in (FedRep(head_epochs=0, epochs=2), FedBABU()))
    assert same(rep.server, babu.server)
    assert all(torch.equal(m["head.weight"], problem.start["head.weight"]) for m in models(rep))


def test_fedrep_with_as_many_epochs_of_both_is_fedalt() -> None:
    problem = make_problem()
    rep, alt = (problem.run(m, SCHEDULE) for m in (FedRep(head_epochs=2, epochs=2), FedAlt(epochs=2)))
    assert same(rep.server, alt.server) and alike(models(rep), models(alt))


def test_fedrep_begins_with_the_head() -> None:
    """Its first head is fitted to the common body, so it does not depend on what is done to the body afterwards."""
    problem = make_problem()
    short, long = (problem.run(FedRep(epochs=e), [[0, 1, 2, 3, 4]]) for e in (1, 5))
    for one, other in zip(models(short, "trained"), models(long, "trained"), strict=True):
        assert same(only(one, HEAD), only(other, HEAD))
        assert not same(only(one, BODY), only(other, BODY), 1e-3)


def test_fedbabu_without_tuning_gives_everyone_the_same_model() -> None:
    problem = make_problem()
    run = problem.run(FedBABU(tuning_epochs=0), SCHEDULE)
    expected = {**run.server["params"], **only(problem.start, HEAD)}
    assert alike(models(run), [expected] * 5)


def test_asking_fedbabu_for_a_model_changes_nothing() -> None:
    """What is fine-tuned to be evaluated is a copy: neither the common body nor the frozen head moves."""
    problem = make_problem()
    asked, not_asked = (
        ft.simulate(
            FedBABU(), problem.net, problem.fed, schedule=SCHEDULE, batch_size=3, dtype=torch.float64,
            evaluate_every=every,
        )
        for every in (1, 3)
    )  # fmt: skip
    assert same(asked.server, not_asked.server)
    assert all(same(asked.client(i)["personal"], only(problem.start, HEAD)) for i in range(5))


def test_lg_fedavg_is_fedsim_with_the_body_kept() -> None:
    problem = make_problem()
    mirror = FedSim(split=("fc1", "fc2"), epochs=2, weights="uniform")
    lg, sim = (problem.run(m, SCHEDULE) for m in (LGFedAvg(), mirror))
    assert same(lg.server, sim.server) and alike(models(lg), models(sim))


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_fedbn_without_batch_normalisation_is_fedavg(weights: Any) -> None:
    problem = make_problem()
    bn, avg = (problem.run(m, SCHEDULE) for m in (FedBN(weights=weights), FedAvg(weights=weights)))
    assert same(bn.server, avg.server) and alike(models(bn), models(avg))


def test_fedbn_finds_batch_normalisation_by_its_type() -> None:
    problem = shortcut()
    bn, sim = (problem.run(m, [[0, 1, 2], [1, 2]]) for m in (FedBN(), FedSim(split=("downsample.1",), epochs=2)))
    assert same(bn.server, sim.server) and alike(models(bn), models(sim))
    assert not any(name.startswith("downsample.1") for name in bn.server["params"])


@pytest.mark.parametrize(
    "method", [LGFedAvg(), FedBN(), FedCAC(), FedAS(align_epochs=0)], ids=lambda m: type(m).__name__
)
def test_of_one_client_it_is_training_alone(method: ft.Method) -> None:
    for problem in (make_problem((8,)), shortcut((9,))):
        run, local = (problem.run(m, [[0]] * 3) for m in (method, Local()))
        assert alike(models(run), models(local), 1e-12)


def test_fedas_without_alignment_and_fisher_weights_is_fedper() -> None:
    problem = make_problem()
    plain, per = (problem.run(m, SCHEDULE) for m in (FedAS(align_epochs=0, weights="size"), FedPer()))
    assert same(plain.server, per.server) and alike(models(plain, "trained"), models(per, "trained"))
    assert plain.records[0]["bytes_up"] == per.records[0]["bytes_up"]


def test_fedcac_without_critical_parameters_is_fedavg() -> None:
    problem = make_problem()
    cac, avg = (problem.run(m, SCHEDULE) for m in (FedCAC(tau=0.0), FedAvg()))
    assert same(cac.server["params"], avg.server["params"]) and alike(models(cac), models(avg))


def test_fedcac_with_all_parameters_critical_is_a_plain_mean() -> None:
    """Masks are alike then, so all collaborate, however late it is."""
    problem = make_problem()
    cac, avg = (problem.run(m, EVERYONE) for m in (FedCAC(tau=1.0, beta=1), FedAvg(weights="uniform")))
    assert alike(models(cac), models(avg), 1e-12)


def test_fedcac_ends_with_critical_parameters_that_are_everyones_own() -> None:
    """Past round β nobody collaborates, but for ties."""
    problem = make_problem()
    run = problem.run(FedCAC(beta=1), EVERYONE)
    for i in range(5):
        mask = {name: whole[i] for name, whole in run.server["critical"].items()}
        received, trained = run.personal(i, "received"), run.personal(i, "trained")
        for name in mask:
            expected = torch.where(mask[name], trained[name], run.server["params"][name])
            assert torch.allclose(received[name], expected, atol=1e-12, rtol=0)


# 3. every part has an effect


@pytest.mark.parametrize(
    ("on", "off"),
    [
        (FedRep(), FedRep(head_epochs=0)), (FedRep(), FedPer(epochs=1)), (FedBABU(), FedBABU(tuning_epochs=0)),
        (FedBABU(tuning_epochs=0), FedAvg()), (LGFedAvg(), LGFedAvg(weights="size")), (LGFedAvg(), FedPer()),
        (FedAS(), FedAS(align_epochs=0)), (FedAS(), FedAS(weights="size")), (FedAS(), FedAS(weights="uniform")),
        (FedCAC(), FedCAC(tau=0.0)), (FedCAC(), FedCAC(tau=0.9)), (FedCAC(), FedCAC(beta=1)),
    ],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_every_part_has_an_effect(on: ft.Method, off: ft.Method) -> None:
    problem = make_problem()
    one, other = (models(problem.run(m, EVERYONE)) for m in (on, off))
    assert not alike(one, other, 1e-6)


ALL: list[Callable[[], ft.Method]] = [FedRep, FedBABU, LGFedAvg, FedBN, FedAS, FedCAC]


@pytest.mark.parametrize("kind", ALL)
def test_it_is_neither_training_alone_nor_one_model_for_all(kind: Callable[[], ft.Method]) -> None:
    problem = shortcut() if kind is FedBN else make_problem()
    schedule = [list(range(problem.num_clients))] * 3
    found, alone, average = (models(problem.run(m, schedule)) for m in (kind(), Local(), FedAvg()))
    assert not alike(found, alone, 1e-4) and not alike(found, average, 1e-4)
    assert not same(found[0], found[1], 1e-4)  # a model of one's own


# 4. traps


def test_fedas_compares_every_sample_with_its_class_mean() -> None:
    """Comparing class means would do nothing in round 1, where both bodies are the same and the batch is everything."""
    problem = make_problem((6, 5), batch_size=6)
    with_alignment, without = (problem.run(FedAS(align_epochs=e), [[0, 1]]) for e in (1, 0))
    assert not alike(models(with_alignment), models(without), 1e-5)


def test_fedas_does_not_hand_one_clients_aligned_body_to_the_next() -> None:
    problem = make_problem()
    forth, back = (problem.run(FedAS(), [order] * 2) for order in ([0, 1, 2], [2, 1, 0]))
    assert same(forth.server, back.server, 1e-12)


def test_fedas_counts_all_alike_where_all_have_converged() -> None:
    """Squares of small gradients vanish: no client has a weight then, and there is still an average."""
    received = stack([{"params": {"w": torch.tensor([v])}, "fisher": torch.tensor(0.0)} for v in (1.0, 3.0)])
    model = ft.wrap(make_problem().net)
    exchange = ft.Exchange(1, [0, 1], 2, torch.tensor([5, 1]), model, sent={}, received=received)
    assert FedAS().receive({}, exchange)["params"]["w"].item() == 2.0


def test_fedcac_marks_a_share_of_every_tensor_and_nothing_that_stood_still() -> None:
    class Dead(nn.Module):
        """A layer of which one half never moves."""

        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.fc(x)) * torch.tensor([1.0, 1, 1, 0, 0, 0], dtype=x.dtype))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    problem = Problem(tiny_federation((6, 5)), Dead().double())
    run = problem.run(FedCAC(tau=0.75), [[0, 1]])
    for name, mask in run.server["critical"].items():
        size = prod(mask.shape[1:])
        expected = int(0.75 * size) if name == "head.bias" else size // 2
        assert mask.flatten(1).sum(1).tolist() == [expected] * 2
    assert not run.server["critical"]["fc.weight"][:, 3:].any()


def test_the_overlap_is_measured_by_ones_own_mask() -> None:
    """Masks may differ in size, where little moved; then it is not the same both ways."""
    overlap = overlaps({"w": torch.tensor([[True, True, False], [False, True, False], [False, False, False]])})
    assert overlap[:2, :2].tolist() == [[1.0, 0.75], [0.5, 1.0]]
    assert bool(overlap.isfinite().all())  # also of a client for whom nothing is critical


def test_rounding_does_not_part_clients_that_overlap_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of twelve times 0.1 is above 0.1."""
    everyone = torch.ones(4, dtype=torch.bool)
    monkeypatch.setattr("fedtailor.methods.split_by_data.overlaps", lambda masks: torch.full((4, 4), 0.1).double())
    assert FedCAC(beta=1)._collaborators({"w": everyone[:, None]}, everyone, round=9).all()


def test_who_has_nothing_critical_has_no_say_in_who_collaborates() -> None:
    """Its overlaps would be far below 0, and so would their mean, the threshold of everyone else."""
    masks = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    found = FedCAC()._collaborators({"w": masks}, torch.ones(4, dtype=torch.bool), round=1)
    without = FedCAC()._collaborators({"w": masks[:3]}, torch.ones(3, dtype=torch.bool), round=1)
    assert torch.equal(found[:3, :3], without) and found[3].tolist() == [False, False, False, True]
    assert not without.all()


def test_fedcac_gives_who_was_away_what_it_would_start_with_now() -> None:
    """Not the mixture of its last round: the common part is today's, and a stranger has nothing but that."""
    problem = make_problem()
    run = problem.run(FedCAC(), [[0, 1, 2], [1, 2]])
    absent, common = run.personal(0, "received"), run.server["params"]
    for name, mask in run.server["critical"].items():
        assert torch.equal(absent[name][~mask[0]], common[name][~mask[0]])
    assert same(run.personal(4, "received"), common)


def test_fedcac_leaves_running_statistics_to_the_average() -> None:
    problem = shortcut()
    cac, avg = (problem.run(m, [[0, 1, 2]]) for m in (FedCAC(), FedAvg()))
    for i in range(3):
        for kind in ("running_mean", "running_var"):
            name = f"downsample.1.{kind}"
            assert torch.equal(cac.personal(i, "received")[name], cac.personal(0, "received")[name])
            assert torch.allclose(cac.personal(i, "received")[name], avg.server["params"][name])


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (FedRep, {"head_epochs": -1}, "head_epochs must be at least 0"),
        (FedBABU, {"tuning_epochs": -1}, "tuning_epochs must be at least 0"),
        (LGFedAvg, {"weights": "fisher"}, "weights must be 'size' or 'uniform'"),
        (FedAS, {"weights": "best"}, "weights must be 'fisher' or 'size' or 'uniform'"),
        (FedAS, {"align_lr": 0.0}, "align_lr must be above 0"),
        (FedAS, {"align_epochs": -1}, "align_epochs must be at least 0"),
        (FedCAC, {"tau": 1.5}, "tau must be from 0 to 1"),
        (FedCAC, {"beta": 0}, "beta must be above 0"),
    ],
)
def test_senseless_fields_are_refused_in_words(kind: Any, fields: dict[str, Any], words: str) -> None:
    assert words in refusal(lambda: kind(**fields))


@pytest.mark.parametrize("kind", [FedRep, FedBABU, LGFedAvg, FedAS])
def test_a_model_without_a_head_is_refused(kind: Callable[[], ft.Method]) -> None:
    problem = make_problem()
    model = ft.wrap(problem.net, head=None)
    assert "head" in refusal(lambda: ft.simulate(kind(), model, problem.fed, rounds=1))
