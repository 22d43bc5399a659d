"""Random numbers by hash: a function of the key alone, the same mapped or not, and as good as random."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedtailor import hashing

CPU = torch.device("cpu")
PART = st.integers(0, 2**32 - 1)


def keys(count: int) -> Tensor:
    """Keys of neighbouring clients, as engines make them."""
    return torch.tensor([hashing.key(0, 1, client) for client in range(count)])


def numbers(of: Tensor, count: int) -> Tensor:
    """[keys, count] uniform numbers."""
    return torch.stack([hashing.uniform(int(k), (count,), torch.float64, CPU) for k in of])


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def chi_square(counts: Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@given(st.lists(PART, min_size=1, max_size=5))
def test_whole_numbers_and_tensors_give_the_same_key(parts: list[int]) -> None:
    assert int(hashing.key(*map(torch.tensor, parts))) == hashing.key(*parts)
    mixed = hashing.key(*(torch.tensor(p) if i % 2 else p for i, p in enumerate(parts)))
    assert int(mixed) == hashing.key(*parts)


@given(st.lists(PART, min_size=1, max_size=5))
def test_a_key_is_a_32_bit_word(parts: list[int]) -> None:
    assert 0 <= hashing.key(*parts) < 2**32


def test_the_order_and_the_number_of_parts_count() -> None:
    lists = [p for size in range(1, 4) for p in itertools.product(range(6), repeat=size)]
    assert len({hashing.key(*parts) for parts in lists}) == len(lists)


@given(PART, st.integers(1, 60), st.integers(0, 20))
def test_padding_comes_last_and_changes_nothing_before_it(of: int, size: int, padding: int) -> None:
    """What makes an engine that pads agree with one that does not."""
    plain = hashing.order(of, size, None, CPU)
    padded = hashing.order(of, size + padding, torch.tensor(size), CPU)
    assert sorted(plain.tolist()) == list(range(size))
    assert padded[:size].tolist() == plain.tolist()
    assert padded[size:].tolist() == list(range(size, size + padding))


def test_a_large_order_is_a_permutation() -> None:
    assert torch.equal(hashing.order(7, 100_000, None, CPU).sort().values, torch.arange(100_000))


def test_different_keys_give_different_orders() -> None:
    assert len({tuple(hashing.order(int(k), 12, None, CPU).tolist()) for k in keys(500)}) == 500


def test_every_order_of_three_is_equally_likely() -> None:
    orders = torch.func.vmap(lambda k: hashing.order(k, 3, None, CPU))(keys(6000))
    kinds = torch.unique(orders, dim=0, return_counts=True)
    assert len(kinds[0]) == 6
    assert chi_square(kinds[1].double()) < 30  # 5 degrees of freedom: beyond by chance once in 100,000


def test_mapped_clients_get_the_same_bits() -> None:
    of = keys(20)
    sizes = torch.arange(1, 21)
    orders = torch.func.vmap(lambda k, n: hashing.order(k, 20, n, CPU))(of, sizes)
    drawn = torch.func.vmap(lambda k: hashing.uniform(k, (3, 2), torch.float32, CPU))(of)
    made: Any = torch.func.vmap(lambda index: hashing.key(5, index, 2))(torch.arange(20))
    for client, (k, n) in enumerate(zip(of.tolist(), sizes, strict=True)):
        assert torch.equal(orders[client], hashing.order(k, 20, n, CPU))
        assert torch.equal(drawn[client], hashing.uniform(k, (3, 2), torch.float32, CPU))
        assert int(made[client]) == hashing.key(5, client, 2)


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    long = hashing.uniform(3, (50,), torch.float32, CPU)
    assert torch.equal(hashing.uniform(3, (4, 5), torch.float32, CPU).flatten(), long[:20])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_stay_inside_0_and_1_in_every_dtype(dtype: torch.dtype) -> None:
    drawn = hashing.uniform(1, (200_000,), dtype, CPU)
    assert drawn.dtype == dtype
    assert bool(((drawn > 0) & (drawn < 1)).all())
    assert abs(float(drawn.double().mean()) - 0.5) < 0.005


def test_precision_does_not_change_the_numbers() -> None:
    single, double = (hashing.uniform(9, (1000,), dtype, CPU) for dtype in (torch.float32, torch.float64))
    assert torch.equal(single.double(), double)


def test_the_numbers_are_uniform() -> None:
    drawn = numbers(keys(2000), 100)
    assert abs(float(drawn.mean()) - 1 / 2) < 0.003  # 5 standard errors
    assert abs(float(drawn.var()) - 1 / 12) < 0.001
    assert 20 < chi_square(torch.histc(drawn, 64, 0, 1)) < 130  # 63 degrees of freedom: mean 63, deviation 11
    assert 20 < chi_square(torch.histc(drawn[:, 0], 64, 0, 1)) < 130  # the first number of every key


@pytest.mark.parametrize("step", [1, 2, 16])
def test_neighbours_are_uncorrelated(step: int) -> None:
    """Clients next to each other, positions next to each other, and keys that are bare counters."""
    drawn, bare = numbers(keys(1000), 100), numbers(torch.arange(1000), 100)
    assert abs(correlation(drawn[:-step], drawn[step:])) < 0.016  # 5 standard errors
    assert abs(correlation(drawn[:, :-step], drawn[:, step:])) < 0.016
    assert abs(correlation(bare[:-step], bare[step:])) < 0.016


def test_one_bit_of_a_part_changes_half_of_the_key() -> None:
    flipped = [
        (hashing.key(part, 3) ^ hashing.key(part ^ (1 << bit), 3)).bit_count()
        for part in range(100)
        for bit in range(32)
    ]
    assert abs(sum(flipped) / len(flipped) - 16) < 0.5
    assert min(flipped) > 0
