"""Small files in the layout of the packages with plays and film reviews."""

import bz2
import csv
import io
import tarfile
from collections.abc import Iterable, Mapping

HEADER = b"category,text,movie_name,has_plot_and_reviews\n"


def review_file(rows: Iterable[tuple[str, str, str]]) -> bytes:
    """Return the compressed CSV file of reviews with the given categories, texts, and films."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows((*row, "True") for row in rows)
    return bz2.compress(HEADER + text.getvalue().encode())


def source_archive(files: Mapping[str, bytes]) -> bytes:
    """Return a package's source archive with these files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()
