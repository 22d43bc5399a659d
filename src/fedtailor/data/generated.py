"""Data that the papers generate: Self-FL's two-level Gaussian model and FedLAG's rectangles, with their clients."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np

from fedtailor.core.fields import Fraction, NonNegative, Positive, PositiveInt
from fedtailor.data.dataset import BY_OWNER, PUBLISHER, PartitionedData
from fedtailor.data.federation import Federation
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

_CENTERS = (-6.0, -2.0, 2.0, 6.0)  # x of the own boundary of each of FedLAG's users; the paper states the first one
_SIDES = (-1, -1, 1, 1)  # side of this boundary on which a user has class 1
_EXTENT = 2.0  # of the rectangles, from the own boundary to both sides, and from y = 0 up and down


@dataclass(frozen=True, kw_only=True)
class GeneratedData(PartitionedData):
    """Samples that are drawn at random, with their clients."""

    network: ClassVar[str | None] = "logistic"
    license: ClassVar[str] = "none needed"

    partition: Annotated[str, "by_owner: the clients of the model; others pool their samples"] = BY_OWNER
    min_size: Annotated[int, "minimum number of samples per client"] = 2


@dataclass(frozen=True, kw_only=True)
class Gaussian(GeneratedData):
    """Self-FL's two-level Gaussian model (Section G.1), for the network logistic with one weight and no bias.

    Client m has the parameter θ_m ~ N(theta, between) and N_m samples z ~ N(θ_m, within), with N_m uniform from
    `smallest` to `largest`. Its only test sample is (1, θ_m), so that the mean absolute error is |weight − θ_m|; with
    `target` "common", it is (1, theta), and the error of the global model is that of the common parameter. A training
    sample is (1, z); if `scaled`, both numbers are multiplied by √(N_m / (2 · within)). Up to a constant, the
    mean squared error is then the local objective of Equation 4: (weight − mean of z)² / (2 σ_m²), σ_m² = within / N_m.
    """

    name: ClassVar[str] = "gaussian"
    owners: ClassVar[str] = "20 clients"
    publisher: ClassVar[str] = "generated (Self-FL)"

    clients: Annotated[PositiveInt, "number of clients"] = 20
    theta: Annotated[float, "θ_0, mean of the clients' parameters"] = 1.6
    between: Annotated[NonNegative, "σ_0², variance of the clients' parameters; heterogeneous: 1"] = 0.001
    within: Annotated[Positive, "variance of a client's samples, N_m σ_m²"] = 0.1
    smallest: Annotated[PositiveInt, "smallest number of samples of a client"] = 10
    largest: Annotated[PositiveInt, "largest number of samples of a client; heterogeneous: 200"] = 20
    target: Annotated[Literal["client", "common"], "test samples: the client's parameter θ_m, or the common θ_0"] = (
        "client"
    )
    scaled: Annotated[bool, "scale samples, so that the loss is the paper's local objective; false: x is 1"] = True
    test: Annotated[
        float | Literal["publisher"], "publisher: the true parameter of each client; or a fraction of its samples"
    ] = "publisher"

    def make_federation(self) -> Federation:
        fed = super().make_federation()
        return replace(fed, refit=_reject_resplit) if self.test == PUBLISHER else fed

    def read(self) -> SampleTable:
        if self.smallest > self.largest:
            raise DataError(f"data.smallest must be at most data.largest, got {self.smallest} and {self.largest}.")
        random = np.random.default_rng([self.seed or 0, 4])
        sizes = random.integers(self.smallest, self.largest + 1, self.clients)
        theta = random.normal(self.theta, np.sqrt(self.between), self.clients)
        owner = np.repeat(np.arange(self.clients), sizes)
        scale = np.sqrt(sizes / (2 * self.within))[owner] if self.scaled else np.ones(len(owner))
        samples = random.normal(theta[owner], np.sqrt(self.within))
        return SampleTable(
            x=np.concatenate([scale, np.ones(self.clients)])[:, None],
            y=np.concatenate([scale * samples, theta if self.target == "client" else np.full_like(theta, self.theta)]),
            classes=None,
            owner=np.concatenate([owner, np.arange(self.clients)]),
            owner_names=tuple(str(client) for client in range(self.clients)),
            is_test=np.arange(len(owner) + self.clients) >= len(owner),
        )


@dataclass(frozen=True, kw_only=True)
class Rectangles(GeneratedData):
    """FedLAG's two-dimensional example (Figure 2a): four users, two classes in rectangles.

    Over all users, class 1 is above y = 0 and class 0 below, for x from −8 to 8, except for the fraction `noise` of the
    points, which are on the other side. Each user has `points` points around an own boundary, x = −6, −2, 2, or 6, that
    separates its classes without error: users 1 and 2 have class 1 on the left, users 3 and 4 on the right.
    """

    name: ClassVar[str] = "rectangles"
    owners: ClassVar[str] = "4 users"
    publisher: ClassVar[str] = "generated (FedLAG)"

    clients: Annotated[int | None, "number of clients; with by_owner, none: all four users"] = None
    points: Annotated[PositiveInt, "number of points of a user"] = 200
    noise: Annotated[Fraction, "fraction of points on the other side of y = 0"] = 0.2

    def read(self) -> SampleTable:
        random = np.random.default_rng([self.seed or 0, 5])
        owner = np.repeat(np.arange(len(_CENTERS)), self.points)
        labels = np.tile(np.arange(self.points) % 2, len(_CENTERS))
        sign = 2 * labels - 1
        is_noise = random.random(len(labels)) < self.noise
        x, y = _EXTENT * random.random((2, len(labels)))
        x = np.array(_CENTERS)[owner] + np.array(_SIDES)[owner] * sign * x
        y = np.where(is_noise, -sign, sign) * y
        names = tuple(str(user + 1) for user in range(len(_CENTERS)))
        return SampleTable(np.stack([x, y], 1).astype(np.float32), labels, 2, owner, names)


def _reject_resplit(fed: Federation) -> Federation:
    raise DataError("The test samples of gaussian are true parameters and cannot be drawn anew; set data.test to 0.25.")
