"""Clients that are away, late or break off, simulated: a pure function of the seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import Refused
from fedtailor.untrusted import parse_json, read_text

_AWAY, _HOUR, _SPEED, _JITTER, _DROPOUT = range(5, 10)  # salts: what numbers are drawn for; 3 and 4 are taken
_WIDEST, _LONGEST = 10.0, 1e9  # of σ and of a deadline: nobody means more, and numbers stay finite
_LARGEST = 2**22  # bytes of a trace: 1,000 rounds with a thousand clients; a shorter one is repeated
_CLIENTS = 2**31  # more than anyone simulates


@dataclass(frozen=True)
class Unreliable:
    """How unreliable the clients of a simulation are; by default not at all.

    Who is away is not asked. Who is late or drops out was sent the message and delivers nothing: to it the round did
    not happen. A client takes (its samples / the mean over clients) / speed, whatever the method makes of them.

    >>> Unreliable(trace=[[0, 1], [2]]).available(3, round=4, seed=0)
    [2]
    """

    away: float = 0.0  # share of the rounds that a client is away
    day: int = 0  # rounds a day, in which a client is away for one stretch at an hour of its own; 0: away at random
    trace: str | Path | list[list[int]] | None = None  # instead: a JSON file that lists who is there, round by round
    speeds: float = 0.0  # σ, by which clients differ in speed: log-normal around 1, the same all run long
    jitter: float = 0.0  # σ, by which a client's speed differs from round to round
    deadline: float | None = None  # who takes longer is late; 1: what the mean client takes at speed 1
    dropout: float = 0.0  # share of those asked that break off in mid-round

    def __post_init__(self) -> None:
        for name in ("away", "dropout"):
            share = getattr(self, name)
            self._require(_is_number(share) and 0 <= share < 1, name, "a share from 0 to below 1")
        for name in ("speeds", "jitter"):
            spread = getattr(self, name)
            self._require(_is_number(spread) and 0 <= spread <= _WIDEST, name, f"from 0 to {_WIDEST:g}")
        self._require(_is_whole(self.day) and (self.day == 0 or self.day >= 2), "day", "0 or at least 2 rounds")
        some = self.deadline is None or (_is_number(self.deadline) and 0 < self.deadline <= _LONGEST)
        self._require(some, "deadline", "a number above 0, or none")
        if self.deadline is None and (self.speeds or self.jitter):
            raise Refused("unreliable.speeds and jitter make nobody late without a deadline; set one, such as 2.")
        if self.trace is not None and (self.away or self.day):
            raise Refused("unreliable.trace says who is away and when; leave out away and day, or the trace.")
        # the trace itself, so that a run's record holds it and needs the file no more
        trace = read_trace(self.trace) if isinstance(self.trace, (str, Path)) else self.trace
        object.__setattr__(self, "trace", None if trace is None else check_trace(trace))

    def _require(self, holds: bool, name: str, what: str) -> None:
        if not holds:
            raise Refused(f"unreliable.{name} must be {what}, not {getattr(self, name)!r}.")

    def available(self, num_clients: int, round: int, seed: int) -> Sequence[int]:
        """Who can be asked in a round, in ascending order."""
        if isinstance(self.trace, list):
            there = self.trace[(round - 1) % len(self.trace)]
            if there and there[-1] >= num_clients:
                known = f"there are 0 to {num_clients - 1}"
                raise Refused(f"unreliable.trace names client {there[-1]} in round {round}; {known}.")
            return there
        if not self.away:
            return range(num_clients)
        if self.day:
            hours = np.random.default_rng([seed, _HOUR]).random(num_clients)
            position = (hours + round % self.day / self.day) % 1
        else:
            position = np.random.default_rng([seed, _AWAY, round]).random(num_clients)
        found: list[int] = np.flatnonzero(position >= self.away).tolist()
        return found

    def missed(self, clients: Sequence[int], sizes: NDArray[np.int64], round: int, seed: int) -> dict[int, str]:
        """Who of those asked delivers nothing, and why: "late" or "dropped out"; `sizes` are all clients' samples.

        >>> Unreliable(deadline=1.0).missed([0, 1], np.array([10, 30, 20]), round=1, seed=0)
        {1: 'late'}
        """
        if self.deadline is None and not self.dropout:
            return {}
        broken = np.random.default_rng([seed, _DROPOUT, round]).random(len(sizes)) < self.dropout
        late = self.times(sizes, round, seed) > (np.inf if self.deadline is None else self.deadline)
        # who breaks off never comes to be late
        return {c: "dropped out" if broken[c] else "late" for c in clients if broken[c] or late[c]}

    def times(self, sizes: NDArray[np.int64], round: int, seed: int) -> NDArray[np.float64]:
        """How long every client takes in a round, in units of what the mean client takes at speed 1.

        >>> Unreliable().times(np.array([10, 30]), round=1, seed=0)
        array([0.5, 1.5])
        """
        own = np.random.default_rng([seed, _SPEED]).standard_normal(len(sizes))
        now = np.random.default_rng([seed, _JITTER, round]).standard_normal(len(sizes))
        found: NDArray[np.float64] = sizes / sizes.mean() / np.exp(self.speeds * own + self.jitter * now)
        return found


def read_trace(path: str | Path) -> list[list[int]]:
    """The trace in a JSON file, from whoever's hands: a list of clients' numbers for every round.

    >>> read_trace("nowhere.json")
    Traceback (most recent call last):
    fedtailor.errors.Refused: The trace 'nowhere.json' cannot be read: No such file or directory.
    """
    text = read_text(Path(path), "The trace", _LARGEST)
    try:
        found = parse_json(text)
    except ValueError as error:
        raise Refused(f"The trace '{path}' is no JSON list such as [[0, 1], [2]].") from error
    return check_trace(found)


def check_trace(trace: Any) -> list[list[int]]:
    """A trace whose rounds list clients by number, each once and in ascending order.

    >>> check_trace([[2, 0], []])
    [[0, 2], []]
    """
    if not isinstance(trace, (list, tuple)) or not trace:
        raise Refused("unreliable.trace lists who is there for every round, such as [[0, 1], [2]].")
    for number, there in enumerate(trace, start=1):
        if not isinstance(there, (list, tuple)) or not all(_is_whole(c) and 0 <= c < _CLIENTS for c in there):
            raise Refused(f"Round {number} of unreliable.trace must list clients by number, such as [0, 1].")
        if len(set(there)) != len(there):
            raise Refused(f"Round {number} of unreliable.trace names a client twice.")
    return [sorted(int(client) for client in there) for there in trace]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
