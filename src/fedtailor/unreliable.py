"""Clients that are away, late or break off, simulated: a pure function of the seed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Unreliable:
    """How unreliable the clients of a simulation are; by default not at all."""

    dropout: float = 0.0  # share of those at work that break off in mid-round

    def available(self, num_clients: int, round: int, seed: int) -> list[int]:
        """Who can be asked in a round, in ascending order."""
        return list(range(num_clients))

    def missed(self, clients: Sequence[int], sizes: NDArray[np.int64], round: int, seed: int) -> dict[int, str]:
        """Who of those asked delivers nothing, and why: "late" or "dropped out"."""
        return {}
