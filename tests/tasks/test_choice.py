"""How tasks are run: the arguments of functions and commands."""

import sys
from importlib import import_module
from typing import Any

import pytest

from conftest import error_message
from fedtailor.progress import ProgressDisplay
from fedtailor.tasks.choice import choose_runner
from fedtailor.tasks.processes import Processes
from fedtailor.tasks.task import InThisProcess
from fedtailor.training.ray_clients.cluster import Node


def test_one_process_without_resources_is_this_one() -> None:
    """With resources, it is another process, whose number of threads can be that of several."""
    assert choose_runner() == choose_runner(parallel=1) == InThisProcess()
    assert choose_runner(parallel=1, cpus_per_run=1) == Processes(1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parallel": 0}, "parallel must be a number of processes"),
        ({"parallel": 2, "ray": True}, "either parallel"),
        ({"gpus_per_run": 1}, "set parallel or ray too"),
        ({"parallel": 2, "gpus_per_run": 2}, "at most 1"),
        ({"parallel": 2, "cpus_per_run": "many"}, "cpus_per_run must be a number"),
        ({"parallel": 2, "cpus_per_run": 0}, "above 0"),
        ({"ray": 6379}, "ray must be the address"),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    assert message in error_message(lambda: choose_runner(**arguments))


def test_ray_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fedtailor.tasks.ray_cluster", raising=False)
    assert "pip install 'fedtailor[ray]'" in error_message(lambda: choose_runner(ray=True))


def test_cluster_that_is_too_small_or_away_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    ray_cluster = import_module("fedtailor.tasks.ray_cluster")
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    runner = ray_cluster.RayCluster("127.0.0.1:1", cpus_per_run=1, gpus_per_run=None)
    assert "no Ray cluster at '127.0.0.1:1'" in error_message(lambda: list(runner.run([], ProgressDisplay(0))))
    monkeypatch.setattr(ray_cluster, "nodes", lambda: [Node(2, 0), Node(8, 0), Node(2, 1)])
    ray_cluster._check_resources(ray_cluster.RayCluster("local", 8, None), gpus=0)
    too_large = ray_cluster.RayCluster("local", 4, None)  # no single machine has four cores and a GPU
    assert "cores: 4, GPUs: 1" in error_message(lambda: ray_cluster._check_resources(too_large, gpus=1))
