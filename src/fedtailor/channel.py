"""The channel for uploads: clipped, noisy, thinned out, quantised. Methods do not know it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedtailor.method import Method
from fedtailor.trees import Tree


@dataclass(frozen=True)
class Channel:
    """What happens to uploads on their way; by default nothing."""

    clip: float | None = None  # C, most that an upload's change may measure (L2); none: any

    @property
    def plain(self) -> bool:
        """Whether uploads arrive as they are."""
        return self.clip is None

    def check(self, method: Method) -> None:
        """Refuse a method for which this makes no sense."""

    def encode(self, uploads: Tree, sent: Tree, clients: Sequence[int], round: int, seed: int) -> Tree:
        """What crosses, stacked, for clients that were sent this: its bytes are what is counted."""
        return uploads

    def decode(self, encoded: Tree, sent: Tree) -> Tree:
        """The uploads as the server reads them."""
        return encoded

    def spent(self, cohorts: Sequence[Sequence[int]], num_clients: int) -> dict[str, Any]:
        """What the record says of a round: the privacy spent so far (`epsilon`), where there is noise; `cohorts` are
        the clients whose uploads arrived, round by round."""
        return {}
