"""Content of messages between the server and clients: named fields as JSON and a tree, in Flower's records.

A tree is serialized as on disk (`runs/serialization.py`), so one reader handles all untrusted tensors.
"""

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import RecordDict

from fedtailor.core.trees import Tree
from fedtailor.core.untrusted_input import check_settings, parse_json
from fedtailor.deploy.executor import unwrap, wrap
from fedtailor.errors import DeployError
from fedtailor.runs.serialization import pack, unpack

_MAX_FIELDS_LENGTH = 2**20  # characters; enough for the sizes of 100,000 clients


def to_record(fields: Mapping[str, Any], tree: Tree | None = None) -> RecordDict:
    """Return the content of a message.

    >>> from_record(to_record({"round": 3}), max_bytes=0)
    ({'round': 3}, {})
    """
    return wrap(json.dumps(dict(fields)), b"" if tree is None else pack(tree))


def from_record(content: RecordDict, max_bytes: int) -> tuple[dict[str, Any], Tree]:
    """Return the fields and the tree of an untrusted message; the tree may have at most `max_bytes` bytes."""
    return parse_message(*unwrap(content), max_bytes)


def parse_message(text: str, data: bytes, max_bytes: int) -> tuple[dict[str, Any], Tree]:
    """Return the fields and the tree in the parts of an untrusted message.

    >>> parse_message("[1]", b"", max_bytes=0)
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The message does not have FedTailor's format.
    """
    try:
        if len(text) > _MAX_FIELDS_LENGTH:
            raise ValueError
        fields = parse_json(text)
        check_settings(fields, "The message")
        fields = dict(fields)
    except (TypeError, ValueError) as error:
        raise DeployError("The message does not have FedTailor's format.") from error
    return fields, unpack(data, max_bytes) if data else {}
