"""Sent140: the sentiment of tweets, one client per account."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.leaf.files import User, read_users
from fedtailor.data.leaf.table import make_table
from fedtailor.data.sample_table import Array, SampleTable

CLASS_NAMES = ("negative", "positive")
LENGTH = 25  # words of an input, as in LEAF
_WORD = re.compile(r"[\w']+|[.,!?;]")
_TEXT = 4  # position in a tweet: id, date, query, user, text
_LABELS: dict[object, int] = {0: 0, 1: 1, 2: 0, 4: 1, "0": 0, "2": 0, "4": 1}  # LEAF: 0, 1; FedProx: polarity


def read_sent140(folder: Path) -> SampleTable:
    """Return LEAF's Sent140: x int32 [n, 25], y 0 (negative) or 1 (positive), and the accounts.

    Token k is the k-th word of the vocabulary, which has the words of the training files from the most frequent one to
    the least, and in alphabetical order if they are equally frequent. Token 0 is padding and every other word.
    """
    known = dict[str, int]()  # word -> token in the order of appearance

    def convert(user: User) -> tuple[Array, NDArray[np.int64]]:
        return _encode(user.x, known), _to_labels(user.y)

    table = make_table(read_users(folder, "sent140"), convert, CLASS_NAMES)
    assert isinstance(table.x, np.ndarray)
    in_training = table.x if table.is_test is None else table.x[~table.is_test]
    counts = np.bincount(in_training.ravel(), minlength=len(known) + 1).tolist()
    in_order = sorted((-counts[token], word) for word, token in known.items() if counts[token])
    vocabulary = tuple(word for _, word in in_order)
    token_of = np.zeros(len(known) + 1, np.int32)
    token_of[[known[word] for word in vocabulary]] = np.arange(1, len(vocabulary) + 1)
    return replace(table, x=token_of[table.x], vocabulary=vocabulary)


def split_words(text: str) -> list[str]:
    """Return the words and punctuation marks of a tweet.

    >>> split_words("I don't know...")
    ['I', "don't", 'know', '.', '.', '.']
    """
    return _WORD.findall(text)


def _encode(tweets: list[object], known: dict[str, int]) -> Array:
    tokens = np.zeros((len(tweets), LENGTH), np.int32)
    for row, tweet in zip(tokens, tweets, strict=True):
        if not isinstance(tweet, list) or len(tweet) <= _TEXT or not isinstance(tweet[_TEXT], str):
            raise ValueError("has tweets that are not lists of id, date, query, user, and text")
        numbers = [known.setdefault(word, len(known) + 1) for word in split_words(tweet[_TEXT])[:LENGTH]]
        row[: len(numbers)] = numbers
    return tokens


def _to_labels(values: list[object]) -> NDArray[np.int64]:
    try:
        return np.array([_LABELS[value] for value in values], np.int64)
    except (KeyError, TypeError) as error:
        raise ValueError("has labels that are not 0, 1, or a polarity ('0', '2', '4')") from error
