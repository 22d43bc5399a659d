"""Select the clients of every round: a pure function of the settings and the seed."""

from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np

from fedtailor.errors import ConfigError
from fedtailor.training.unreliable import Unreliable

Participation = float | tuple[float, float]
_MAX_SELECTIONS = 10**8  # selected clients over all rounds: such a schedule takes four gigabytes


def make_schedule(
    num_clients: int,
    rounds: int | None = None,
    participation: Participation = 1.0,
    seed: int = 0,
    schedule: Sequence[Sequence[int]] | None = None,
    unreliable: Unreliable | None = None,
) -> list[list[int]]:
    """Return the selected clients of every round, in ascending order, or of the given schedule in its order.

    Only available clients are selected; a round has no clients only if none is available.

    >>> make_schedule(4, rounds=2)
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    unreliable = unreliable or Unreliable()
    if schedule is not None:
        given = enumerate(_check_schedule(schedule, num_clients, rounds), start=1)
        return _check_not_empty(
            [_intersection(clients, unreliable.available(num_clients, number, seed)) for number, clients in given]
        )
    rounds = 20 if rounds is None else rounds
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}.")
    bounds = _bounds(participation)
    if (selections := rounds * max(1, round(bounds[1] * num_clients))) > _MAX_SELECTIONS:
        problem = f"{rounds} rounds would select clients {selections} times, and the maximum is {_MAX_SELECTIONS}"
        raise ConfigError(f"{problem}; reduce rounds or participation.")
    available = ((number, unreliable.available(num_clients, number, seed)) for number in range(1, rounds + 1))
    return _check_not_empty(
        [sample_clients(clients, num_clients, participation, number, seed) for number, clients in available]
    )


def sample_clients(
    available: Sequence[int], num_clients: int, participation: Participation, number: int, seed: int
) -> list[int]:
    """Draw the clients of round `number` from the available ones.

    The number of clients is the participation times `num_clients`, or all available clients if there are fewer.

    >>> sample_clients([1, 3], num_clients=4, participation=1.0, number=1, seed=0)
    [1, 3]
    """
    low, high = _bounds(participation)
    random = np.random.default_rng([seed, 4, number - 1])
    count = max(1, round(random.uniform(low, high) * num_clients))
    if not available:
        return []
    drawn = random.choice(len(available), min(count, len(available)), replace=False)
    return sorted(available[position] for position in drawn.tolist())


def _bounds(participation: Participation) -> tuple[float, float]:
    bounds = list(participation) if isinstance(participation, (tuple, list)) else [participation] * 2
    if len(bounds) != 2 or not all(isinstance(b, Real) for b in bounds) or not 0 < bounds[0] <= bounds[1] <= 1:
        raise ConfigError(
            f"participation must be a fraction above 0 and at most 1, or a range of two, got {participation}."
        )
    return bounds[0], bounds[1]


def _intersection(clients: Sequence[int], available: Sequence[int]) -> list[int]:
    members = available if isinstance(available, range) else set(available)
    return [client for client in clients if client in members]


def _check_not_empty(schedule: list[list[int]]) -> list[list[int]]:
    if not any(schedule):
        raise ConfigError("No client is available in any round; lower unreliable.away or change unreliable.trace.")
    return schedule


def _check_schedule(schedule: Sequence[Sequence[int]], num_clients: int, rounds: int | None) -> list[list[int]]:
    if rounds is not None and rounds != len(schedule):
        raise ConfigError(f"The schedule has {len(schedule)} rounds but rounds is {rounds}; omit rounds.")
    if not schedule:
        raise ConfigError("The schedule has no rounds; list the clients of at least one round.")
    for number, clients in enumerate(schedule, start=1):
        if not all(isinstance(client, Integral) for client in clients):
            raise ConfigError(f"Round {number} of the schedule must list clients by their numbers, got {clients!r}.")
        if not clients:
            raise ConfigError(f"Round {number} of the schedule has no clients; list at least one.")
        unknown = [client for client in clients if not 0 <= client < num_clients]
        if unknown:
            valid = f"clients are numbered 0 to {num_clients - 1}"
            raise ConfigError(f"Round {number} of the schedule names client {unknown[0]}; {valid}.")
        if len(set(clients)) != len(clients):
            raise ConfigError(f"Round {number} of the schedule names a client twice; list each client once.")
    return [[int(client) for client in clients] for clients in schedule]
