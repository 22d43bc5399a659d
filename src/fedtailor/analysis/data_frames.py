"""Rows as pandas DataFrames; pandas is optional."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedtailor.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd


def to_data_frame(rows: Sequence[dict[str, Any]]) -> "pd.DataFrame":
    """Return rows as a DataFrame.

    >>> to_data_frame([{"method": "FedAvg", "score": 0.5}])["score"].tolist()
    [0.5]
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ConfigError("pandas is not installed: pip install 'fedtailor[pandas]'.") from error
    return pd.DataFrame(list(rows))
