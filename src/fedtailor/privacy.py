"""Gaussian noise for uploads, and what it is worth: the ε of client-level differential privacy."""

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from math import pi, sqrt
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from fedtailor import hashing
from fedtailor.errors import Refused

_RADIUS, _ANGLE = 0x52414449, 0x414E474C  # salts, larger than any number of a round, which stands there elsewhere
_AT_ONCE = 2**22  # numbers drawn at once; bounds memory, changes nothing else

Seed = int | bytes  # a number that everyone knows, to repeat a simulation; or a secret, where noise must hide something


def gaussian(like: Tensor, clients: Sequence[int], path: str, round: int, seed: Seed) -> Tensor:
    """Standard normal numbers in the shape of a stacked tensor, a function of seed, round, client and path alone; of a
    secret that is new for every message, a function of that and the path.

    By Box and Muller, from two words of 32 bits with a key each: no number is beyond 6.8, and where two tensors of a
    long run have one key in common, by chance, they do not have their noise in common.

    >>> gaussian(torch.zeros(2, 3), [4, 7], "params/w", round=1, seed=0).shape
    torch.Size([2, 3])
    """
    if isinstance(seed, bytes):
        return _draw_secretly(like, path, seed)
    count = like[0].numel()
    parts = torch.split(torch.tensor(clients, device=like.device), max(1, _AT_ONCE // max(count, 1)))
    drawn = [_draw(some, count, crc32(path.encode()), round, seed) for some in parts]
    return torch.cat(drawn).reshape(like.shape).to(like.dtype)


def _draw(clients: Tensor, count: int, path: int, round: int, seed: int) -> Tensor:
    """[clients, count]; cosine and sine of one angle are two numbers."""

    def uniform(salt: int) -> Tensor:
        keys = torch.as_tensor(hashing.key(seed, salt, round, clients, path))
        words = hashing.words(keys[:, None], (count + 1) // 2, clients.device)
        return (words.double() + 0.5) * 2.0**-32

    radius, angle = uniform(_RADIUS).log().mul(-2).sqrt(), uniform(_ANGLE) * (2 * pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count]


def _draw_secretly(like: Tensor, path: str, secret: bytes) -> Tensor:
    """From 128 secret bits: the 32 bits of a simulation's keys could be tried out one by one."""
    random = np.random.Generator(np.random.Philox(int.from_bytes(sha256(secret + path.encode()).digest())))
    return torch.from_numpy(random.standard_normal(tuple(like.shape))).to(like)


@cache
def epsilon(noise: float, times: int, delta: float) -> float:
    """The ε, at this δ, of a client that took part so many times, each under noise of so many times its largest change.

    Such rounds are together one with noise/√times, whose ε is known exactly (Balle and Wang 2018). That a round's
    clients are drawn at random is not counted in their favour.

    >>> round(epsilon(noise=1.0, times=1, delta=1e-5), 2)
    4.38
    """
    if times == 0:
        return 0.0
    require_accountant()
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(noise / sqrt(times), delta))


def require_accountant() -> None:
    """Refuse where the library that counts privacy is not installed."""
    try:
        import dp_accounting  # noqa: F401 - an optional dependency: only whoever adds noise needs it
    except ImportError as error:
        raise Refused("Noise needs a library that counts privacy: pip install 'fedtailor[privacy]'.") from error
