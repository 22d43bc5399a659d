"""Rules that replace the mean of stacked values so that a few arbitrary clients cannot move it far."""

import torch
from torch import Tensor

from fedtailor.core.system import to_float64
from fedtailor.core.trees import Rows, Tree, leaves
from fedtailor.core.updates import float_values

_MAX_STEPS = 1000  # of Weiszfeld's algorithm; a few dozen usually suffice
_TOLERANCE = 1e-9  # change of the weights at which it ends
_MIN_DISTANCE = 1e-6  # of a client to the geometric median, in units of the median distance


def trimmed_mean(values: Tensor, trim: int) -> Tensor:
    """Return the mean of every entry without its `trim` smallest and its `trim` largest values.

    >>> trimmed_mean(torch.tensor([[1.0], [2.0], [9.0]]), 1)
    tensor([2.])
    """
    if trim == 0:
        return values.mean(0)
    ordered = values.sort(0).values
    return ordered[trim : len(values) - trim].mean(0)


def trimmed_rows(rows: Rows, trim: Tensor) -> Rows:
    """Return the trimmed mean of every row over the clients that have it; `trim` has one number per row.

    >>> rows = Rows(torch.tensor([[[1.0]], [[0.0]], [[3.0]]]), torch.tensor([[True], [False], [True]]))
    >>> trimmed_rows(rows, torch.tensor([0])).values
    tensor([[2.]])
    """
    values, shape = rows.values, rows.present.shape + (1,) * (rows.values.ndim - 2)
    ordered = torch.where(rows.present.reshape(shape), values, torch.inf).sort(0).values  # absent rows come last
    count = rows.present.sum(0)
    place = torch.arange(len(values), device=values.device)[:, None]
    kept = ((place >= trim) & (place < count - trim)).reshape(shape)
    total = torch.where(kept, ordered, 0).sum(0)
    return Rows(total / kept.sum(0).clamp(min=1), count > 0)


def gram_matrix(stacked: Tree) -> Tensor:
    """Return the inner products of all pairs of clients in float64 on the CPU, [clients, clients]."""
    tensors = [values for _, leaf in leaves(stacked) if (values := float_values(leaf)) is not None]
    flat = [to_float64(values.reshape(len(values), -1)) for values in tensors]
    return torch.stack([(part @ part.T).cpu().double() for part in flat]).sum(0)


def squared_distances(products: Tensor) -> Tensor:
    """Return the squared distances of all pairs of clients, given their inner products.

    >>> squared_distances(torch.tensor([[1.0, 0.0], [0.0, 4.0]]))
    tensor([[0., 5.],
            [5., 0.]])
    """
    squares = products.diagonal()
    found = (squares + squares[:, None] - 2 * products).clamp(min=0)
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf).fill_diagonal_(0)


def multi_krum_weights(products: Tensor, malicious: int) -> Tensor:
    """Return equal weights of the n − f clients whose n − f − 2 nearest neighbors are closest (Blanchard et al. 2017).

    >>> points = torch.tensor([[0.0], [1.0], [2.0], [1.0], [90.0]], dtype=torch.float64)
    >>> multi_krum_weights(points @ points.T, malicious=1)
    tensor([0.2500, 0.2500, 0.2500, 0.2500, 0.0000], dtype=torch.float64)
    """
    count = len(products)
    distances = squared_distances(products).fill_diagonal_(torch.inf).sort(1).values
    scores = distances[:, : count - malicious - 2].sum(1)
    chosen = scores.argsort(stable=True)[: count - malicious]
    return torch.zeros(count, dtype=torch.float64).index_fill(0, chosen, 1 / len(chosen))


def geometric_median_weights(products: Tensor) -> Tensor:
    """Return the weights with which the geometric median, the point with the smallest sum of distances to all clients,
    is a mean of the clients: Weiszfeld's algorithm on their inner products (Pillutla, Kakade, Harchaoui 2022).

    >>> points = torch.tensor([[0.0], [1.0], [90.0]], dtype=torch.float64)
    >>> float(geometric_median_weights(points @ points.T) @ points[:, 0]) - 1 < 1e-3
    True
    """
    distances = squared_distances(products).sqrt()
    central = distances[distances.sum(1).argmin()]  # from the client that is closest to all others
    nearest = central.argsort(stable=True)[: len(products) // 2 + 1]
    weights = torch.zeros(len(products), dtype=torch.float64).index_fill(0, nearest, 1 / len(nearest))
    floor = _MIN_DISTANCE * float(central[nearest].max())
    if floor == 0:  # more than half of the clients are equal
        return weights
    finite = products.diagonal().isfinite()
    products = torch.where(finite & finite[:, None], products, 0)
    for _ in range(_MAX_STEPS):
        squared = products.diagonal() - 2 * products @ weights + weights @ products @ weights
        inverse = torch.where(finite, 1 / squared.clamp(min=floor**2).sqrt(), 0)
        new = inverse / inverse.sum()
        if float((new - weights).abs().max()) < _TOLERANCE:
            return new
        weights = new
    return weights
