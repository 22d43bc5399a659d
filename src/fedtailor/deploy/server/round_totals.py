"""What the status of a run says about its complete rounds: the duration of the last one, and bytes of all."""

from collections.abc import Mapping
from typing import Any


def add_round(totals: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the totals with one more round, given by its record.

    >>> add_round({"bytes_sent": 5}, {"seconds": 2.0, "bytes_down": 10, "bytes_up": 20})
    {'round_seconds': 2.0, 'bytes_sent': 15, 'bytes_received': 20}
    """
    return {
        "round_seconds": record["seconds"],
        "bytes_sent": totals.get("bytes_sent", 0) + record["bytes_down"],
        "bytes_received": totals.get("bytes_received", 0) + record["bytes_up"],
    }
