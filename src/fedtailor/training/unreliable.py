"""Simulate clients that are unavailable, late, or drop out: a pure function of the settings and the seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.fields import Constraint, FractionBelow1, check_fields
from fedtailor.core.untrusted_input import parse_json, read_text
from fedtailor.errors import ConfigError

# Salts of the random numbers by purpose; 3 and 4 are used elsewhere.
_AWAY, _HOUR, _SPEED, _JITTER, _DROPOUT = range(5, 10)
_MAX_TRACE_BYTES = 2**22  # enough for 1,000 rounds of 1,000 clients; a shorter trace is repeated
_MAX_CLIENTS = 2**31
# The upper limits keep times finite.
_Sigma = Annotated[float, Constraint("from 0 to 10", lambda value: 0 <= value <= 10)]
_Deadline = Annotated[float, Constraint("above 0 and at most 1e9", lambda value: 0 < value <= 1e9)]
_Day = Annotated[int, Constraint("0 or at least 2 rounds", lambda value: value == 0 or value >= 2)]


@dataclass(frozen=True)
class Unreliable:
    """How unreliable the clients of a simulation are. By default they are always available and never late.

    A client that is away is not selected. A client that is late or drops out receives the message but uploads nothing,
    and its state is unchanged. A client's time for a round is (its samples / the mean over clients) / its speed, for
    every method.

    >>> Unreliable(trace=[[0, 1], [2]]).available(3, round=4, seed=0)
    [2]
    """

    away: Annotated[FractionBelow1, "fraction of rounds in which a client is unavailable"] = 0.0
    day: Annotated[_Day, "rounds per day; each client is away once a day, at a fixed hour; 0: away at random"] = 0
    trace: Annotated[
        str | Path | list[list[int]] | None, "JSON file that lists the available clients of every round"
    ] = None
    speeds: Annotated[_Sigma, "σ of the clients' log-normal speeds, which stay fixed for the whole run"] = 0.0
    jitter: Annotated[_Sigma, "σ of a client's log-normal change in speed from round to round"] = 0.0
    deadline: Annotated[
        _Deadline | None, "clients that take longer are late; 1: the time of the mean client at speed 1"
    ] = None
    dropout: Annotated[FractionBelow1, "fraction of selected clients that drop out during the round"] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "unreliable.")
        if self.deadline is None and (self.speeds or self.jitter):
            raise ConfigError("unreliable.speeds and unreliable.jitter need a deadline; set it to, for example, 2.")
        if self.trace is not None and (self.away or self.day):
            raise ConfigError("unreliable.trace already lists the available clients; omit away and day, or the trace.")
        # Store the content of the file, so that the run folder is complete without it.
        trace = read_trace(self.trace) if isinstance(self.trace, (str, Path)) else self.trace
        object.__setattr__(self, "trace", None if trace is None else check_trace(trace))

    def available(self, num_clients: int, round: int, seed: int) -> Sequence[int]:
        """Return the clients that can be selected in a round, in ascending order."""
        if isinstance(self.trace, list):
            clients = self.trace[(round - 1) % len(self.trace)]
            if clients and clients[-1] >= num_clients:
                valid = f"clients are numbered 0 to {num_clients - 1}"
                raise ConfigError(f"unreliable.trace names client {clients[-1]} in round {round}; {valid}.")
            return clients
        if not self.away:
            return range(num_clients)
        if self.day:
            hours = np.random.default_rng([seed, _HOUR]).random(num_clients)
            position = (hours + round % self.day / self.day) % 1
        else:
            position = np.random.default_rng([seed, _AWAY, round]).random(num_clients)
        available: list[int] = np.flatnonzero(position >= self.away).tolist()
        return available

    def missed(self, clients: Sequence[int], sizes: NDArray[np.int64], round: int, seed: int) -> dict[int, str]:
        """Return the selected clients that upload nothing, and why: "late" or "dropped out".

        `sizes` contains the number of training samples of all clients.

        >>> Unreliable(deadline=1.0).missed([0, 1], np.array([10, 30, 20]), round=1, seed=0)
        {1: 'late'}
        """
        if self.deadline is None and not self.dropout:
            return {}
        dropped = np.random.default_rng([seed, _DROPOUT, round]).random(len(sizes)) < self.dropout
        late = self.times(sizes, round, seed) > (np.inf if self.deadline is None else self.deadline)
        return {c: "dropped out" if dropped[c] else "late" for c in clients if dropped[c] or late[c]}

    def times(self, sizes: NDArray[np.int64], round: int, seed: int) -> NDArray[np.float64]:
        """Return every client's time for a round, in units of the mean client's time at speed 1.

        >>> Unreliable().times(np.array([10, 30]), round=1, seed=0)
        array([0.5, 1.5])
        """
        speed = np.random.default_rng([seed, _SPEED]).standard_normal(len(sizes))
        jitter = np.random.default_rng([seed, _JITTER, round]).standard_normal(len(sizes))
        times: NDArray[np.float64] = sizes / sizes.mean() / np.exp(self.speeds * speed + self.jitter * jitter)
        return times


def read_trace(path: str | Path) -> list[list[int]]:
    """Read a trace from an untrusted JSON file: a list of client numbers for every round.

    >>> read_trace("nowhere.json")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: The trace 'nowhere.json' cannot be read: No such file or directory.
    """
    text = read_text(Path(path), "The trace", _MAX_TRACE_BYTES)
    try:
        trace = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"The trace '{path}' is not a JSON list such as [[0, 1], [2]].") from error
    return check_trace(trace)


def check_trace(trace: Any) -> list[list[int]]:
    """Return a trace with the clients of every round in ascending order; raise `ConfigError` if it is invalid.

    >>> check_trace([[2, 0], []])
    [[0, 2], []]
    """
    if not isinstance(trace, (list, tuple)) or not trace:
        raise ConfigError("unreliable.trace must list the available clients of every round, such as [[0, 1], [2]].")
    for number, clients in enumerate(trace, start=1):
        if not isinstance(clients, (list, tuple)) or not all(_is_integer(c) and 0 <= c < _MAX_CLIENTS for c in clients):
            raise ConfigError(f"Round {number} of unreliable.trace must list clients by number, such as [0, 1].")
        if len(set(clients)) != len(clients):
            raise ConfigError(f"Round {number} of unreliable.trace names a client twice; list each client once.")
    return [sorted(int(client) for client in clients) for clients in trace]


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
