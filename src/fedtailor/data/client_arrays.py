"""`ClientArrays`: what the readers of users' data return."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Arrays = tuple[Any, Any, Any, Any]  # x_train, y_train, x_test, y_test


@dataclass(frozen=True)
class ClientArrays:
    """The clients that a reader found, as `Federation.from_arrays` takes them."""

    clients: Sequence[Arrays]
    names: Sequence[str]
    class_names: tuple[str, ...] | None = None  # None: the labels are numbers, or text that has not been encoded
