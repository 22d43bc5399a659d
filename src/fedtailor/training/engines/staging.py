"""Copy the samples of a few clients to the device, if the samples of all clients do not fit there."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedtailor.core.batch import SharedContext, as_parts, take_samples
from fedtailor.core.memory_limits import fits_on_device
from fedtailor.training.sample_index import SampleIndex


def stage(
    shared: SharedContext, samples: SampleIndex, clients: Sequence[int]
) -> tuple[SharedContext, SampleIndex, Sequence[int]]:
    """Return a context with the samples of these clients on the device, an index into them, and the clients' numbers
    in that index.

    Nothing changes if all samples are on the device already, or if those of these clients do not fit either; then the
    rows of each batch are copied.
    """
    if not is_on_host(shared):
        return shared, samples, clients
    sizes = samples.sizes[list(clients)]
    # Sorted positions, because a file is read fastest from its beginning to its end; common samples are copied once.
    rows, positions = torch.unique(torch.cat([samples[client] for client in clients]), return_inverse=True)
    size = sum(part[0].nbytes for part in as_parts(shared.x).values()) * len(rows)
    if not fits_on_device(size, samples.device):
        return shared, samples, clients
    staged = replace(shared, x=take_samples(shared.x, rows), y=shared.y[rows])
    index = SampleIndex(torch.split(positions, sizes.tolist()), samples.device)
    return staged, index, np.arange(len(sizes)).tolist()


def is_on_host(shared: SharedContext) -> bool:
    """Return whether the inputs are in another memory than the one in which clients train."""
    return any(part.device != shared.y.device for part in as_parts(shared.x).values())
