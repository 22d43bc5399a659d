"""LEAF's files: where they are, and one user's samples after another."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.core.untrusted_input import is_printable
from fedtailor.data.formats.folder_entries import check_entry, list_entries
from fedtailor.data.leaf.json_stream import JsonStream
from fedtailor.errors import DataError

_MAX_NAME = 200  # characters of a user's name


@dataclass(frozen=True)
class User:
    """The samples of one user in one file, as in the JSON."""

    name: str
    x: list[Any]
    y: list[Any]
    is_test: bool
    path: Path


def read_users(folder: Path, name: str, skipped: int = 0) -> Iterator[User]:
    """Yield the users in LEAF's files one after another, those of the training files first.

    A user can be in the training and in the test files, but not in two files of the same kind. LEAF's split of
    Shakespeare counts `skipped` samples more than each user's test data has, because it drops those that overlap with
    the training data.
    """
    for paths, is_test in find_files(folder, name):
        first_path = dict[str, Path]()
        for path in paths:
            for user in _read_file(path, is_test, skipped):
                if user.name in first_path:
                    both = f"'{first_path[user.name].name}' and '{path.name}' in '{path.parent}'"
                    raise DataError(f"User {user.name} is in {both}; remove the files of an earlier preprocessing.")
                first_path[user.name] = path
                yield user


def find_files(folder: Path, name: str) -> list[tuple[list[Path], bool]]:
    """Return the training files and the test files, or all files if LEAF did not split them; True marks test files."""
    root = folder / "data" if (folder / "data").is_dir() else folder
    found = {part: _list_json(root / part, folder) for part in ("train", "test", "all_data")}
    if found["train"] and found["test"]:
        return [(found["train"], False), (found["test"], True)]
    if found["train"] or found["test"]:
        present, missing = ("train", "test") if found["train"] else ("test", "train")
        raise DataError(f"'{root / present}' has JSON files, but '{root / missing}' has none; {_how_to_make(name)}")
    if found["all_data"]:
        return [(found["all_data"], False)]
    raise DataError(f"'{folder}' has no JSON files in train and test, or in all_data; {_how_to_make(name)}")


def _list_json(folder: Path, root: Path) -> list[Path]:
    """Return the JSON files of a folder, which may be missing; links out of the root raise `DataError`."""
    for entry in (root, folder.parent, folder):
        check_entry(entry, root)
    return list_entries(folder, "*.json", Path.is_file, root)


def _how_to_make(name: str) -> str:
    return f"make them with {how_to_make(name)}."


def how_to_make(name: str) -> str:
    """Return how to make LEAF's files of a data set, as a part of a sentence.

    >>> how_to_make("femnist")
    'preprocess.sh -s niid --sf 1.0 -k 0 -t sample in data/femnist of https://github.com/TalwalkarLab/leaf'
    """
    return f"preprocess.sh -s niid --sf 1.0 -k 0 -t sample in data/{name} of https://github.com/TalwalkarLab/leaf"


def _read_file(path: Path, is_test: bool, skipped: int) -> Iterator[User]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from _read_stream(JsonStream(file), path, is_test, skipped if is_test else 0)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not one of LEAF's JSON files: it is not UTF-8.") from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"'{path}' is not one of LEAF's JSON files, or it is damaged: {error}.") from error


def _read_stream(stream: JsonStream, path: Path, is_test: bool, skipped: int) -> Iterator[User]:
    sizes, lists = dict[str, int](), dict[str, Any]()
    for key in stream.read_keys():
        if key != "user_data":
            value = stream.value()
            if key in ("users", "num_samples"):  # nothing else stays in memory
                lists[key] = value
            continue
        for name in stream.read_keys():
            x, y = _check_user(name, stream.value(), sizes)
            sizes[name] = len(y)
            if len(y):  # LEAF keeps users without samples in user_data
                yield User(name, x, y, is_test, path)
    stream.end()
    _check_sizes(lists.get("users"), lists.get("num_samples"), sizes, skipped)


def _check_user(name: str, data: Any, known: dict[str, int]) -> tuple[list[Any], list[Any]]:
    if len(name) > _MAX_NAME or not is_printable(name):
        raise ValueError(f"the user {name[:_MAX_NAME]!r} has a name that is too long or cannot be printed")
    if name in known:
        raise ValueError(f"it contains user {name} twice")
    x, y = (data.get("x"), data.get("y")) if isinstance(data, dict) else (None, None)
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        raise ValueError(f"user {name} does not have lists x and y of the same length")
    return x, y


def _check_sizes(users: Any, declared: Any, sizes: dict[str, int], skipped: int) -> None:
    """Raise `ValueError` unless the lists of users and of their sizes match the samples in the file."""
    if not isinstance(users, list) or not isinstance(declared, list) or len(users) != len(declared):
        raise ValueError("it does not have lists users and num_samples of the same length")
    if not all(isinstance(user, str) for user in users) or len(set(users)) != len(users):
        raise ValueError("its list of users has a name twice, or one that is not a string")
    for user, size in zip(users, declared, strict=True):
        if user not in sizes or size not in (sizes[user], sizes[user] + skipped):
            found = f"{sizes[user]} samples" if user in sizes else "no data"
            raise ValueError(f"num_samples of user {user} is {size!r:.20}, but it has {found}")
    listed = set(users)
    for user, size in sizes.items():
        if size and user not in listed:
            raise ValueError(f"user {user} is not in its list of users")
