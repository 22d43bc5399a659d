"""Gaussian noise for uploads, and the ε of client-level differential privacy that it gives."""

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from math import pi, sqrt
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from fedtailor.core import random
from fedtailor.errors import ConfigError

_RADIUS, _ANGLE = 0x52414449, 0x414E474C  # salts; larger than any round number, which other keys have in this place
_BLOCK_SIZE = 2**22  # values drawn in one batch; limits memory, does not affect the values

NoiseSeed = int | bytes  # a public seed, for reproducible simulations; or secret bytes, where noise must hide data


def gaussian(like: Tensor, clients: Sequence[int], path: str, round: int, seed: NoiseSeed) -> Tensor:
    """Draw standard normal values in the shape of a stacked tensor.

    The values depend only on seed, round, client, and path; with secret bytes, which are new for every message, only
    on these and the path. They come from the Box-Muller transform of two 32-bit words with separate keys: no value
    exceeds 6.8, and two tensors whose keys collide in one word still have different noise.

    >>> gaussian(torch.zeros(2, 3), [4, 7], "params/w", round=1, seed=0).shape
    torch.Size([2, 3])
    """
    if isinstance(seed, bytes):
        return _draw_from_secret(like, path, seed)
    count = like[0].numel()
    parts = torch.split(torch.tensor(clients, device=like.device), max(1, _BLOCK_SIZE // max(count, 1)))
    drawn = [_draw(part, count, crc32(path.encode()), round, seed) for part in parts]
    return torch.cat(drawn).reshape(like.shape).to(like.dtype)


def _draw(clients: Tensor, count: int, path: int, round: int, seed: int) -> Tensor:
    """Draw values of shape [clients, count]; the cosine and sine of one angle give two of them."""

    def uniform(salt: int) -> Tensor:
        keys = torch.as_tensor(random.make_key(seed, salt, round, clients, path))
        words = random.words(keys[:, None], (count + 1) // 2, clients.device)
        return (words.double() + 0.5) * 2.0**-32

    radius, angle = uniform(_RADIUS).log().mul(-2).sqrt(), uniform(_ANGLE) * (2 * pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count]


def _draw_from_secret(like: Tensor, path: str, secret: bytes) -> Tensor:
    """Draw from 128 secret bits; the 32-bit keys of simulations could be found by exhaustive search."""
    random = np.random.Generator(np.random.Philox(int.from_bytes(sha256(secret + path.encode()).digest())))
    return torch.from_numpy(random.standard_normal(tuple(like.shape))).to(like)


@cache
def epsilon(noise: float, uploads: int, delta: float) -> float:
    """Return the ε at this δ of a client that uploaded `uploads` times with noise of standard deviation `noise` · C.

    These uploads are equivalent to one with noise/√uploads, whose ε is known exactly (Balle and Wang 2018). The random
    selection of clients is not used to amplify privacy.

    >>> round(epsilon(noise=1.0, uploads=1, delta=1e-5), 2)
    4.38
    """
    if uploads == 0:
        return 0.0
    require_accountant()
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(noise / sqrt(uploads), delta))


def require_accountant() -> None:
    """Raise `ConfigError` if the library for privacy accounting is not installed."""
    try:
        import dp_accounting  # noqa: F401 - an optional dependency, needed only for noise
    except ImportError as error:
        raise ConfigError("channel.noise needs dp-accounting; run pip install 'fedtailor[privacy]'.") from error
