"""Film reviews: films, words without a vocabulary, and damaged files."""

import bz2
from pathlib import Path

import numpy as np
import pytest

from conftest import error_message
from fedtailor.data.text import reviews
from fedtailor.data.text.reviews import FILE, hash_word, parse_reviews, read_reviews, to_bags, to_tokens
from support.text_files import HEADER, review_file


def test_reviews_are_grouped_by_film_and_plots_are_left_out() -> None:
    rows = [
        ("rotten", "Bad, bad film", "b_film"),
        ("fresh", 'A "good"\nfilm!', "a_film"),
        ("plot", "A man walks.", "a_film"),
        ("fresh", "Good", "b_film"),
    ]
    table = parse_reviews(review_file(rows), "The file")
    assert table.owner_names == ("a_film", "b_film") and table.owner is not None
    assert sorted(zip(table.owner.tolist(), table.y.tolist(), strict=True)) == [(0, 1), (1, 0), (1, 1)]
    assert table.class_names == ("rotten", "fresh") and isinstance(table.x, np.ndarray)
    words = {tuple(row[row > 0].tolist()) for row in table.x}
    expected = [["bad", ",", "bad", "film"], ["a", "good", "film", "!"], ["good"]]
    assert words == {tuple(map(hash_word, line)) for line in expected}


def test_review_that_a_film_has_twice_is_read_once() -> None:
    rows = [("fresh", "Good", "a"), ("fresh", "Good", "b"), ("fresh", "Good", "a")]
    assert parse_reviews(review_file(rows), "The file").num_samples == 2


def test_tokens_and_bags_of_a_review_do_not_depend_on_other_reviews() -> None:
    one, two = (
        parse_reviews(review_file(rows), "The file")
        for rows in ([("fresh", "Good film", "b")], [("rotten", "Bad", "a"), ("fresh", "Good film", "b")])
    )
    assert isinstance(one.x, np.ndarray) and isinstance(two.x, np.ndarray)
    for encode in (to_tokens, lambda x, words: to_bags(to_tokens(x, words), words)):
        assert (encode(one.x, 16)[0] == encode(two.x, 16)[1]).all()
    tokens = to_tokens(two.x, 16)
    assert tokens.max() <= 16 and (tokens > 0).sum(1).tolist() == [1, 2], "0 is padding only"
    assert to_bags(np.zeros((1, 3), np.int32), 4).tolist() == [[0, 0, 0, 0]], "a review without words"


@pytest.mark.parametrize(
    "content, problem",
    [
        (bz2.compress(b"category,text\n"), "has the columns category, text; expected category, text, movie_name"),
        (bz2.compress(b""), "has the columns ; expected"),
        (bz2.compress(HEADER + b"fresh,x,film\n"), "Row 2 of 'f' has 3 columns instead of 4"),
        (
            bz2.compress(HEADER + b"good,x,film,True\n"),
            "Row 2 of 'f', column category: expected rotten, fresh, or plot",
        ),
        (bz2.compress(HEADER + b"fresh,x,,True\n"), "Row 2 of 'f', column movie_name"),
        (bz2.compress(HEADER + b"fresh,x,\x1b[1m,True\n"), "Row 2 of 'f', column movie_name"),
        (bz2.compress(HEADER + b'fresh,"x,film,True\n'), "is not a CSV file"),
        (bz2.compress(HEADER + b"plot,x,film,True\n"), "has no reviews"),
        (bz2.compress(HEADER + b"fresh,\xff,film,True\n"), "is not a bzip2 file of UTF-8 text"),
        (b"not compressed", "is not a bzip2 file"),
        (bz2.compress(HEADER)[:-4], "is not complete"),
    ],
)
def test_damaged_file_is_rejected(content: bytes, problem: str) -> None:
    assert problem in error_message(lambda: parse_reviews(content, "'f'"))


def test_file_that_expands_too_much_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviews, "_MAX_BYTES", 1000)
    (tmp_path / FILE).write_bytes(bz2.compress(HEADER + b"x" * 2000))
    assert "more than 1,000 bytes" in error_message(lambda: read_reviews(tmp_path))
