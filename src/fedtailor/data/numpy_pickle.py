"""Reader of a pickled dict of NumPy arrays in an untrusted file; it does not use the `pickle` module.

A pickle is a program for a small stack machine that can call any Python function. This reader knows only the operations
with which NumPy pickles a dict of arrays, and it makes each array itself from its bytes. Any other operation or name
raises `DataError`, so reading executes no code from the file.
"""

import pickletools
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        (content,) = _Machine().run(data).value
        return {str(name): _require_array(part) for name, part in content.items()}
    except FedTailorError:
        raise
    except Exception as error:  # a malformed program fails in many ways
        raise DataError("It does not contain a dict of arrays of numbers.") from error


def _require_array(part: Any) -> NDArray[Any]:
    if not isinstance(part, _Array) or not isinstance(part.value, np.ndarray):
        raise DataError(_NO_ARRAYS)
    return part.value


class _Dtype:
    """A dtype, as a pickle describes it: first its code, then a state that contains the byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        self.is_object = code == "O8"
        if not self.is_object and code not in _DTYPES:
            raise DataError(f"It contains an array of dtype {code!r}; only numbers can be read.")
        self.dtype = np.dtype(object if self.is_object else code)

    def set_state(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """An array, as a pickle describes it: first an empty one, then a state that contains shape, dtype, and content."""

    value: Any = None  # an array of numbers, or a list of objects

    def __init__(self, *_: Any) -> None:
        pass

    def set_state(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran_order, content = state
        if kind.is_object:
            self.value = content
        else:
            self.value = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if fortran_order else "C")


_NAMES: dict[tuple[str, ...], type[Any] | None] = {  # what a pickle may name -> what it stands for here
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,  # NumPy 1
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # NumPy 2
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_TUPLE": tuple, "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}  # fmt: skip
_LITERALS = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8",
)  # fmt: skip


class _Machine:
    """The stack machine of pickles, without the operations that arrays do not need."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for operation, argument, _ in islice(pickletools.genops(program), _MAX_OPERATIONS):
            if operation.name == "STOP":
                return self._stack.pop()
            if operation.name in _LITERALS:
                self._stack.append(argument)
            elif operation.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[operation.name]())
            elif not self._memorize(operation.name, argument):
                self._combine(operation.name, argument)
        raise DataError(_NO_ARRAYS)

    def _memorize(self, operation: str, key: Any) -> bool:
        match operation:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(len(self._stack))
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                self._memo[key] = self._stack[-1]
            case "BINGET" | "LONG_BINGET":
                self._stack.append(self._memo[key])
            case _:
                return False
        return True

    def _combine(self, operation: str, argument: Any) -> None:
        match operation:
            case "GLOBAL":
                self._stack.append(_find(*argument.split(" ")))
            case "STACK_GLOBAL":
                self._stack.append(_find(*self._pop(2)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._stack.append(tuple(self._pop(int(operation[-1]))))
            case "TUPLE":
                self._stack.append(tuple(self._pop_to_mark()))
            case "APPEND" | "APPENDS":
                items = self._pop(1) if operation == "APPEND" else self._pop_to_mark()
                self._stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._pop(2) if operation == "SETITEM" else self._pop_to_mark()
                self._stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "REDUCE":
                kind, arguments = self._pop(2)
                self._stack.append({_Dtype: _Dtype, _Array: _Array}[kind](*arguments))  # nothing else is called
            case "BUILD":
                (state,) = self._pop(1)
                self._stack[-1].set_state(state)
            case _:
                raise DataError(f"It contains the pickle operation {operation}, which arrays do not need.")

    def _pop(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items


def _find(*name: str) -> type[Any] | None:
    if name not in _NAMES:
        raise DataError(f"It contains a pickle that names {'.'.join(name)}, which could execute code.")
    return _NAMES[name]
