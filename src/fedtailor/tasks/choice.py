"""Choose how tasks are run, from the arguments of commands and functions."""

import re
from collections.abc import Sequence

from fedtailor.errors import ConfigError
from fedtailor.tasks.processes import Processes
from fedtailor.tasks.task import InThisProcess, Runner

RUNNER_SETTINGS = ("parallel", "ray", "cpus_per_run", "gpus_per_run")  # arguments of `choose_runner`, and flags
LOCAL = "local"  # a Ray cluster of this machine, which ends with the command
_ADDRESS = re.compile(r"(ray://)?[\w.\[\]-]+:\d+|auto|local")


def choose_runner(
    parallel: int | None = None,
    ray: str | bool | None = None,
    cpus_per_run: float | None = None,
    gpus_per_run: float | None = None,
) -> Runner:
    """Return a runner: `parallel` processes on this machine, a Ray cluster (its address, or True for a local one), or
    this process.

    >>> choose_runner(parallel=4, gpus_per_run=0.5)
    Processes(count=4, cpus_per_run=None, gpus_per_run=0.5)
    """
    _check(parallel, ray, cpus_per_run, gpus_per_run)
    if ray:
        from fedtailor.tasks.ray_cluster import RayCluster

        return RayCluster(LOCAL if ray is True else str(ray), cpus_per_run or 1, gpus_per_run)
    if (parallel or 1) == 1 and cpus_per_run is None and gpus_per_run is None:
        return InThisProcess()
    return Processes(parallel or 1, cpus_per_run, gpus_per_run)


def _check(parallel: object, ray: object, cpus_per_run: object, gpus_per_run: object) -> None:
    if parallel is not None and (isinstance(parallel, bool) or not isinstance(parallel, int) or parallel < 1):
        raise ConfigError(f"parallel must be a number of processes such as 4, got {parallel!r}.")
    if ray and parallel is not None:
        raise ConfigError("Use either parallel (processes of this machine) or ray (a cluster), not both.")
    if not isinstance(ray, str | bool | None):
        raise ConfigError(f"ray must be the address of a cluster, such as 10.0.0.1:6379, or True, got {ray!r}.")
    for name, value in (("cpus_per_run", cpus_per_run), ("gpus_per_run", gpus_per_run)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{name} must be a number such as 1 or 0.5, got {value!r}.")
        if name == "cpus_per_run" and value == 0:
            raise ConfigError("cpus_per_run must be above 0, because every run needs a core or a part of one.")
        if not ray and parallel is None:
            raise ConfigError(f"{name} is for runs at the same time; set parallel or ray too.")
    if isinstance(gpus_per_run, int | float) and gpus_per_run > 1:
        raise ConfigError(f"A run uses one GPU, so gpus_per_run must be at most 1, got {gpus_per_run:g}.")


def fill_ray_address(words: Sequence[str]) -> list[str]:
    """Return command-line arguments in which --ray has a value: "local" if no address follows it.

    >>> fill_ray_address(["fedavg", "--ray", "fedper"]), fill_ray_address(["--ray", "10.0.0.1:6379"])
    (['fedavg', '--ray', 'local', 'fedper'], ['--ray', '10.0.0.1:6379'])
    """
    filled = list[str]()
    for word, following in zip(words, [*words, ""][1:], strict=True):
        filled += [word, LOCAL] if word == "--ray" and not _ADDRESS.fullmatch(following) else [word]
    return filled
