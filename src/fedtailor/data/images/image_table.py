"""Checks of images and labels, and the table of samples that they make."""

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

Images = tuple[NDArray[np.uint8], NDArray[np.int64]]  # x [n, channels, height, width] and y [n]


def make_image_table(
    train: list[Images], test: Images, classes: int, where: str, class_names: tuple[str, ...] | None = None
) -> SampleTable:
    """Return the samples of a data set whose training set may have several parts, the test set last.

    >>> x, y = np.zeros((2, 1, 4, 4), np.uint8), np.array([0, 1])
    >>> make_image_table([(x, y), (x, y)], (x, y), 2, "The folder").is_test.tolist()
    [False, False, False, False, True, True]
    """
    parts, hint = [*train, test], "it must contain the files of one data set"
    for x, y in parts:
        if not len(x) or len(x) != len(y):
            raise DataError(f"{where} has {len(x):,} images but {len(y):,} labels; {hint}.")
        if x.shape[1:] != parts[0][0].shape[1:]:
            raise DataError(f"{where} has images of several sizes; {hint}.")
        if y.min() < 0 or y.max() >= classes:
            raise DataError(f"{where} has a label outside 0 to {classes - 1}; {hint}.")
    y = np.concatenate([y for _, y in parts])
    x = np.empty((len(y), *test[0].shape[1:]), np.uint8)  # contiguous, also if the parts are not
    np.concatenate([x for x, _ in parts], out=x)
    is_test = np.arange(len(y)) >= len(y) - len(test[1])
    return SampleTable(x, y, classes, is_test=is_test, class_names=class_names)
