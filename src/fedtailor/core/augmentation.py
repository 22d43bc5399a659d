"""`Augmentation`: random changes of training images, as pure functions of the key of a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.core import random
from fedtailor.core.fields import NonNegativeInt, check_fields
from fedtailor.errors import ConfigError

_SALT = 2**31  # separates these random numbers from dropout and `Batch.uniform`, which use the same key
_MAX_CHANNELS = 4  # of images with the channels last, which are detected by their shape


class Choices(NamedTuple):
    """The random choices of a batch, one per example."""

    flip: Tensor  # 1: the image is flipped; 0: it is not
    top: Tensor  # position of the crop in the padded image
    left: Tensor
    row: Tensor  # center of the square that is cut out
    column: Tensor


@dataclass(frozen=True)
class Augmentation:
    """How training images are changed at random; by default, they are not.

    The steps are those of a usual PyTorch pipeline, in this order: `crop` and `flip` on the stored image, the
    conversion and normalization of all inputs, and `cutout`. The choices for an example depend only on the seed, the
    round, the pass over the data, the client, and the example's position in the pass.

    >>> import fedtailor as ft
    >>> fed = ft.load("digits", clients=4)
    >>> augmentation = ft.Augmentation(flip=True, crop=1)
    >>> ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed), fed, rounds=2, augmentation=augmentation).num_clients
    4
    """

    flip: Annotated[bool, "flip each training image horizontally with probability 1/2"] = False
    crop: Annotated[
        NonNegativeInt, "pixels of zeros that are added on each side before a crop of the original size; 0: no crop"
    ] = 0
    cutout: Annotated[NonNegativeInt, "side of a square at a random position that is set to 0; 0: no cutout"] = 0

    def __post_init__(self) -> None:
        check_fields(self, "augmentation.")

    def __bool__(self) -> bool:
        """Return whether any step is on."""
        return self.flip or self.crop > 0 or self.cutout > 0

    def check(self, shape: tuple[int, ...] | None) -> None:
        """Raise `ConfigError` unless inputs of this shape can be augmented; None stands for inputs of several parts.

        >>> Augmentation(crop=4).check((3, 32, 32))
        >>> Augmentation(flip=True).check((64,))
        Traceback (most recent call last):
        fedtailor.errors.ConfigError: augmentation needs inputs of shape (channels, height, width), got (64,); omit it.
        """
        if not self:
            return
        needed = "augmentation needs inputs of shape (channels, height, width)"
        if shape is None or len(shape) != 3:
            raise ConfigError(f"{needed}, got {'several parts' if shape is None else shape}; omit it.")
        if shape[2] <= _MAX_CHANNELS < shape[0]:
            raise ConfigError(f"{needed}, got {shape}; move the channels to the front.")
        for name in ("crop", "cutout"):
            if getattr(self, name) >= min(shape[1:]):
                size = f"the image, which has {shape[1]}×{shape[2]} pixels"
                raise ConfigError(f"augmentation.{name} must be smaller than {size}, got {getattr(self, name)}.")

    def draw(self, key: int | Tensor, count: int, size: tuple[int, int], device: torch.device) -> Tensor:
        """Return the random choices for the images of a batch, [choices, count], from its key and the images' size.

        Keys of shape [batches, 1] give the choices of several batches, [batches, choices, count]. The choices for an
        example do not depend on `count`.

        >>> choices = Choices(*Augmentation(crop=1).draw(0, 50, (8, 8), torch.device("cpu")))
        >>> choices.flip.unique().tolist(), choices.top.unique().tolist()
        ([0], [0, 1, 2])
        """
        ranges = (1 + self.flip, 2 * self.crop + 1, 2 * self.crop + 1, *size)
        words = random.words(random.make_key(key, _SALT), count * len(ranges), device)
        words = words.reshape(*words.shape[:-1], count, len(ranges))
        return torch.stack([(words[..., i] * values) >> 32 for i, values in enumerate(ranges)], -2)  # range(values)

    def apply(self, images: Tensor, drawn: Tensor, prepare: Callable[[Tensor], Tensor]) -> Tensor:
        """Return inputs of a model from stored images, [examples, channels, height, width], and their random choices.

        >>> images, augmentation = torch.tensor([[[[1, 2, 3]]]] * 20), Augmentation(flip=True)
        >>> drawn = augmentation.draw(0, 20, (1, 3), images.device)
        >>> augmentation.apply(images, drawn, lambda x: x).flatten(1).unique(dim=0).tolist()
        [[1, 2, 3], [3, 2, 1]]
        """
        choices = Choices(*drawn)
        if self.flip or self.crop:
            images = self._crop_and_flip(images, choices)
        images = prepare(images)
        return self._cut_out(images, choices) if self.cutout else images

    def _crop_and_flip(self, images: Tensor, choices: Choices) -> Tensor:
        """Return images whose pixels are gathered from the padded images, first cropped, then flipped."""
        height, width = images.shape[2:]
        rows, columns = (torch.arange(length, device=images.device) for length in (height, width))
        columns = torch.where(choices.flip[:, None] == 1, (width - 1) - columns, columns) + choices.left[:, None]
        rows = (rows + choices.top[:, None]) * (width + 2 * self.crop)
        source = (rows[:, :, None] + columns[:, None]).flatten(1)  # [examples, pixels]
        padded = F.pad(images, (self.crop,) * 4).flatten(2)  # [examples, channels, padded pixels]
        return padded.gather(2, source[:, None].expand(-1, images.shape[1], -1)).reshape(images.shape)

    def _cut_out(self, images: Tensor, choices: Choices) -> Tensor:
        """Return images with a square of zeros around the chosen centers; a part of it may lie outside the image."""

        def inside(length: int, center: Tensor) -> Tensor:
            offsets = torch.arange(length, device=images.device) - (center - self.cutout // 2)[:, None]
            return (offsets >= 0) & (offsets < self.cutout)  # [examples, length]

        rows, columns = inside(images.shape[2], choices.row), inside(images.shape[3], choices.column)
        return images.masked_fill((rows[:, :, None] & columns[:, None])[:, None], 0)
