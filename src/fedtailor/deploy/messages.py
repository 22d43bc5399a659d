"""Content of messages between the server and clients: named fields as JSON and a tree, in Flower's records.

A tree is serialized as on disk (`runs/serialization.py`), so one reader handles all untrusted tensors.
"""

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedtailor.core.trees import Tree
from fedtailor.core.untrusted_input import check_settings, parse_json
from fedtailor.errors import DeployError
from fedtailor.runs.serialization import pack, unpack

_FIELDS, _TREE, _ARRAY_TYPE = "fields", "tree", "fedtailor.safetensors"
_MAX_FIELDS_LENGTH = 2**20  # characters; enough for the sizes of 100,000 clients


def to_record(fields: Mapping[str, Any], tree: Tree | None = None) -> RecordDict:
    """Return the content of a message.

    >>> from_record(to_record({"round": 3}), max_bytes=0)
    ({'round': 3}, {})
    """
    record = RecordDict({_FIELDS: ConfigRecord({_FIELDS: json.dumps(dict(fields))})})
    if tree is not None:
        data = pack(tree)
        record[_TREE] = ArrayRecord({_TREE: Array("uint8", (len(data),), _ARRAY_TYPE, data)})
    return record


def from_record(content: RecordDict, max_bytes: int) -> tuple[dict[str, Any], Tree]:
    """Return the fields and the tree of an untrusted message; the tree may have at most `max_bytes` bytes."""
    try:
        text = content[_FIELDS][_FIELDS]
        packed = content[_TREE][_TREE] if _TREE in content else None
        if not isinstance(text, str) or len(text) > _MAX_FIELDS_LENGTH or not isinstance(packed, Array | None):
            raise TypeError
        fields = parse_json(text)
        check_settings(fields, "The message")
        fields = dict(fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DeployError("The message does not have FedTailor's format.") from error
    return fields, {} if packed is None else unpack(packed.data, max_bytes)
