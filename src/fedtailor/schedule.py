"""Which clients take part in which round: a pure function of its settings and the seed."""

from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np

from fedtailor.errors import Refused
from fedtailor.unreliable import Unreliable

Participation = float | tuple[float, float]
_LONGEST = 10**8  # clients that are asked, over all rounds: a plan of so many takes four gigabytes


def make_schedule(
    num_clients: int,
    rounds: int | None = None,
    participation: Participation = 1.0,
    seed: int = 0,
    schedule: Sequence[Sequence[int]] | None = None,
    unreliable: Unreliable | None = None,
) -> list[list[int]]:
    """The clients that are asked in every round, in ascending order; an explicit schedule is checked and kept. Who is
    away is not asked; only where all are, a round has nobody.

    >>> make_schedule(4, rounds=2)
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    unreliable = unreliable or Unreliable()
    if schedule is not None:
        listed = enumerate(_checked(schedule, num_clients, rounds), start=1)
        return _some([_among(clients, unreliable.available(num_clients, number, seed)) for number, clients in listed])
    rounds = 20 if rounds is None else rounds
    if rounds < 1:
        raise Refused(f"rounds must be at least 1, not {rounds}.")
    bounds = _bounds(participation)
    if (most := rounds * max(1, round(bounds[1] * num_clients))) > _LONGEST:
        asked = f"{rounds} rounds would ask clients {most} times, and {_LONGEST} is the most"
        raise Refused(f"{asked}; ask for fewer rounds or a smaller participation.")
    there = ((number, unreliable.available(num_clients, number, seed)) for number in range(1, rounds + 1))
    return _some([draw(some, num_clients, participation, number, seed) for number, some in there])


def draw(there: Sequence[int], num_clients: int, participation: Participation, number: int, seed: int) -> list[int]:
    """Who of those that are there is asked in a round: as many as are wanted of all, or everyone there.

    >>> draw([1, 3], num_clients=4, participation=1.0, number=1, seed=0)
    [1, 3]
    """
    low, high = _bounds(participation)
    random = np.random.default_rng([seed, 4, number - 1])
    wanted = max(1, round(random.uniform(low, high) * num_clients))
    if not there:
        return []
    drawn = random.choice(len(there), min(wanted, len(there)), replace=False)
    return sorted(there[position] for position in drawn.tolist())


def _bounds(participation: Participation) -> tuple[float, float]:
    bounds = list(participation) if isinstance(participation, (tuple, list)) else [participation] * 2
    if len(bounds) != 2 or not all(isinstance(b, Real) for b in bounds) or not 0 < bounds[0] <= bounds[1] <= 1:
        raise Refused(f"participation must be a share above 0 and at most 1, or a range of two, not {participation}.")
    return bounds[0], bounds[1]


def _among(clients: Sequence[int], there: Sequence[int]) -> list[int]:
    known = there if isinstance(there, range) else set(there)
    return [client for client in clients if client in known]


def _some(plan: list[list[int]]) -> list[list[int]]:
    """Refuse a plan in which nobody ever takes part."""
    if not any(plan):
        raise Refused("In no round is anyone there to be asked; lower unreliable.away, or change the trace.")
    return plan


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
