"""Reader of large, untrusted JSON files, one value after another."""

import json
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

_CHUNK = 2**22  # characters that are read at once
_MAX_VALUE = 2**26  # characters of one value, which is in memory as a whole; LEAF's largest have a few million


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"it contains {name}")


class JsonStream:
    """The values of a JSON file in their order; only one of them is in memory. Errors are raised as `ValueError`.

    >>> import io
    >>> stream = JsonStream(io.StringIO('{"sizes": [1, 2], "users": ["ann"]}'))
    >>> [(key, stream.value()) for key in stream.read_keys()]
    [('sizes', [1, 2]), ('users', ['ann'])]
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._position, self._is_complete = file, "", 0, False
        self._decoder = json.JSONDecoder(parse_constant=_reject_constant)

    def read_keys(self) -> Iterator[str]:
        """Yield the keys of the object that starts here; the caller reads the value of each key before the next one."""
        self._expect("{")
        separator = "}" if self._peek() == "}" else ","
        while separator == ",":
            key = self.value()
            if not isinstance(key, str):
                raise ValueError("a key is not a string")
            self._expect(":")
            yield key
            separator = self._peek()
            if separator == ",":
                self._expect(",")
        self._expect("}")

    def value(self) -> Any:
        """Return the list, object, or string that starts here."""
        if self._peek() not in ("[", "{", '"'):  # the end of a number could be in the next chunk
            raise ValueError("a list, an object, or a string is missing")
        while True:
            try:
                found, self._position = self._decoder.raw_decode(self._text, self._position)
                return found
            except json.JSONDecodeError as error:  # incomplete, or invalid
                size = len(self._text) - self._position
                if self._is_complete:
                    raise ValueError(error.msg) from error
                if size > _MAX_VALUE:
                    raise ValueError(f"one of its values has more than {_MAX_VALUE:,} characters") from error
                self._read(max(size, _CHUNK))  # twice as much, so that all attempts together take linear time
            except RecursionError as error:
                raise ValueError("it is nested too deeply") from error

    def end(self) -> None:
        """Raise `ValueError` unless the file ends here."""
        if self._peek():
            raise ValueError("it does not end after its last value")

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise ValueError(f"'{character}' is missing")
        self._position += 1

    def _peek(self) -> str:
        """Return the next character that is not a space, or an empty string at the end."""
        while True:
            while self._position < len(self._text):
                character = self._text[self._position]
                if character not in " \t\r\n":
                    return character
                self._position += 1
            if self._is_complete:
                return ""
            self._read(_CHUNK)

    def _read(self, characters: int) -> None:
        chunk = self._file.read(characters)
        self._is_complete = not chunk
        self._text, self._position = self._text[self._position :] + chunk, 0
