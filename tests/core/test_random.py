"""Random numbers depend only on the key, are equal under vmap, and pass statistical tests."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedtailor.core import random

CPU = torch.device("cpu")
PART = st.integers(0, 2**32 - 1)


def make_keys(count: int) -> Tensor:
    """Return the keys of consecutive clients."""
    return torch.tensor([random.make_key(0, 1, client) for client in range(count)])


def draw(keys: Tensor, count: int) -> Tensor:
    """Return uniform numbers, [keys, count]."""
    return torch.stack([random.uniform(int(k), (count,), torch.float64, CPU) for k in keys])


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def chi_square(counts: Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@given(st.lists(PART, min_size=1, max_size=5))
def test_make_key_of_integers_and_tensors_is_equal(parts: list[int]) -> None:
    assert int(random.make_key(*map(torch.tensor, parts))) == random.make_key(*parts) < 2**32
    mixed = random.make_key(*(torch.tensor(p) if i % 2 else p for i, p in enumerate(parts)))
    assert int(mixed) == random.make_key(*parts)


def test_make_key_depends_on_order_and_number_of_parts() -> None:
    lists = [p for size in range(1, 4) for p in itertools.product(range(6), repeat=size)]
    assert len({random.make_key(*parts) for parts in lists}) == len(lists)


@given(PART, st.integers(1, 60), st.integers(0, 20))
def test_permutation_puts_padding_last(key: int, size: int, padding: int) -> None:
    """Engines that pad must agree with those that do not."""
    plain = random.permutation(key, size, None, CPU)
    padded = random.permutation(key, size + padding, torch.tensor(size), CPU)
    assert sorted(plain.tolist()) == list(range(size))
    assert padded[:size].tolist() == plain.tolist()
    assert padded[size:].tolist() == list(range(size, size + padding))


def test_permutation_is_complete_and_differs_between_keys() -> None:
    assert torch.equal(random.permutation(7, 100_000, None, CPU).sort().values, torch.arange(100_000))
    assert len({tuple(random.permutation(int(k), 12, None, CPU).tolist()) for k in make_keys(500)}) == 500


def test_permutations_of_three_are_equally_likely() -> None:
    orders = torch.func.vmap(lambda k: random.permutation(k, 3, None, CPU))(make_keys(6000))
    unique = torch.unique(orders, dim=0, return_counts=True)
    assert len(unique[0]) == 6
    assert chi_square(unique[1].double()) < 30  # 5 degrees of freedom: exceeded with probability 1e-5


def test_random_numbers_under_vmap_are_bitwise_equal() -> None:
    keys = make_keys(20)
    sizes = torch.arange(1, 21)
    orders = torch.func.vmap(lambda k, n: random.permutation(k, 20, n, CPU))(keys, sizes)
    drawn = torch.func.vmap(lambda k: random.uniform(k, (3, 2), torch.float32, CPU))(keys)
    made: Any = torch.func.vmap(lambda index: random.make_key(5, index, 2))(torch.arange(20))
    for client, (k, n) in enumerate(zip(keys.tolist(), sizes, strict=True)):
        assert torch.equal(orders[client], random.permutation(k, 20, n, CPU))
        assert torch.equal(drawn[client], random.uniform(k, (3, 2), torch.float32, CPU))
        assert int(made[client]) == random.make_key(5, client, 2)


def test_uniform_does_not_depend_on_shape_or_precision() -> None:
    long = random.uniform(3, (50,), torch.float32, CPU)
    assert torch.equal(random.uniform(3, (4, 5), torch.float32, CPU).flatten(), long[:20])
    assert torch.equal(random.uniform(3, (50,), torch.float64, CPU), long.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_is_inside_0_and_1_in_all_dtypes(dtype: torch.dtype) -> None:
    drawn = random.uniform(1, (200_000,), dtype, CPU)
    assert drawn.dtype == dtype
    assert bool(((drawn > 0) & (drawn < 1)).all())
    assert abs(float(drawn.double().mean()) - 0.5) < 0.005


def test_uniform_passes_statistical_tests() -> None:
    drawn = draw(make_keys(2000), 100)
    assert abs(float(drawn.mean()) - 1 / 2) < 0.003  # 5 standard errors
    assert abs(float(drawn.var()) - 1 / 12) < 0.001
    assert 20 < chi_square(torch.histc(drawn, 64, 0, 1)) < 130  # 63 degrees of freedom: mean 63, standard deviation 11
    assert 20 < chi_square(torch.histc(drawn[:, 0], 64, 0, 1)) < 130  # the first number of each key


@pytest.mark.parametrize("step", [1, 2, 16])
def test_uniform_neighbors_are_uncorrelated(step: int) -> None:
    """Neighboring clients, neighboring positions, and keys that are plain counters are uncorrelated."""
    drawn, counters = draw(make_keys(1000), 100), draw(torch.arange(1000), 100)
    assert abs(correlation(drawn[:-step], drawn[step:])) < 0.016  # 5 standard errors
    assert abs(correlation(drawn[:, :-step], drawn[:, step:])) < 0.016
    assert abs(correlation(counters[:-step], counters[step:])) < 0.016


def test_make_key_one_input_bit_changes_half_of_the_key() -> None:
    flipped = [
        (random.make_key(part, 3) ^ random.make_key(part ^ (1 << bit), 3)).bit_count()
        for part in range(100)
        for bit in range(32)
    ]
    assert abs(sum(flipped) / len(flipped) - 16) < 0.5
    assert min(flipped) > 0
