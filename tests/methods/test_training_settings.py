"""Which settings of local training each method accepts, and why others do not."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from conftest import error_message, same
from fedtailor.core.local_training import LocalTraining, training_settings
from fedtailor.core.trees import Tree, flatten, map_leaves
from fedtailor.experiments.experiment import make_experiment
from fedtailor.methods import METHODS
from support.problem import make_problem

# clients may keep their optimizers
KEPT = [
    "fedavg", "fedavgft", "fedprox", "fedexp", "fedadmm", "fedadam", "fedyogi", "fedadagrad", "fedper", "fedrep",
    "fedbabu", "lgfedavg", "fedbn", "fedalt", "fedsim", "fedas", "fedcac", "fedlag", "local", "ditto", "fedphp",
    "fedrod", "fedapa", "fedamp", "fedala", "fedfomo", "pfedla", "fedproto", "fedgh", "fedpac", "dbe", "fedcp", "gpfl",
    "perfedavg", "centralized",
]  # fmt: skip
# the equations of the method assume SGD
FIXED = {
    "scaffold": "its control variates assume plain SGD",
    "fedapm": "its local problems are solved with plain SGD",
    "pfedme": "its step on w_i is a gradient step on the Moreau envelope",
    "lpproj": "both of its steps are plain gradient steps",
    "selffl": "Equation 8 gives the number of steps of plain gradient descent",
    "pfedhn": "its local steps are those of the authors",
    "fedaf": "its clients train no model",
    "apple": "p_i has its own learning rate through a scaled gradient",
    "lag": "its inner method trains",
    "averaged": "its inner method trains",
}
ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 0.02, "momentum": 0.0}
VALUES: dict[str, Any] = {"momentum": 0.9, "optimizer": "adam", "keep_optimizer_state": True}
PROBLEM, ROUNDS = make_problem(), ((0, 1, 2, 3, 4), (1, 3, 4), (0, 2, 3))


def test_table_lists_all_methods() -> None:
    assert sorted([*KEPT, *FIXED]) == sorted(METHODS)


@pytest.mark.parametrize("name", FIXED)
def test_method_that_assumes_sgd_rejects_other_optimizers_and_says_why(name: str) -> None:
    settings: dict[str, Any] = {"optimizer": "adam", "clip_norm": 1.0}
    for field, value in settings.items():
        make: Any = lambda field=field, value=value: METHODS[name](**{field: value})  # noqa: E731
        message = error_message(make)
        assert FIXED[name] in message and message.endswith(f"; remove {field}.")


def test_experiment_says_why_a_setting_is_fixed() -> None:
    for field in VALUES:
        assert "SCAFFOLD: its control variates assume plain SGD" in error_message(
            lambda field=field: make_experiment({"method": {"name": "scaffold", field: VALUES[field]}})  # type: ignore[misc]
        )


@pytest.mark.parametrize("name", sorted(FIXED.keys() - {"apple", "pfedhn"}))  # these two have momentum
def test_method_without_optimizer_state_says_why_it_keeps_none(name: str) -> None:
    message = error_message(lambda: METHODS[name](keep_optimizer_state=True))  # type: ignore[call-arg]
    reason = "this is a setting of `inner`" if name in ("lag", "averaged") else "so its clients have no optimizer state"
    assert FIXED[name] in message and message.endswith(f"{reason}; remove keep_optimizer_state.")


def test_own_method_that_does_not_keep_its_state_raises() -> None:
    class Forgetful(LocalTraining):
        pass

    assert "train with `self.optimize`" in error_message(lambda: Forgetful(keep_optimizer_state=True))


def run_of(method: ft.Method, engine: Any) -> ft.Run:
    settings: dict[str, Any] = {} if method.pools_data else {"schedule": ROUNDS}
    return ft.simulate(
        method, PROBLEM.net, PROBLEM.fed, batch_size=3, dtype=torch.float64, engine=engine, evaluate_every=3, **settings
    )


class TorchTraining:
    """`LocalTraining.optimize` with torch.optim: one optimizer per client and trained model, which is never reset."""

    def __init__(self) -> None:
        self.optimizers: dict[tuple[int, int], tuple[Tree, torch.optim.Optimizer]] = {}
        self.calls: Counter[tuple[int, int]] = Counter()  # (client, round) -> number of models trained so far

    def optimize(
        self, method: LocalTraining, ctx: ft.ClientContext, objective: Any, start: Tree, state: Tree, *,
        key: str = "optimizer", lr: float | None = None, epochs: int | None = None,
    ) -> tuple[Tree, Tree]:  # fmt: skip
        client = int(ctx.index)
        model = (client, self.calls[client, ctx.round])
        self.calls[client, ctx.round] += 1
        if model not in self.optimizers:
            live = map_leaves(lambda leaf: leaf.detach().clone().requires_grad_(), start)
            self.optimizers[model] = live, self.make(method, lr or method.lr, list(flatten(live).values()))
        live, optimizer = self.optimizers[model]
        map_leaves(lambda leaf, value: leaf.data.copy_(value), live, start)

        def step(carry: Tree, batch: ft.Batch) -> Tree:
            for leaf in flatten(live).values():
                leaf.grad = torch.zeros_like(leaf)  # an unused parameter has the gradient 0
            with torch.enable_grad():
                objective(live, batch).backward()
            optimizer.step()
            return carry

        ctx.scan(step, {"none": ctx.size}, **({"epochs": epochs} if epochs is not None else method.duration))
        return map_leaves(lambda leaf: leaf.detach().clone(), live), {key: state[key]}

    @staticmethod
    def make(method: LocalTraining, lr: float, leaves: list[Tensor]) -> torch.optim.Optimizer:
        if method.optimizer == "adam":
            return torch.optim.Adam(leaves, lr=lr)
        return torch.optim.SGD(leaves, lr=lr, momentum=method.momentum)


@pytest.mark.parametrize("settings", [ADAM, {"lr": 0.05, "momentum": 0.9}], ids=["adam", "momentum"])
@pytest.mark.parametrize("name", sorted({*KEPT} - {"dbe"}))  # DBE has its own steps: see test_representations.py
def test_kept_state_equals_one_torch_optimizer_per_trained_model(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients take part in one to three rounds, so their optimizers have done different numbers of steps."""
    settings = settings | {"weight_decay": 0.0}
    method = METHODS[name](**settings | {"keep_optimizer_state": True})
    found, reset = run_of(method, "sequential"), run_of(METHODS[name](**settings), "sequential")
    reference = TorchTraining()
    monkeypatch.setattr(LocalTraining, "optimize", lambda *args, **more: reference.optimize(*args, **more))
    expected = run_of(method, "sequential")
    for client in range(1 if method.pools_data else 5):
        assert same(found.personal(client, "trained"), expected.personal(client, "trained"), 1e-12)
    assert same(found.server, expected.server, 1e-12) and not same(found.personal(3), reset.personal(3), 1e-6)


@pytest.mark.parametrize("name", KEPT)
def test_method_with_adam_is_equal_on_both_engines_and_keeps_its_state(name: str) -> None:
    """The state starts with the shapes that training returns, and it counts the steps of a client's rounds."""
    more: dict[str, Any] = {"steps": 4, "clip_norm": 5.0, "lr_schedule": "cosine", "drop_last": True}
    method = METHODS[name](**ADAM | more | {"keep_optimizer_state": True})
    one, mapped = (run_of(method, engine) for engine in ("sequential", "vectorized"))
    assert same(one.client(3), mapped.client(3), 1e-8)
    sgd = run_of(METHODS[name](lr=0.02), "sequential")  # type: ignore[call-arg]
    assert not same(one.personal(3, "trained"), sgd.personal(3, "trained"))
    if name != "centralized":
        state = one.client(3).get("inner", one.client(3))["optimizer"]
        assert float(state["steps"]) == 4 * len(ROUNDS)  # this client takes part in all rounds


def test_every_local_training_method_has_settings_of_the_optimizer() -> None:
    assert {name for name, kind in METHODS.items() if issubclass(kind, LocalTraining)} == {
        *KEPT, "scaffold", "apple",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nesterov": True}, "nesterov must be false if momentum is 0"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum applies to the optimizer sgd"),
        ({"betas": (0.8, 0.9)}, "betas applies to the optimizer adam or adamw"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "betas must be a tuple of two numbers, at least 0 and below 1"),
        ({"optimizer": "adam", "betas": 0.9}, "betas must be a tuple of two numbers"),
        ({"optimizer": "lion"}, "optimizer must be 'sgd' or 'adam' or 'adamw'"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"lr_schedule": "linear"}, "lr_schedule must be"),
        ({"lr_step_rounds": 5}, "lr_step_rounds applies to the schedule step"),
        ({"lr_schedule": "cosine", "lr_step_factor": 0.5}, "lr_step_factor applies to the schedule step"),
        ({"warmup_rounds": -1}, "warmup_rounds must be at least 0"),
    ],
    ids=str,
)
def test_invalid_settings_of_local_training_raise(settings: dict[str, Any], words: str) -> None:
    assert words in error_message(lambda: ft.methods.FedAvg(**settings))


def test_default_momentum_of_a_method_does_not_prevent_adam_in_it_and_in_its_baseline() -> None:
    """FedPAC has momentum by default, which the user did not ask for, and `compare` copies its settings."""
    method = ft.methods.FedPAC(optimizer="adam", lr=0.01)
    assert ft.methods.Local(**training_settings(method)).optimizer == "adam"
    assert "momentum applies" in error_message(lambda: ft.methods.FedPAC(optimizer="adam", momentum=0.9))


def test_gpfl_with_adamw_and_weight_decay_raises() -> None:
    assert "weight_decay must be 0" in error_message(lambda: ft.methods.GPFL(optimizer="adamw", weight_decay=0.1))


def test_scaffold_control_variates_with_schedule_and_steps_are_mean_gradients() -> None:
    """With one batch per client, (θ − y) / (K η) is the gradient at θ for K = 1, whatever the learning rate."""
    problem = make_problem((6, 6), batch_size=6)
    run = problem.run(ft.methods.Scaffold(steps=1, warmup_rounds=3), ((0, 1),))
    for client in range(2):
        grad = problem.gradient(problem.start, problem.all_samples(client))
        assert same(run.client(client)["control"], grad, 1e-12)
