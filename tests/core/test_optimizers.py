"""Optimizers and schedules equal those of `torch.optim`, on both kinds of engines."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import SIZES, same, tiny_federation
from fedtailor.core.optimizers import Schedule
from fedtailor.core.trees import Tree, stack
from support.contexts import make_engine, params_of, run_both

EPOCHS = 4  # the first client takes 20 steps, the others 8, 16, and 4, which are masked under vmap
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.3},
    "decay": {"lr": 0.3, "weight_decay": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "adam": {"optimizer": "adam", "lr": 0.05},
    "adam, decay": {"optimizer": "adam", "lr": 0.05, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "lr": 0.05, "weight_decay": 0.3},
    "sgd, clipped": {"lr": 0.3, "clip_norm": 0.2, "weight_decay": 0.1},
    "adam, clipped": {"optimizer": "adam", "lr": 0.05, "eps": 0.1, "clip_norm": 0.2},
}
OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def batches_of(ctx: ft.ClientContext, **duration: Any) -> list[tuple[Tensor, Tensor]]:
    batches: list[tuple[Tensor, Tensor]] = []

    def step(state: Tree, batch: ft.Batch) -> Tree:
        batches.append((batch.x, batch.y))
        return state

    ctx.scan(step, {}, **duration)
    return batches


def train_with_torch(net: nn.Module, batches: list[tuple[Tensor, Tensor]], **settings: Any) -> Tree:
    """Train a copy of the network with an optimizer of `torch.optim`."""
    live = {name: p.clone().requires_grad_() for name, p in params_of(net).items()}
    clip_norm, kind = settings.pop("clip_norm", None), OPTIMIZERS[settings.pop("optimizer", "sgd")]
    optimizer = kind(live.values(), **settings)
    for x, y in batches:
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(torch.func.functional_call(net, live, (x,)), y))
        if clip_norm:
            nn.utils.clip_grad_norm_(list(live.values()), clip_norm)
        optimizer.step()
    return {name: p.detach() for name, p in live.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_optimizer_equals_torch_over_20_steps_on_both_engines(net: nn.Module, name: str) -> None:
    contexts = [make_engine(net)[1]._context(client, 1) for client in range(len(SIZES))]
    batches = [batches_of(ctx, epochs=EPOCHS) for ctx in contexts]
    assert [len(own) for own in batches] == [20, 8, 16, 4]
    expected = stack([train_with_torch(net, own, **SETTINGS[name]) for own in batches])
    one, mapped = run_both(net, lambda ctx: ctx.optimize(ctx.loss, params_of(net), epochs=EPOCHS, **SETTINGS[name]))
    assert same(one, expected, 1e-12) and same(mapped, expected, 1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("settings", [SETTINGS["momentum"], SETTINGS["adam"], SETTINGS["sgd"]], ids=str)
def test_kept_optimizer_state_equals_one_optimizer_over_all_rounds(
    net: nn.Module, settings: dict[str, Any], engine: str
) -> None:
    """Client 3 trains in rounds 1 and 3 only; its averages and number of steps survive round 2."""
    clients = [[0, 1, 3], [0, 2], [0, 1, 2, 3]]
    method = ft.methods.Local(**settings, sampled=True, epochs=1, keep_optimizer_state=True)
    federation = {"batch_size": 2, "dtype": torch.float64, "schedule": clients, "engine": engine}
    run = ft.simulate(method, net, tiny_federation(), **federation)  # type: ignore[arg-type]
    for client in range(len(SIZES)):
        rounds = [number for number, chosen in enumerate(clients, 1) if client in chosen]
        own = [batch for r in rounds for batch in batches_of(make_engine(net)[1]._context(client, r), epochs=1)]
        assert same(run.personal(client), train_with_torch(net, own, **settings), 1e-12)
    reset = ft.simulate(ft.methods.Local(**settings, sampled=True, epochs=1), net, tiny_federation(), **federation)  # type: ignore[arg-type]
    assert same(run.personal(0), reset.personal(0), 1e-12) == (settings is SETTINGS["sgd"])


def test_drop_last_visits_full_batches_only(net: nn.Module) -> None:
    """Batches of four: clients have 9, 4, 7, and 1 samples; the last one keeps its incomplete batch."""
    contexts = [make_engine(net, batch_size=4)[1]._context(client, 1) for client in range(len(SIZES))]
    sizes = [[len(y) for _, y in batches_of(ctx, epochs=2, drop_last=True)] for ctx in contexts]
    assert sizes == [[4] * 4, [4] * 2, [4] * 2, [1] * 2]
    assert [float(ctx.num_steps(2, drop_last=True)) for ctx in contexts] == [4, 2, 2, 2]
    options: list[dict[str, Any]] = [{"epochs": 3}, {"steps": 7}]
    for duration in options:
        one, mapped = run_both(
            net,
            lambda ctx, d=duration: ctx.optimize(ctx.loss, params_of(net), lr=0.1, drop_last=True, **d),
            batch_size=4,
        )
        own = batches_of(contexts[0], drop_last=True, **duration)
        assert same(one, mapped, 1e-12)
        assert same({name: leaf[0] for name, leaf in one.items()}, train_with_torch(net, own, lr=0.1), 1e-12)


def torch_schedule(optimizer: torch.optim.Optimizer, schedule: Schedule, rounds: int) -> Any:
    schedulers: Any = torch.optim.lr_scheduler
    after: Any = {
        "constant": lambda: schedulers.ConstantLR(optimizer, factor=1.0),
        "step": lambda: schedulers.StepLR(optimizer, schedule.step_rounds, schedule.step_factor),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, rounds - schedule.warmup_rounds),
    }[schedule.kind]()
    if not schedule.warmup_rounds:
        return after
    start = 1 / (schedule.warmup_rounds + 1)
    warmup = schedulers.LinearLR(optimizer, start_factor=start, total_iters=schedule.warmup_rounds)
    return schedulers.SequentialLR(optimizer, [warmup, after], milestones=[schedule.warmup_rounds])


@pytest.mark.filterwarnings("ignore")  # of SequentialLR about the order of calls
@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("kind", ["constant", "step", "cosine"])
def test_schedule_equals_that_of_torch(kind: Any, warmup: int) -> None:
    rounds, schedule = 12, Schedule(kind, step_rounds=2, step_factor=0.5, warmup_rounds=warmup)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, expected = torch_schedule(optimizer, schedule, rounds), []
    for _ in range(rounds):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [schedule.factor(r, rounds) for r in range(1, rounds + 1)] == pytest.approx(expected, abs=1e-12)
    assert schedule.factor(rounds + 1, rounds) == schedule.factor(rounds, rounds)  # evaluation after the last round


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_schedule_scales_each_round(net: nn.Module, engine: Any) -> None:
    method = ft.methods.Local(
        lr=0.4, epochs=1, lr_schedule="step", lr_step_rounds=1, lr_step_factor=0.25, warmup_rounds=1
    )
    run = ft.simulate(method, net, tiny_federation(), rounds=3, batch_size=9, dtype=torch.float64, engine=engine)
    params = net
    for number, lr in ((1, 0.2), (2, 0.4), (3, 0.1)):
        own = batches_of(make_engine(net, batch_size=9)[1]._context(0, number), epochs=1)
        trained = train_with_torch(params, own, lr=lr)
        params = type(net)().double()
        params.load_state_dict(trained)
    assert same(run.personal(0), params_of(params), 1e-12)
