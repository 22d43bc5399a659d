"""The stack machine of pickles for untrusted files; it does not use the `pickle` module.

A pickle is a program that can call any Python function. This machine knows only the operations that arrays and data
frames need. A reader gives it a table of names: what a pickle may name, and the stand-in that is called instead. Any
other operation or name raises `DataError`, so reading executes no code from the file.
"""

import pickletools
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from fedtailor.core.untrusted_input import sanitize
from fedtailor.errors import DataError

Names = Mapping[tuple[str, ...], Callable[..., Any] | None]  # module and name -> stand-in; None is never called

_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_TUPLE": tuple, "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}  # fmt: skip
_LITERALS = (
    "INT", "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8",
)  # fmt: skip


class PickleMachine:
    """Runs a pickle with stand-ins for the names that it may contain.

    >>> import pickle
    >>> PickleMachine({}, max_operations=100, too_long="It is too long.").run(pickle.dumps({"x": [1, 2]}))
    {'x': [1, 2]}
    """

    def __init__(self, names: Names, max_operations: int, too_long: str) -> None:
        self._names, self._max_operations, self._too_long = names, max_operations, too_long
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        """Return the object that the pickle describes; a malformed program can raise any exception."""
        for operation, argument, _ in islice(pickletools.genops(program), self._max_operations):
            if operation.name == "STOP":
                return self._stack.pop()
            if operation.name in _LITERALS:
                self._stack.append(argument)
            elif operation.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[operation.name]())
            elif not self._memorize(operation.name, argument):
                self._combine(operation.name, argument)
        raise DataError(self._too_long)

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
                self._stack.append(self._find(*argument.split(" ")))
            case "STACK_GLOBAL":
                self._stack.append(self._find(*self._pop(2)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._stack.append(tuple(self._pop(int(operation[-1]))))
            case "TUPLE":
                self._stack.append(tuple(self._pop_to_mark()))
            case "APPEND" | "APPENDS":
                items = self._pop(1) if operation == "APPEND" else self._pop_to_mark()
                self._stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._pop(2) if operation == "SETITEM" else self._pop_to_mark()
                self._stack[-1].update(zip(map(_check_key, items[::2]), items[1::2], strict=True))
            case "REDUCE":
                self._call(*self._pop(2))
            case "BUILD":
                (state,) = self._pop(1)
                self._stack[-1].set_state(state)
            case _:
                raise DataError(f"It contains the pickle operation {operation}, which this reader does not know.")

    def _call(self, function: Any, arguments: tuple[Any, ...]) -> None:
        if function is None or not any(function is stand_in for stand_in in self._names.values()):
            raise DataError("It contains a pickle that calls something other than the names that it may contain.")
        self._stack.append(function(*arguments))

    def _find(self, *name: Any) -> Callable[..., Any] | None:
        known = all(isinstance(part, str) for part in name) and name in self._names
        if not known:
            text = sanitize(".".join(str(part) for part in name if isinstance(part, str)))
            raise DataError(f"It contains a pickle that names {text}, which could execute code.")
        return self._names[name]

    def _pop(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items


def _check_key(key: Any) -> str | int:
    """Return the key of a dict if it is text or a number; tuples can be nested so that hashing them takes forever."""
    if not isinstance(key, str | int):
        raise DataError("It contains a dict whose keys are neither text nor numbers.")
    return key
