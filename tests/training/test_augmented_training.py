"""Augmentation in training: which inputs it changes, and that records, resuming, and comparisons know it."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import all_same, error_message, models, tiny_federation
from fedtailor.core.trees import Tree
from fedtailor.experiments.deployment import make_deployment
from fedtailor.experiments.experiment import make_experiment
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.runs.records import Record
from fedtailor.training.client_update import make_shared_context
from fedtailor.training.config import TrainingConfig

ALL_STEPS = ft.Augmentation(flip=True, crop=2, cutout=3)
SIZE = 10  # training images of the first client


def image_federation() -> ft.Federation:
    random = np.random.default_rng(0)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.integers(0, 256, (count, 2, 6, 7), np.uint8), random.integers(0, 3, count)

    clients = [(*samples(size), *samples(4)) for size in (SIZE, 3)]
    return ft.Federation.from_arrays(clients, classes=3, mean=(0.4, 0.5), std=(0.2, 0.3))


def linear() -> ft.Model:
    torch.manual_seed(0)
    return ft.wrap(nn.Sequential(nn.Flatten(), nn.Linear(84, 3)).double(), head="1")


def context(fed: ft.Federation, augmentation: ft.Augmentation, round: int = 1) -> ft.ClientContext:
    """Return the context of the first client, with batches of four examples."""
    config = TrainingConfig(batch_size=4, dtype="float64", augmentation=augmentation)
    sizes = torch.tensor([len(own) for own in fed.train])
    shared = make_shared_context(config, linear(), fed, sizes, 1, 1.0)
    return ft.ClientContext(shared, round, torch.tensor(0), sizes[0], fed.train[0])


def training_batches(ctx: ft.ClientContext, epochs: int = 1) -> list[ft.Batch]:
    """Return the batches on which a method trains."""
    seen: list[ft.Batch] = []

    def step(state: Tree, batch: ft.Batch) -> Tree:
        seen.append(batch)
        return state

    ctx.scan(step, {}, epochs=epochs)
    return seen


def inputs_of(batches: list[ft.Batch]) -> Tensor:
    return torch.cat([batch.x for batch in batches])


def test_training_batches_are_augmented_with_their_keys() -> None:
    """They contain the images of the batches without augmentation, each changed by the choices of its batch's key."""
    fed = image_federation()
    prepare = fed.make_preprocessing(torch.float64, torch.device("cpu"))
    plain = training_batches(context(fed, ft.Augmentation()), epochs=2)
    augmented = training_batches(context(fed, ALL_STEPS), epochs=2)
    inputs = [fed.x[fed.train[0]], prepare(fed.x[fed.train[0]])]
    for before, after in zip(plain, augmented, strict=True):
        samples = [int((inputs[1] == x).flatten(1).all(1).nonzero()) for x in before.x]
        drawn = ALL_STEPS.draw(after.key(), len(samples), (6, 7), torch.device("cpu"))
        assert torch.equal(after.x, ALL_STEPS.apply(inputs[0][samples], drawn, prepare))
        assert torch.equal(after.y, before.y) and not torch.equal(after.x, before.x)


def test_training_batches_differ_between_passes_and_rounds() -> None:
    fed, flip = image_federation(), ft.Augmentation(flip=True)
    first = inputs_of(training_batches(context(fed, flip), epochs=2))
    other = inputs_of(training_batches(context(fed, flip, round=2)))
    passes = [{tuple(x.flatten().tolist()) for x in part} for part in (first[:SIZE], first[SIZE:], other)]
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_evaluation_and_sums_over_data_use_original_images() -> None:
    fed = image_federation()
    ctx, plain = context(fed, ALL_STEPS), context(fed, ft.Augmentation())
    images = [each.map_samples(lambda x: x, SIZE) for each in (ctx, plain)]
    sums = [each.sum_over_data(lambda batch: {"sum": batch.x.sum(0)})["sum"] for each in (ctx, plain)]
    params = ctx.model.init(0)
    losses = [each.full_loss(each.loss, params) for each in (ctx, plain)]
    assert all(torch.equal(*pair) for pair in (images, sums, losses))
    assert not torch.allclose(inputs_of(training_batches(ctx)).sum(0), sums[0])


def test_record_scores_models_on_original_images() -> None:
    fed = image_federation()
    run = ft.simulate(ft.methods.FedAvg(), linear(), fed, rounds=1, dtype="float64", augmentation=ALL_STEPS)
    prepared = fed.make_preprocessing(torch.float64, torch.device("cpu"))(fed.x)
    for client in range(2):
        personal, test = run.personal(client), fed.test[client]
        outputs = prepared[test].flatten(1) @ personal["1.weight"].T + personal["1.bias"]
        loss = run.records[0]["per_client"]["loss_trained"][client]
        assert loss == pytest.approx(float(F.cross_entropy(outputs, fed.y[test])), rel=1e-12)


def test_resume_continues_with_augmentation_and_same_bits(tmp_path: Path) -> None:
    def run(folder: Path, flip: bool = True, stop: bool = False) -> ft.Run:
        def on_round_end(record: Record) -> None:
            if stop and record["round"] == 2:
                raise KeyError

        augmentation = ft.Augmentation(flip=flip, crop=1)
        return ft.simulate(
            ft.methods.FedPer(), ft.network("mlp", fed), fed, rounds=3, folder=folder, checkpoint_every=1,
            engine="sequential", augmentation=augmentation, on_round_end=on_round_end,
        )  # fmt: skip

    fed = ft.load("digits", clients=3, normalize="channel")
    expected = run(tmp_path / "whole")
    with pytest.raises(KeyError):
        run(tmp_path / "stopped", stop=True)
    resumed = ft.resume(tmp_path / "stopped")  # rebuilds everything from the folder
    assert all_same(models(resumed), models(expected))
    assert resumed.experiment["augmentation"] == {"flip": True, "crop": 1, "cutout": 0}
    other = run(tmp_path / "other", flip=False)
    assert not all_same(models(other), models(expected))
    assert "augmentation.flip" in error_message(lambda: ft.ComparisonResult([expected, other]).group)


def test_flags_and_settings_make_augmentation() -> None:
    words = ["--augmentation.flip", "true", "--augmentation.crop", "4", "--data.normalize", "channel"]
    experiment = make_experiment(parse_overrides(words).apply_to({}))
    assert experiment.augmentation == ft.Augmentation(flip=True, crop=4)
    assert experiment.data.normalize == "channel"  # type: ignore[union-attr]
    assert make_experiment({"augmentation": {"cutout": 2}}).augmentation == ft.Augmentation(cutout=2)


def test_inputs_that_are_no_images_raise(net: nn.Module) -> None:
    flip = ft.Augmentation(flip=True)
    simulated = error_message(lambda: ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), augmentation=flip))
    settings = {"augmentation": {"flip": True}, "inputs": {"shape": [4]}}
    assert simulated == error_message(lambda: make_deployment(settings)) and "got (4,)" in simulated
