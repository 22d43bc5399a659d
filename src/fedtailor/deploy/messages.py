"""What crosses between a real server and a real client: a few words in JSON and a tree, in Flower's records.

A tree is the bytes that go to a disk too (`packing.py`), so there is one reader that need not trust who wrote them.
"""

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedtailor.errors import Refused
from fedtailor.packing import pack, unpack
from fedtailor.trees import Tree
from fedtailor.untrusted import check_plain, parse_json

_WORDS, _TREE, _FORM = "words", "tree", "fedtailor.safetensors"
_MOST_WORDS = 2**20  # letters; the sizes of 100,000 clients fit


def to_record(words: Mapping[str, Any], tree: Tree | None = None) -> RecordDict:
    """A message's content.

    >>> from_record(to_record({"round": 3}), most=0)
    ({'round': 3}, {})
    """
    record = RecordDict({_WORDS: ConfigRecord({_WORDS: json.dumps(dict(words))})})
    if tree is not None:
        data = pack(tree)
        record[_TREE] = ArrayRecord({_TREE: Array("uint8", (len(data),), _FORM, data)})
    return record


def from_record(content: RecordDict, most: int) -> tuple[dict[str, Any], Tree]:
    """The words and the tree in a message, from whoever it is; the tree takes at most so many bytes."""
    try:
        said = content[_WORDS][_WORDS]
        packed = content[_TREE][_TREE] if _TREE in content else None
        if not isinstance(said, str) or len(said) > _MOST_WORDS or not isinstance(packed, Array | None):
            raise TypeError
        words = parse_json(said)
        check_plain(words, "The message")
        words = dict(words)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused("This message is none of FedTailor's.") from error
    return words, {} if packed is None else unpack(packed.data, most)
