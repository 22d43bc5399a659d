"""Augmentation of images: each step against a loop over examples and pixels, and the distribution of random choices."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from conftest import error_message
from fedtailor.core.augmentation import Augmentation, Choices

CPU = torch.device("cpu")
SIZE = (6, 9)  # height and width


def stored_images(count: int = 40) -> Tensor:
    """Return random bytes without zeros, with two channels and more columns than rows."""
    return torch.from_numpy(np.random.default_rng(0).integers(1, 256, (count, 2, *SIZE), np.uint8))


def normalize(x: Tensor) -> Tensor:
    return (x.double() / 255 - 0.4) / 0.2


def augmented_by_hand(augmentation: Augmentation, image: Tensor, choices: Choices, i: int) -> np.ndarray:
    """Return example i after padding, cropping, flipping, normalization, and cutout, one after the other."""
    height, width = SIZE
    top, left, row, column = (int(choice[i]) for choice in choices[1:])
    padded = np.pad(image.numpy(), ((0, 0), *[(augmentation.crop, augmentation.crop)] * 2))
    result = padded[:, top : top + height, left : left + width] if augmentation.crop else image.numpy()
    if bool(choices.flip[i]):
        result = result[:, :, ::-1]
    result = normalize(torch.from_numpy(result.copy())).numpy()
    first_row, first_column = row - augmentation.cutout // 2, column - augmentation.cutout // 2
    for r in range(first_row, first_row + augmentation.cutout):
        for c in range(first_column, first_column + augmentation.cutout):
            if 0 <= r < height and 0 <= c < width:
                result[:, r, c] = 0
    return result


@pytest.mark.parametrize(
    "augmentation",
    [Augmentation(flip=True), Augmentation(crop=2), Augmentation(cutout=3), Augmentation(flip=True, crop=5, cutout=4)],
    ids=["flip", "crop", "cutout", "all"],
)
def test_apply_equals_loop_over_examples(augmentation: Augmentation) -> None:
    images = stored_images()
    drawn = augmentation.draw(3, len(images), SIZE, CPU)
    found, choices = augmentation.apply(images, drawn, normalize), Choices(*drawn)
    expected = np.stack([augmented_by_hand(augmentation, image, choices, i) for i, image in enumerate(images)])
    assert found.dtype == torch.float64 and np.array_equal(found.numpy(), expected)
    assert not torch.equal(found, normalize(images))


def test_draw_choices_are_uniform_and_independent() -> None:
    """Each value, and each pair of values of two choices, is within five standard deviations of its expected count."""
    count, drawn = 50_000, Augmentation(flip=True, crop=1, cutout=1).draw(7, 50_000, (3, 4), CPU)
    values = dict(zip(Choices._fields, (2, 3, 3, 3, 4), strict=True))
    found = Choices(*drawn)._asdict()
    for one, other in [(a, b) for a in values for b in values if a < b]:
        number = values[one] * values[other]
        counts = torch.bincount(found[one] * values[other] + found[other], minlength=number)
        deviation = (count / number * (1 - 1 / number)) ** 0.5
        assert len(counts) == number and bool(((counts - count / number).abs() < 5 * deviation).all()), (one, other)


def test_draw_of_example_depends_on_key_and_position_only() -> None:
    augmentation = Augmentation(flip=True, crop=4, cutout=8)
    long, short, other = (augmentation.draw(*given, (32, 32), CPU) for given in ((1, 64), (1, 9), (2, 64)))
    assert torch.equal(long[:, :9], short)
    keys = torch.tensor([[2], [1]])
    assert torch.equal(augmentation.draw(keys, 64, (32, 32), CPU), torch.stack([other, long]))
    assert not torch.equal(long, other) and len(set(map(tuple, long.T.tolist()))) == 64


def test_apply_without_flip_never_flips() -> None:
    augmentation = Augmentation(cutout=1)
    drawn = augmentation.draw(0, 40, SIZE, CPU)
    unchanged = (augmentation.apply(stored_images(), drawn, normalize) == normalize(stored_images())).flatten(1)
    assert bool((unchanged.sum(1) == unchanged.shape[1] - 2).all()), "one pixel of two channels changes"


@pytest.mark.parametrize(
    ("fields", "shape", "words"),
    [
        ({"flip": True}, (64,), "augmentation needs inputs of shape (channels, height, width), got (64,)"),
        ({"flip": True}, None, "got several parts"),
        ({"flip": True}, (32, 32, 3), "move the channels to the front"),
        ({"crop": 8}, (1, 8, 9), "augmentation.crop must be smaller than the image, which has 8×9 pixels, got 8"),
        ({"cutout": 8}, (1, 9, 8), "augmentation.cutout must be smaller"),
        ({"crop": -1}, (1, 8, 8), "augmentation.crop must be at least 0"),
        ({"crop": 1.5}, (1, 8, 8), "augmentation.crop must be an integer"),
        ({"flip": 0.5}, (1, 8, 8), "augmentation.flip must be true or false"),
    ],
)
def test_invalid_settings_raise(fields: dict[str, Any], shape: tuple[int, ...] | None, words: str) -> None:
    assert words in error_message(lambda: ft.Augmentation(**fields).check(shape))


def test_default_is_off_and_accepts_all_inputs() -> None:
    Augmentation().check((64,))
    Augmentation().check(None)
    assert not Augmentation() and all(Augmentation(**{name: 1}) for name in ("crop", "cutout"))  # type: ignore[arg-type]
