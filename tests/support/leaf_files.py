"""Small files in the layout of LEAF's preprocess.sh."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Samples = tuple[list[Any], list[Any]]  # x and y of one user


def leaf_content(users: Mapping[str, Samples], /, **changes: Any) -> dict[str, Any]:
    """Return the content of one of LEAF's files."""
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()},
    } | changes


def save_leaf(folder: Path, part: str, users: Mapping[str, Samples], number: int = 0, /, **changes: Any) -> Path:
    """Write a file of data/train, data/test, or data/all_data, and return the data set's folder."""
    path = folder / "data" / part / f"all_data_{number}_niid_0_keep_0.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(leaf_content(users, **changes)))
    return folder


def gray_image(byte: int) -> list[float]:
    """Return an image as LEAF writes it: 784 numbers k / 255; the first pixel is the byte, and the others are white."""
    return [byte / 255] + [1.0] * 783


def tweet(text: str) -> list[str]:
    """Return a tweet as LEAF writes it."""
    return ["2087", "Sat May 16 23:58:44 UTC 2009", "NO_QUERY", "ann", text, "training"]
