"""Files in a package's source archive (.tar.gz), which are read without writing or executing anything."""

import re
import tarfile
import zlib
from pathlib import Path

from fedtailor.errors import DataError


def read_members(archive: Path, pattern: re.Pattern[str], max_bytes: int) -> dict[str, bytes]:
    """Return the contents of the files whose whole path matches a pattern, by path; together at most `max_bytes`.

    >>> read_members(Path("nowhere.tar.gz"), re.compile(r".*\\.txt"), 100)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere.tar.gz' cannot be read: ...
    """
    found, total = dict[str, bytes](), 0
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                if not member.isfile() or not pattern.fullmatch(member.name):
                    continue
                total += member.size
                if total > max_bytes:
                    raise DataError(f"'{archive}' has more than {max_bytes:,} bytes of data; download it again.")
                file = opened.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"'{archive}' cannot be read: {error}; download it again.") from error
    return found
