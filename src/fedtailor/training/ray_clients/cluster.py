"""A Ray cluster: connect to it, decide what each actor may use, and start and call actors."""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Any

from fedtailor.errors import ConfigError, RunError, reason
from fedtailor.training.clients import LostClientsError
from fedtailor.training.ray_clients.worker import Outcome, ShardWorker

log = logging.getLogger("fedtailor")
_START_SECONDS = 5.0  # after which the resources are planned again, if actors have not started
_CONNECT_SECONDS = 10.0
_PATIENCE = 6  # times that this may pass until a message says that actors wait


@dataclass(frozen=True)
class Node:
    """The resources of one machine of a cluster."""

    cpus: float
    gpus: float


@dataclass(frozen=True)
class ActorResources:
    """What one actor reserves, and how many cores it uses."""

    cpus: float  # below 1: it shares a core with others
    gpus: float
    cores: int


def default_actors(nodes: Sequence[Node], device: str) -> int:
    """Return the number of actors if none is given: one per GPU, or one per machine without GPUs.

    >>> default_actors([Node(8, 2), Node(8, 0)], "auto"), default_actors([Node(8, 2), Node(8, 0)], "cpu")
    (2, 2)
    """
    gpus = sum(floor(node.gpus) for node in nodes) if device != "cpu" else 0
    return max(1, gpus or sum(node.cpus >= 1 for node in nodes))


def plan_actors(nodes: Sequence[Node], actors: int, device: str) -> ActorResources:
    """Return what each of so many actors may use on these machines; several share a GPU or a core if necessary.

    >>> plan_actors([Node(8, 0), Node(4, 0)], 3, "auto")
    ActorResources(cpus=4, gpus=0.0, cores=4)
    >>> plan_actors([Node(8, 2)], 4, "auto").gpus, plan_actors([Node(1, 0), Node(0, 0)], 2, "auto").cpus
    (0.5, 0.5)
    """
    gpus = sum(floor(node.gpus) for node in nodes) if device != "cpu" else 0
    if not gpus and device not in ("auto", "cpu"):
        raise ConfigError(f"The Ray cluster has no GPU for the device '{device}'; set device to 'auto' or 'cpu'.")
    if not any(node.cpus >= 1 for node in nodes):
        raise RunError("The Ray cluster has no machine left on which an actor can start; start one and resume the run.")
    if gpus:
        shared = ceil(actors / gpus)
        cores = max(floor(node.cpus / (floor(node.gpus) * shared)) for node in nodes if node.gpus >= 1)
        return ActorResources(0, 1 / shared, max(1, cores))
    largest = floor(sum(node.cpus for node in nodes) / actors)
    fitting = [k for k in range(1, largest + 1) if sum(floor(node.cpus / k) for node in nodes) >= actors]
    if fitting:
        return ActorResources(fitting[-1], 0.0, fitting[-1])
    return ActorResources(1 / ceil(actors / sum(floor(node.cpus) for node in nodes)), 0.0, 1)


def require_ray() -> Any:
    """Import ray, or raise `ConfigError`."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("The engine 'ray' needs Ray; install it with: pip install 'fedtailor[ray]'.") from error
    return ray


def connect(address: str | None, **local_options: Any) -> None:
    """Connect this process to a cluster, or start one on this machine with these options of `ray.init`; nothing happens
    if it is connected."""
    ray = require_ray()
    if ray.is_initialized():
        if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            problem = "The engine 'ray' cannot start actors inside of a Ray task, which holds their resources"
            raise ConfigError(f"{problem}; use it without --ray, or use another engine.")
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports to Ray's developers
    os.environ.setdefault("RAY_worker_niceness", "0")  # as other engines; Ray's default yields to all programs
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"include_dashboard": False, **local_options} if address == "local" else {}
    try:
        _check_reachable(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RaySystemError) as error:
        fix = "check the address, or omit it to use this machine"
        raise ConfigError(f"There is no Ray cluster at '{address}' ({reason(error)}); {fix}.") from error


def _check_reachable(address: str) -> None:
    """Raise `OSError` if nobody listens at the address of a cluster; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def nodes() -> list[Node]:
    """Return the machines of the cluster that are alive."""
    found = [node["Resources"] for node in require_ray().nodes() if node["Alive"]]
    return [Node(resources.get("CPU", 0.0), resources.get("GPU", 0.0)) for resources in found]


@dataclass(eq=False)
class ActorGroup:
    """The actors of a run. All of them are started together, and replaced together if one is lost."""

    count: int
    device: str
    resources: ActorResources = field(default_factory=lambda: ActorResources(0, 0.0, 1))
    _handles: list[Any] = field(default_factory=list)

    def start(self) -> None:
        """Start all actors, instead of those that are left. They wait until the cluster has enough resources."""
        ray, waits = require_ray(), 0
        while True:
            self.stop()
            self.resources = plan_actors(nodes(), self.count, self.device)
            self._handles = [self._create() for _ in range(self.count)]
            pings = [handle.run.remote("ping") for handle in self._handles]
            while True:
                ready, open_pings = ray.wait(pings, num_returns=self.count, timeout=_START_SECONDS)
                if not open_pings and self._all_alive(ready):
                    return
                if not open_pings or plan_actors(nodes(), self.count, self.device) != self.resources:
                    break  # an actor died at once, or a machine came or went
                waits += 1
                if waits == _PATIENCE:
                    log.warning("Waiting until the Ray cluster has resources for %d actors.", self.count)

    def _create(self) -> Any:
        resources, remote = self.resources, require_ray().remote(ShardWorker)
        options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "scheduling_strategy": "SPREAD"}
        return remote.options(**options).remote(resources.cores, resources.gpus > 0)

    def _all_alive(self, pings: Sequence[Any]) -> bool:
        try:
            require_ray().get(list(pings))
        except require_ray().exceptions.RayError:
            return False
        return True

    def stop(self) -> None:
        """Stop all actors; their resources are free for others."""
        ray = require_ray()
        for handle in self._handles if ray.is_initialized() else ():
            ray.kill(handle)
        self._handles = []

    def put(self, value: Any) -> Any:
        """Store a value that several actors read; returns a reference, which may be an argument of a call."""
        return require_ray().put(value)

    def submit(self, actor: int, name: str, *args: Any) -> Any:
        """Start a call of a method of `ShardWorker`; returns a reference to its outcome."""
        return self._handles[actor].run.remote(name, *args)

    def result(self, outcome: Any) -> Any:
        """Wait for a call and return its result, or raise its error."""
        ray = require_ray()
        try:
            found: Outcome = ray.get(outcome)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RayError):
                raise LostClientsError(f"An actor was lost: {reason(error.cause)}.") from error
            raise RunError(f"An actor failed ({reason(error.cause)}).") from error
        except ray.exceptions.RayError as error:
            raise LostClientsError(f"An actor was lost: {reason(error)}.") from error
        return found.get()

    def call(self, requests: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method on several actors at the same time: actor -> (name, arguments); returns actor -> result."""
        running = {actor: self.submit(actor, *request) for actor, request in requests.items()}
        return {actor: self.result(outcome) for actor, outcome in running.items()}

    def call_all(self, name: str, *args: Any) -> dict[int, Any]:
        """Call a method with the same arguments on all actors."""
        return self.call(dict.fromkeys(range(self.count), (name, *args)))
