"""Data that the papers generate: Self-FL's two-level Gaussian model and FedLAG's rectangles, with their clients."""

import numpy as np

from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

_CENTERS = (-6.0, -2.0, 2.0, 6.0)  # x of the own boundary of each of FedLAG's users; the paper states the first one
_SIDES = (-1, -1, 1, 1)  # side of this boundary on which a user has class 1
_EXTENT = 2.0  # of the rectangles, from the own boundary to both sides, and from y = 0 up and down


def gaussian(
    *,
    clients: int = 20,
    center: float = 1.6,
    between: float = 0.001,
    within: float = 0.1,
    sizes: tuple[int, int] = (10, 20),
    scaled: bool = True,
    seed: int = 0,
) -> SampleTable:
    """Draw the two-level Gaussian model of Self-FL (Section G.1), for a network with one weight and no bias.

    Client m has the parameter θ_m ~ N(center, between) and N_m samples z ~ N(θ_m, within), with N_m uniform in `sizes`.
    Its test sample is (1, θ_m), so that the absolute error on it is |weight − θ_m|. A training sample is (1, z); if
    `scaled`, both numbers are multiplied by √(N_m / (2 · within)). Up to a constant, the mean squared error is then the
    local objective of Equation 4: (weight − mean of z)² / (2 σ_m²) with σ_m² = within / N_m.

    >>> table = gaussian(clients=3, sizes=(5, 5))
    >>> table.num_samples, int(table.is_test.sum())
    (18, 3)
    """
    low, high = sizes
    if clients < 1 or not 1 <= low <= high:
        raise DataError(
            f"There must be 1 client or more, with 1 ≤ N_m; got {clients} clients and sizes {low} to {high}."
        )
    if not (0 <= between < np.inf and 0 < within < np.inf):
        raise DataError(f"between must be at least 0 and within above 0, got {between} and {within}.")
    random = np.random.default_rng([seed, 4])
    counts = random.integers(low, high + 1, clients)
    theta = random.normal(center, np.sqrt(between), clients)
    owner = np.repeat(np.arange(clients), counts)
    scale = np.sqrt(counts / (2 * within))[owner] if scaled else np.ones(len(owner))
    samples = random.normal(theta[owner], np.sqrt(within))
    return SampleTable(
        x=np.concatenate([scale, np.ones(clients)])[:, None],
        y=np.concatenate([scale * samples, theta]),
        classes=None,
        owner=np.concatenate([owner, np.arange(clients)]),
        owner_names=tuple(str(client) for client in range(clients)),
        is_test=np.arange(len(owner) + clients) >= len(owner),
    )


def rectangles(*, samples: int = 200, noise: float = 0.2, seed: int = 0) -> SampleTable:
    """Draw the two-dimensional example of FedLAG (Figure 2a): four users, two classes in rectangles.

    Over all users, class 1 is above y = 0 and class 0 below, for x from −8 to 8, except for the fraction `noise` of the
    points, which are on the other side. Each user has `samples` points around an own boundary, x = −6, −2, 2, or 6,
    that separates its classes without error: users 1 and 2 have class 1 on the left, users 3 and 4 on the right.

    >>> rectangles(samples=50).x.shape
    (200, 2)
    """
    if samples < 2 or not 0 <= noise <= 1:
        raise DataError(f"samples must be at least 2 and noise from 0 to 1, got {samples} and {noise}.")
    random = np.random.default_rng([seed, 5])
    owner = np.repeat(np.arange(len(_CENTERS)), samples)
    labels = np.tile(np.arange(samples) % 2, len(_CENTERS))
    sign = 2 * labels - 1
    is_noise = random.random(len(labels)) < noise
    x, y = _EXTENT * random.random((2, len(labels)))
    x = np.array(_CENTERS)[owner] + np.array(_SIDES)[owner] * sign * x
    y = np.where(is_noise, -sign, sign) * y
    names = tuple(str(user + 1) for user in range(len(_CENTERS)))
    return SampleTable(np.stack([x, y], 1).astype(np.float32), labels, 2, owner, names)
