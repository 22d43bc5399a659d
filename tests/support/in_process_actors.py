"""Actors of the engine `ray` in this process, without Ray: what passes between them is pickled as Ray does."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from fedtailor.training.clients import LostClientsError
from fedtailor.training.ray_clients import start, worker
from fedtailor.training.ray_clients.cluster import ActorGroup, Node, plan_actors
from fedtailor.training.ray_clients.worker import Outcome, ShardWorker


class InProcessActors(ActorGroup):
    """Calls run at once, in the order in which they are submitted."""

    def start(self) -> None:
        plan_actors([Node(2, torch.cuda.device_count())], self.count, self.device)
        self._handles = [ShardWorker(1, on_gpu=torch.cuda.is_available()) for _ in range(self.count)]

    def stop(self) -> None:
        self._handles = []

    def put(self, value: Any) -> Any:
        return value

    def submit(self, actor: int, name: str, *args: Any) -> Any:
        return _copy(self._handles[actor].run(name, *map(_copy, args)))

    def result(self, outcome: Outcome) -> Any:
        return outcome.get()


def _copy(value: Any) -> Any:
    if find_spec("ray") is None:
        return deepcopy(value)
    return pickle.loads(import_module("ray.cloudpickle").dumps(value))  # noqa: S301 - written in this process


def use_in_process_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs with engine="ray" train in this process."""
    monkeypatch.setattr(start, "ActorGroup", InProcessActors)
    monkeypatch.setattr(start, "connect", lambda address: None)
    monkeypatch.setattr(start, "nodes", lambda: [Node(2, 0)])
    monkeypatch.setattr(worker, "limit_cores", lambda count: None)


def lose_actor(monkeypatch: pytest.MonkeyPatch, at: int | None, again: bool = False) -> Callable[[], int]:
    """Lose an actor when its result number `at` is awaited (once, or every time from then on); returns a function that
    returns the number of results so far."""
    calls = 0

    def result(self: InProcessActors, outcome: Outcome) -> Any:
        nonlocal calls
        calls += 1
        if at is not None and (calls == at + 1 or (again and calls > at)):
            raise LostClientsError("An actor was lost: it was killed.")
        return outcome.get()

    monkeypatch.setattr(InProcessActors, "result", result)
    return lambda: calls
