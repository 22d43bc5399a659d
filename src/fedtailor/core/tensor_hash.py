"""The hash of tensors, by which runs and files recognize data."""

from collections.abc import Iterable
from hashlib import sha256

import torch
from torch import Tensor


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of the tensors' shapes, dtypes, and values.

    >>> hash_tensors([torch.zeros(2)]) == hash_tensors([torch.zeros(2)]) != hash_tensors([torch.zeros(2, 1)])
    True
    """
    digest = sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; they are not copied if it is contiguous and on the CPU.

    >>> tensor_bytes(torch.tensor([1, 2], dtype=torch.uint8)).tolist()
    [1, 2]
    """
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
