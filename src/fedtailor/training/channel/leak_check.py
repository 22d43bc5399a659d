"""Detect uploads that contain training inputs."""

from collections.abc import Callable, Iterator, Sequence
from math import nan

import torch
from torch import Tensor

from fedtailor.core import random
from fedtailor.core.batch import take_samples
from fedtailor.core.model import Inputs
from fedtailor.core.trees import Rows, Tree, leaves
from fedtailor.errors import ConfigError
from fedtailor.training.sample_index import SampleIndex

_MIN_VALUES = 8  # fewer equal values may be a coincidence: the mean of one example is that example
_PROJECTED_VALUES = 32  # values of an example that are projected: those with the largest variance
_VARIANCE_SAMPLES = 1000  # examples from which that variance is estimated
_BLOCK_SIZE = 2**22  # values of examples projected in one batch; limits memory, does not affect the result


class LeakCheck:
    """Rejects uploads that contain unmodified training inputs: all of them, a batch, or one example.

    This protects against mistakes in a method, not against a malicious one: it finds an example only if it is complete,
    not augmented, and starts at a multiple of its length in a tensor. Rows of uploads are first compared with the
    client's examples by a random projection of a few values, and matches are then compared value by value.
    """

    def __init__(self, x: Inputs, prepare: Callable[[Inputs], Inputs]) -> None:
        self._parts: dict[str, Tensor] = x if isinstance(x, dict) else {"": x}
        self._prepare = prepare
        self._columns: dict[str, Tensor] = {}
        self._projections: dict[str, Tensor] = {}  # one per example; NaN until its client takes part

    def check(self, method: str, clients: Sequence[int], samples: SampleIndex, uploads: Tree) -> None:
        """Raise `ConfigError` if a client's part of the stacked uploads contains its training inputs."""
        for path, leaf in leaves(uploads):
            values = leaf.values if isinstance(leaf, Rows) else leaf  # [clients, ...]
            for name, part in self._parts.items():
                if values[0].numel() % part[0].numel() == 0:
                    for client in self._leaking_clients(values, clients, name, samples):
                        problem = f"'{path}' contains their exact values"
                        raise ConfigError(f"{method} would send client {client}'s training inputs: {problem}.")

    def _leaking_clients(
        self, values: Tensor, clients: Sequence[int], name: str, samples: SampleIndex
    ) -> Iterator[int]:
        """Yield the clients whose rows of `values` are among their examples."""
        part = self._parts[name]
        rows = values.reshape(-1, *part.shape[1:])
        if not values.is_floating_point() and values.dtype == part.dtype:
            rows = self._preprocess(name, rows)
        rows = _flatten(rows)
        # Projections are in (-1, 1). With a separate offset per client, one sorted search serves all clients.
        owned, rows_per_client = [samples[client] for client in clients], len(rows) // len(clients)
        known = self._project_examples(name, torch.cat(owned)) + _offsets([len(own) for own in owned], rows)
        known = known.sort().values
        columns = self._columns_of(name, rows.device)
        projections = _project(rows[:, columns]) + _offsets([rows_per_client] * len(clients), rows)
        nearest = known[torch.searchsorted(known, projections - 1e-9).clamp(max=len(known) - 1)]
        suspects = ((nearest - projections).abs() < 2e-9).nonzero()[:, 0]
        for position in sorted(set((suspects // max(rows_per_client, 1)).tolist())):
            examples = _flatten(self._preprocess(name, take_samples(part, owned[position])))
            candidates = _drop_constant(rows[suspects[suspects // rows_per_client == position]])
            same = [row for row in candidates if bool((examples == row).all(1).any())]
            if len(same) * rows.shape[1] >= _MIN_VALUES:
                yield clients[position]

    def _project_examples(self, name: str, samples: Tensor) -> Tensor:
        """Return the projections of these examples; each is computed once."""
        part = self._parts[name]
        if name not in self._projections:
            self._projections[name] = torch.full((len(part),), nan, dtype=torch.float64, device=samples.device)
        projections = self._projections[name]
        for new in torch.split(samples[projections[samples].isnan()], max(1, _BLOCK_SIZE // part[0].numel())):
            examples = _flatten(self._preprocess(name, take_samples(part, new)))
            projections[new] = _project(examples[:, self._columns_of(name, new.device)])
        return projections[samples]

    def _columns_of(self, name: str, device: torch.device) -> Tensor:
        """Return the positions of the values with the largest variance over examples."""
        if name not in self._columns:
            part = self._parts[name]
            count = min(len(part), _VARIANCE_SAMPLES, max(2, _BLOCK_SIZE // part[0].numel()))
            first = take_samples(part, torch.arange(count, device=device))
            examples = _flatten(self._preprocess(name, first)).double()
            count = min(_PROJECTED_VALUES, examples.shape[1])
            self._columns[name] = examples.var(0, correction=0).topk(count).indices.sort().values
        return self._columns[name]

    def _preprocess(self, name: str, part: Tensor) -> Tensor:
        """Return examples as methods receive them."""
        return self._prepare({name: part})[name] if name else self._prepare(part)  # type: ignore[no-any-return]


def _flatten(rows: Tensor) -> Tensor:
    return rows.flatten(1) if rows.ndim > 1 else rows[:, None]


def _offsets(counts: Sequence[int], like: Tensor) -> Tensor:
    """Return one offset per row, for `counts[i]` rows of client i; intervals of different clients do not overlap."""
    offsets = 4.0 * torch.arange(len(counts), dtype=torch.float64)
    return offsets.repeat_interleave(torch.tensor(counts)).to(like.device)


def _drop_constant(rows: Tensor) -> Tensor:
    """Return the rows that are not constant, unless rows have a single value: constant images are no leak."""
    return rows if rows.shape[1] == 1 else rows[(rows != rows[:, :1]).any(1)]


def _project(rows: Tensor) -> Tensor:
    width = rows.shape[1]
    direction = random.uniform(random.make_key(width), (width,), torch.float64, rows.device) - 0.5
    rows = torch.nan_to_num(rows).double()
    norms: Tensor = torch.linalg.vector_norm(rows, 1, dim=1)
    return rows @ direction / (1 + norms)
