"""Reader of a pickled dict of NumPy arrays in an untrusted file, with `PickleMachine`.

It knows only the names with which NumPy pickles a dict of arrays, and it makes each array itself from its bytes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.formats.pickle_machine import Names, PickleMachine
from fedtailor.errors import DataError, FedTailorError

_MAX_OPERATIONS = 10_000  # an array takes about 50, however large it is, but a list takes one per number
_NO_ARRAYS = "It contains lists, such as tokens of text; only arrays of numbers can be read."
_DTYPES = ("b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8")


def unpickle_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """Return the dict of arrays that `numpy.savez(file, data={...})` pickles as an array with one object.

    >>> import pickle
    >>> unpickle_arrays(pickle.dumps(np.array({"x": np.arange(3)}), protocol=4))
    {'x': array([0, 1, 2])}
    """
    try:
        (content,) = PickleMachine(ARRAY_NAMES, _MAX_OPERATIONS, _NO_ARRAYS).run(data).value
        return {str(name): _require_array(part) for name, part in content.items()}
    except FedTailorError:
        raise
    except Exception as error:  # a malformed program fails in many ways
        raise DataError("It does not contain a dict of arrays of numbers.") from error


def _require_array(part: Any) -> NDArray[Any]:
    if not isinstance(part, PickledArray) or not isinstance(part.value, np.ndarray):
        raise DataError(_NO_ARRAYS)
    return part.value


class PickledDtype:
    """A dtype, as a pickle describes it: first its code, then a state that contains the byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        self.is_object = code == "O8"
        if not self.is_object and code not in _DTYPES:
            raise DataError(f"It contains an array of dtype {code!r}; only numbers can be read.")
        self.dtype = np.dtype(object if self.is_object else code)

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Set the byte order."""
        self.dtype = self.dtype.newbyteorder(state[1])


class PickledArray:
    """An array, as a pickle describes it: first an empty one, then a state that contains shape, dtype, and content."""

    value: Any = None  # an array of numbers, or a list of objects

    def __init__(self, *_: Any) -> None:
        pass

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Set the content; an array of numbers is a view of the pickle's bytes."""
        _, shape, kind, fortran_order, content = state
        if kind.is_object:
            self.value = content
        else:
            self.value = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if fortran_order else "C")


ARRAY_NAMES: Names = {
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): PickledDtype,
    ("numpy.core.multiarray", "_reconstruct"): PickledArray,  # NumPy 1
    ("numpy._core.multiarray", "_reconstruct"): PickledArray,  # NumPy 2
}
