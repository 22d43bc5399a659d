"""Malicious clients of a simulation, to test robust aggregation with, also as `ft.attacks`.

A malicious client trains as any other, and the attack replaces what it uploads, or the labels on which it trains. The
attacks on uploads know all uploads of the round, honest ones included: the worst case for the server.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.fields import Constraint, FractionBelow1, Positive, check_fields
from fedtailor.core.trees import Rows, Tree
from fedtailor.core.updates import choose_rows, map_floats, map_pairs, norms, restore, scale_rows, updates
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError
from fedtailor.training.channel.privacy import gaussian

_CHOICE = 11  # salt of the random choice of malicious clients
_MARGIN = 0.99  # of a bound that an adaptive attacker stays below
_Clients = Annotated[
    list[int] | None,
    Constraint("one or several different clients", lambda c: c is None or 0 < len(c) == len(set(c))),
]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Base of attacks: which clients are malicious."""

    name: ClassVar[str]

    clients: Annotated[_Clients, "the malicious clients; none: a fraction of all clients, chosen by the seed"] = None
    fraction: Annotated[FractionBelow1, "fraction of clients that are malicious, unless clients are listed"] = 0.2

    def __post_init__(self) -> None:
        check_fields(self, "attack.")

    def choose(self, num_clients: int, seed: int) -> list[int]:
        """Return the malicious clients among those of a run, in ascending order.

        >>> Scaled(clients=[3, 0]).choose(5, seed=0), len(Scaled(fraction=0.4).choose(5, seed=0))
        ([0, 3], 2)
        """
        if self.clients is None:
            count = round(self.fraction * num_clients)
            return sorted(np.random.default_rng([seed, _CHOICE]).permutation(num_clients)[:count].tolist())
        if min(self.clients) < 0 or max(self.clients) >= num_clients:
            raise ConfigError(f"attack.clients must be from 0 to {num_clients - 1}, got {self.clients}.")
        return sorted(self.clients)

    def poison_uploads(self, uploads: Tree, sent: Tree, malicious: Tensor, clients: Sequence[int], round: int) -> Tree:
        """Return the stacked uploads of a round after the attack; `malicious` marks the rows of malicious clients."""
        if not bool(malicious.any()):
            return uploads
        found: Tree = {}
        for name, part in uploads.items():  # every named part by itself, as robust aggregation treats them
            before, own = {name: sent.get(name)}, {name: part}
            changed = self.forge(updates(own, before), malicious, clients, round)
            forged = map_pairs(_restore_finite, changed, before)
            found |= choose_rows(malicious, forged, own)
        return found

    def forge(self, changed: Tree, malicious: Tensor, clients: Sequence[int], round: int) -> Tree:
        """Return the changes that malicious clients claim, given those of all clients; other rows are not used."""
        return changed

    def poison_data(self, fed: Federation, malicious: Sequence[int]) -> Federation:
        """Return the data on which clients train."""
        return fed


@dataclass(frozen=True, kw_only=True)
class Scaled(Attack):
    """Malicious clients multiply their update by a factor: an accident, or an attempt to replace the model."""

    name: ClassVar[str] = "scaled"

    factor: Annotated[float, "factor of the update"] = 1e6

    def forge(self, changed: Tree, malicious: Tensor, clients: Sequence[int], round: int) -> Tree:
        return scale_rows(torch.full((len(clients),), self.factor, device=malicious.device), changed)


@dataclass(frozen=True, kw_only=True)
class SignFlipped(Attack):
    """Malicious clients upload the negative of their update, so that the model moves away from the optimum."""

    name: ClassVar[str] = "sign_flipped"

    factor: Annotated[Positive, "length of the flipped update, in units of the honest one"] = 1.0

    def forge(self, changed: Tree, malicious: Tensor, clients: Sequence[int], round: int) -> Tree:
        return scale_rows(torch.full((len(clients),), -self.factor, device=malicious.device), changed)


@dataclass(frozen=True, kw_only=True)
class Noise(Attack):
    """Malicious clients upload Gaussian noise."""

    name: ClassVar[str] = "noise"

    scale: Annotated[Positive, "expected norm of the noise, in units of the client's own update"] = 10.0

    def forge(self, changed: Tree, malicious: Tensor, clients: Sequence[int], round: int) -> Tree:
        lengths, noise = (
            norms(changed),
            map_pairs(
                lambda path, leaf, _: map_floats(lambda v: gaussian(v, clients, path, round, _CHOICE), leaf),
                changed,
                {},
            ),
        )
        drawn = norms(noise)
        if lengths is None or drawn is None:
            return changed
        return scale_rows(self.scale * lengths / drawn.clamp(min=torch.finfo(drawn.dtype).tiny), noise)


@dataclass(frozen=True, kw_only=True)
class LabelFlipped(Attack):
    """Malicious clients train on labels y′ = K − 1 − y. Their test labels stay as they are."""

    name: ClassVar[str] = "label_flipped"

    def poison_data(self, fed: Federation, malicious: Sequence[int]) -> Federation:
        if fed.classes is None:
            raise ConfigError("attack label_flipped needs classes, and the targets of this federation are numbers.")
        own = torch.cat([fed.train[client] for client in malicious]) if malicious else torch.zeros(0, dtype=torch.int64)
        honest = [fed.train[client] for client in range(fed.num_clients) if client not in set(malicious)]
        others = torch.cat([*honest, *fed.test, *([] if fed.common_test is None else [fed.common_test])])
        if bool(torch.isin(own, others).any()):
            raise ConfigError("attack label_flipped needs training samples that nobody else trains or tests on.")
        y = fed.y.clone()
        y[own] = fed.classes - 1 - y[own]
        return replace(fed, y=y)


@dataclass(frozen=True, kw_only=True)
class LittleIsEnough(Attack):
    """Colluding clients upload the mean of the updates minus z standard deviations in every entry: too little to stand
    out, but consistently wrong (Baruch, Baruch, Goldberg 2019)."""

    name: ClassVar[str] = "little_is_enough"

    z: Annotated[
        float | None, "standard deviations; none: the most for which enough honest clients are farther from the mean"
    ] = None

    def forge(self, changed: Tree, malicious: Tensor, clients: Sequence[int], round: int) -> Tree:
        z = little_is_enough_z(len(clients), int(malicious.sum())) if self.z is None else self.z
        return _collude(changed, malicious, lambda honest: honest.mean(0) - z * honest.std(0, correction=0))


@dataclass(frozen=True, kw_only=True)
class BelowBound(Attack):
    """Adaptive against a norm bound: colluding clients upload the negative mean of the honest updates, just below
    `bound` times the median norm, so that nothing is scaled down."""

    name: ClassVar[str] = "below_bound"

    bound: Annotated[Positive, "the server's robust.bound"] = 2.0

    def forge(self, changed: Tree, malicious: Tensor, clients: Sequence[int], round: int) -> Tree:
        mean = _collude(changed, malicious, lambda honest: -honest.mean(0))
        lengths, own = norms(changed), norms(mean)
        if lengths is None or own is None:
            return changed
        median = lengths[~malicious].median() if bool((~malicious).any()) else lengths.median()
        return scale_rows(_MARGIN * self.bound * median / own.clamp(min=torch.finfo(own.dtype).tiny), mean)


@dataclass(frozen=True, kw_only=True)
class EdgeOfInterval(Attack):
    """Adaptive against the median and the trimmed mean: colluding clients upload, in every entry, the honest value that
    is most opposed to the honest mean, which cannot be told from an honest client's (Fang et al. 2020)."""

    name: ClassVar[str] = "edge_of_interval"

    def forge(self, changed: Tree, malicious: Tensor, clients: Sequence[int], round: int) -> Tree:
        def edge(honest: Tensor) -> Tensor:
            return torch.where(honest.mean(0) > 0, honest.amin(0), honest.amax(0))

        return _collude(changed, malicious, edge)


def little_is_enough_z(clients: int, malicious: int) -> float:
    """Return z_max of Baruch, Baruch, Goldberg (2019): a majority forms with the honest clients that are farther away.

    >>> round(little_is_enough_z(50, 24), 2)
    1.43
    """
    honest = clients - malicious
    supporters = clients // 2 + 1 - malicious
    share = (honest - supporters) / honest if honest else 0.5
    return NormalDist().inv_cdf(share) if 0.5 < share < 1 else 0.0


def _restore_finite(path: str, changed: Tensor | Rows, sent: Any) -> Tensor | Rows:
    """Return message + change; servers reject an upload that is not finite."""
    return map_floats(torch.nan_to_num, restore(path, changed, sent))


def _collude(changed: Tree, malicious: Tensor, choose: Callable[[Tensor], Tensor]) -> Tree:
    """Return changes in which every row is a function of the honest clients' rows, tensor by tensor."""
    known = malicious if bool(malicious.all()) else ~malicious  # without honest clients, they know their own updates
    return map_pairs(lambda _, leaf, __: map_floats(lambda v: choose(v[known]).expand_as(v), leaf), changed, {})


ATTACKS: dict[str, type[Attack]] = {
    kind.name: kind for kind in (Scaled, SignFlipped, Noise, LabelFlipped, LittleIsEnough, BelowBound, EdgeOfInterval)
}
