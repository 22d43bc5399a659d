"""Which clients take part in which round: a pure function of its settings and the seed."""

from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np

from fedtailor.errors import Refused
from fedtailor.unreliable import Unreliable

Participation = float | tuple[float, float]


def make_schedule(
    num_clients: int,
    rounds: int | None = None,
    participation: Participation = 1.0,
    seed: int = 0,
    schedule: Sequence[Sequence[int]] | None = None,
    unreliable: Unreliable | None = None,
) -> list[list[int]]:
    """The clients of every round, in ascending order, at least one; an explicit schedule is checked and kept.

    >>> make_schedule(4, rounds=2)
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    if schedule is not None:
        return _checked(schedule, num_clients, rounds)
    rounds = 20 if rounds is None else rounds
    if rounds < 1:
        raise Refused(f"rounds must be at least 1, not {rounds}.")
    bounds = list(participation) if isinstance(participation, (tuple, list)) else [participation] * 2
    if len(bounds) != 2 or not all(isinstance(b, Real) for b in bounds) or not 0 < bounds[0] <= bounds[1] <= 1:
        raise Refused(f"participation must be a share above 0 and at most 1, or a range of two, not {participation}.")
    return [
        _draw(num_clients, bounds[0], bounds[1], np.random.default_rng([seed, 4, number])) for number in range(rounds)
    ]


def _draw(num_clients: int, low: float, high: float, random: np.random.Generator) -> list[int]:
    count = max(1, round(random.uniform(low, high) * num_clients))
    return sorted(random.choice(num_clients, count, replace=False).tolist())


def _checked(schedule: Sequence[Sequence[int]], num_clients: int, rounds: int | None) -> list[list[int]]:
    if rounds is not None and rounds != len(schedule):
        raise Refused(f"The schedule has {len(schedule)} rounds but rounds is {rounds}; leave rounds out.")
    if not schedule:
        raise Refused("The schedule has no rounds.")
    for number, clients in enumerate(schedule, start=1):
        if not all(isinstance(client, Integral) for client in clients):
            raise Refused(f"Round {number} of the schedule must list clients by their numbers, not {clients!r}.")
        if not clients:
            raise Refused(f"Round {number} of the schedule has no clients.")
        strangers = [client for client in clients if not 0 <= client < num_clients]
        if strangers:
            known = f"there are 0 to {num_clients - 1}"
            raise Refused(f"Round {number} of the schedule names client {strangers[0]}; {known}.")
        if len(set(clients)) != len(clients):
            raise Refused(f"Round {number} of the schedule names a client twice.")
    return [[int(client) for client in clients] for clients in schedule]
