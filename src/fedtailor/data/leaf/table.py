"""Join the samples of all users to a `SampleTable`."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.data.leaf.files import User
from fedtailor.data.sample_table import Array, SampleTable
from fedtailor.errors import DataError

Convert = Callable[[User], tuple[Array, NDArray[np.int64]]]  # raises `ValueError`: how the sentence "User ann ..." ends


def make_table(
    users: Iterable[User],
    convert: Convert,
    class_names: Sequence[str],
    join: Callable[[list[Array]], Array] = np.concatenate,
) -> SampleTable:
    """Return the samples of all users; `convert` makes arrays of one user's samples, and `join` joins the inputs.

    If LEAF split the users instead of their samples, so that no user is in training and test files, all samples are
    pooled.
    """
    number, blocks = dict[str, int](), list[tuple[int, int, bool]]()  # user, samples, and whether they are for tests
    xs, ys, size = list[Array](), list[NDArray[np.int64]](), 0
    for user in users:
        try:
            x, y = convert(user)
        except ValueError as error:
            raise DataError(f"User {user.name} in '{user.path}' {error}; is it the right data set?") from error
        size += x.nbytes + 3 * y.nbytes
        check_memory(size, "The data set")
        xs.append(x)
        ys.append(y)
        blocks.append((number.setdefault(user.name, len(number)), len(y), user.is_test))
    if not blocks:
        raise DataError("LEAF's files contain no samples; preprocess the data again with a smaller -k.")
    users_of, sizes, tests = (np.array(column) for column in zip(*blocks, strict=True))
    position, names = _sort_names(number)
    return SampleTable(
        join(xs),
        np.concatenate(ys),
        classes=len(class_names),
        owner=np.repeat(position[users_of], sizes),
        owner_names=names,
        is_test=np.repeat(tests, sizes) if len(blocks) > len(number) else None,  # else LEAF split by user
        class_names=tuple(class_names),
    )


def _sort_names(number: Mapping[str, int]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return each user's position in alphabetical order, which does not depend on the files, and the sorted names."""
    names = sorted(number)
    position = np.empty(len(names), np.int64)
    position[[number[name] for name in names]] = np.arange(len(names))
    return position, tuple(names)


def to_numbers(values: Sequence[object], problem: str) -> NDArray[np.float64]:
    """Return numbers as an array, or raise `ValueError` with the problem."""
    try:
        return np.array(values, dtype=np.float64)  # with this dtype, text is never stored in an array
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"has {problem}") from error


def to_labels(values: Sequence[object], classes: int) -> NDArray[np.int64]:
    """Return the numbers of classes as an array, or raise `ValueError`."""
    problem = f"labels that are not integers from 0 to {classes - 1}"
    labels = to_numbers(values, problem)
    if labels.ndim != 1 or not (np.isin(labels, np.arange(classes))).all():
        raise ValueError(f"has {problem}")
    return labels.astype(np.int64)
