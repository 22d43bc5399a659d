"""Where clients' states lie between rounds."""

from collections.abc import Sequence

import torch

from fedtailor.errors import Refused
from fedtailor.trees import Tree, flatten, map_leaves, take


class ClientStore:
    """One tree for every client, kept in main memory.

    Room for everybody is asked for at once but only filled, page by page, by clients that took part; everyone else is
    at the common start.

    >>> store = ClientStore({"a": torch.zeros(2)}, clients=3)
    >>> store.put([1], {"a": torch.ones(1, 2)})
    >>> store.get([0, 1], torch.device("cpu"))["a"].tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, start: Tree, clients: int) -> None:
        self._start = start
        self._rows = map_leaves(lambda leaf: torch.empty(clients, *leaf.shape, dtype=leaf.dtype), start)
        self._moved = torch.zeros(clients, dtype=torch.bool)

    def put(self, clients: Sequence[int], stacked: Tree) -> None:
        """Keep the trees of these clients; names and shapes are those of the start."""
        self._match(stacked)
        where = torch.tensor(clients)
        map_leaves(lambda rows, leaf: rows.index_copy_(0, where, leaf.to("cpu")), self._rows, stacked)
        self._moved[where] = True

    def get(self, clients: Sequence[int], device: torch.device) -> Tree:
        """The trees of these clients, stacked."""
        where = torch.tensor(clients)
        moved = self._moved[where]

        def rows(kept: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            found = kept[where] if bool(moved.all()) else start.cpu().expand(len(clients), *start.shape).clone()
            found[moved] = kept[where[moved]]
            return found.to(device)

        return map_leaves(rows, self._rows, self._start)

    def one(self, client: int) -> Tree:
        return take(self.get([client], torch.device("cpu")), 0)

    def has(self, client: int) -> bool:
        """Whether this client's tree was ever put."""
        return bool(self._moved[client])

    def _match(self, stacked: Tree) -> None:
        kept, new = flatten(self._rows), flatten(stacked)
        for name in kept.keys() | new.keys():
            if name not in kept or name not in new or _kind(kept[name]) != _kind(new[name]):
                raise Refused(f"A client's state or model changed its names or shapes at '{name}'; these must stay.")


def _kind(rows: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return rows.shape[1:], rows.dtype
