"""Robust aggregation: how the server protects the mean of uploads from a minority of arbitrary clients."""

from dataclasses import dataclass
from math import ceil
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor

from fedtailor.core.fields import Constraint, Positive, check_fields
from fedtailor.core.robust_rules import (
    geometric_median_weights,
    gram_matrix,
    multi_krum_weights,
    trimmed_mean,
    trimmed_rows,
)
from fedtailor.core.trees import Rows, Tree, add, leaves, map_leaves, repeat, sub, take
from fedtailor.core.updates import choose_rows, float_values, map_pairs, norms, reference, restore, scale_rows, updates

Kind = Literal["none", "median", "trimmed_mean", "multi_krum", "geometric_median", "norm_bound"]
KINDS: tuple[str, ...] = get_args(Kind)[1:]
ROWWISE: tuple[str, ...] = ("median", "trimmed_mean", "norm_bound")  # kinds for tables in which rows may be absent
_ROUNDING = 1e-9  # so that 0.07 of 100 clients are 7
_Share = Annotated[float, Constraint("at least 0 and below 0.5", lambda value: 0 <= value < 0.5)]


@dataclass(frozen=True)
class Robust:
    """How the server protects itself from uploads that are finite and have the right shape, but spoil the model.

    Every named part of an upload, such as "params" or SCAFFOLD's "control_delta", is treated by itself, as its change
    from the message if the message has the same name. Under all kinds but `norm_bound`, every client of a round counts
    the same, because its number of samples is a claim.

    >>> rule = Robust(kind="median")
    >>> rule.mean({"w": torch.tensor([[1.0], [2.0], [1e6]])})
    {'w': tensor([2.])}
    """

    kind: Annotated[Kind, "rule in place of the mean of uploads; norm_bound: only large updates are scaled down"] = (
        "none"
    )
    fraction: Annotated[
        _Share, "share of malicious clients that trimmed_mean and multi_krum withstand, rounded up to a number"
    ] = 0.2
    bound: Annotated[Positive, "maximum norm of an update under norm_bound, in median norms of the round's updates"] = (
        2.0
    )

    def __post_init__(self) -> None:
        check_fields(self, "robust.")

    @property
    def is_on(self) -> bool:
        """Whether uploads are changed or averaged in another way."""
        return self.kind != "none"

    @property
    def replaces_mean(self) -> bool:
        """Whether another value takes the place of the mean of uploads."""
        return self.kind not in ("none", "norm_bound")

    def malicious(self, clients: int) -> int:
        """Return the assumed number of malicious clients among those of a round.

        >>> Robust(fraction=0.2).malicious(4), Robust(fraction=0.2).malicious(10)
        (1, 2)
        """
        return ceil(self.fraction * clients - _ROUNDING)

    def too_few(self, clients: int) -> str | None:
        """Return why a round with this number of clients cannot be aggregated, or None.

        >>> Robust(kind="multi_krum").too_few(5), Robust(kind="multi_krum").too_few(6)
        (None, 'multi_krum needs more than 2f + 2 = 6 clients to withstand f = 2 malicious ones')
        """
        count = self.malicious(clients)
        purpose = f"clients to withstand f = {count} malicious ones"
        if self.kind == "multi_krum" and clients <= 2 * count + 2:
            return f"multi_krum needs more than 2f + 2 = {2 * count + 2} {purpose}"
        if self.kind == "trimmed_mean" and clients <= 2 * count:
            return f"trimmed_mean needs more than 2f = {2 * count} {purpose}"
        if self.kind in ("median", "geometric_median", "norm_bound") and clients < 3:
            return f"{self.kind} needs at least 3 clients to outvote one"
        return None

    def mean(self, stacked: Tree) -> Tree:
        """Return what takes the place of the mean over clients, of a tree whose clients started from the same values.

        A table in which rows may be absent is averaged row by row, over the clients that have the row.
        """
        if self.kind in ("median", "trimmed_mean"):
            return map_pairs(lambda _, leaf, __: self._trimmed(leaf), stacked, {})
        products = gram_matrix(stacked)
        if self.kind == "multi_krum":
            weights = multi_krum_weights(products, self.malicious(len(products)))
        else:
            weights = geometric_median_weights(products)
        return map_leaves(lambda leaf: _mix(weights, leaf), stacked)

    def mean_upload(self, uploads: Tree, sent: Tree) -> Tree:
        """Return stacked uploads of which every row is the robust mean, so that any mean over them is this one.

        >>> Robust(kind="median").mean_upload({"w": torch.tensor([[1.0], [2.0], [1e6]])}, {})["w"].flatten().tolist()
        [2.0, 2.0, 2.0]
        """
        return {name: self._mean_part({name: part}, {name: sent.get(name)})[name] for name, part in uploads.items()}

    def _mean_part(self, part: Tree, sent: Tree) -> Tree:
        count = next((len(values) for _, leaf in leaves(part) if (values := float_values(leaf)) is not None), 0)
        if not count:  # FedADMM's statistics may be empty
            return part
        start = map_pairs(_start, part, sent)
        is_common = all(leaf.stride(0) == 0 for _, leaf in leaves(start) if isinstance(leaf, Tensor))
        # clients of FedLAG start with layers of their own, which may be outliers, too
        center = take(start, 0) if is_common else self.mean(start)
        return repeat(add(center, self.mean(sub(part, start))), count)

    def bounded(self, uploads: Tree, sent: Tree) -> Tree:
        """Return stacked uploads in which no part's update is longer than `bound` times the clients' median, under
        `norm_bound`; unchanged under the other kinds.

        >>> uploads = {"w": torch.tensor([[1.0], [1.0], [-90.0]])}
        >>> Robust(kind="norm_bound", bound=2).bounded(uploads, {})["w"].flatten().tolist()
        [1.0, 1.0, -2.0]
        """
        if self.kind != "norm_bound":
            return uploads
        return {name: self._bounded({name: part}, {name: sent.get(name)})[name] for name, part in uploads.items()}

    def _bounded(self, part: Tree, sent: Tree) -> Tree:
        changed = updates(part, sent)
        lengths = norms(changed)
        if lengths is None:
            return part
        limit = self.bound * float(trimmed_mean(lengths[:, None].cpu(), (len(lengths) - 1) // 2))
        is_long = lengths > limit
        if not bool(is_long.any()):
            return part
        shorter = scale_rows(torch.where(is_long, limit / lengths, 1), changed)
        return choose_rows(is_long, map_pairs(restore, shorter, sent), part)  # the others keep their bits

    def _trimmed(self, leaf: Any) -> Any:
        """Return the trimmed mean over clients; the median is the mean without all but one or two middle values."""
        if isinstance(leaf, Rows):
            count = leaf.present.sum(0)
            middle = ((count - 1) // 2).clamp(min=0)
            if self.kind == "median":
                return trimmed_rows(leaf, middle)
            return trimmed_rows(leaf, torch.minimum((self.fraction * count - _ROUNDING).ceil().long(), middle))
        trim = (len(leaf) - 1) // 2 if self.kind == "median" else self.malicious(len(leaf))
        return trimmed_mean(leaf, trim)


def _start(path: str, leaf: Tensor, sent: Any) -> Tensor:
    """Return what each client was sent under the same name, or zeros."""
    before = reference(leaf, sent)
    return leaf.new_zeros(()).expand_as(leaf) if before is None else before


def _mix(weights: Tensor, leaf: Tensor) -> Tensor:
    mixed: Tensor = torch.tensordot(weights.to(leaf), leaf, dims=1)
    return mixed
