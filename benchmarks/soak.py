"""Soak test of a deployed federation: for half an hour, processes are killed, and connections are cut or slowed down.

make soak    (python benchmarks/soak.py [--minutes 30] [--rounds 150] [--seed 0], with tests/ on the Python path)

The server and three clients run on this machine, each client behind a TCP proxy of its own. At random moments, one of
their processes is killed with SIGKILL, all processes of a machine are killed at once ("power"), a client's connections
are dropped silently for a while ("cut"), or its link is limited to a few kilobytes per second ("slow"). A command that
has ended is started again after five seconds, as by systemd; nobody else intervenes. After the given time, the faults
end, and the run goes on to its last round.

Then every personal model is compared bit by bit with a simulation of the same rounds with the same participants. The
result also has the memory (proportional set size) and the disk space of the server and of the clients in the first and
in the last third of the time. It is written to results/soak.json.
"""

import argparse
import json
import platform
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from fedtailor.deploy.server.operator_folder import read_status
from fedtailor.runs.reader import load_run
from support.federation_processes import DeployCommand, Federation, federation, redirect_bundle, schedule_of
from support.flaky_proxy import FlakyProxy, flaky_proxy

NAMES = ("ann", "bob", "cleo")
FAULTS = {"kill": 6, "power": 1, "cut": 2, "slow": 2}  # with their relative frequencies
SECONDS_BETWEEN_FAULTS = 15.0  # on average
RESTART_SECONDS = 5.0  # RestartSec of the systemd units
SLOW_BYTES_PER_SECOND = 20_000.0
SAMPLE_SECONDS = 15.0
PROCESSES = (  # words of command lines, more specific ones first
    "flower-superlink", "flwr-serverapp", "flower-superexec", "flower-supernode", "executor.py", "worker_process",
    "proxy", "deploy server", "deploy client",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "soak.json"


def no_setup() -> None:
    """Do nothing when a client's process starts."""


@dataclass
class Soak:
    """A federation under faults."""

    deployed: Federation
    proxies: dict[str, FlakyProxy]
    random: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, tuple[float, float]]] = field(default_factory=list)  # memory and disk in MB by command
    stopped: list[str] = field(default_factory=list)  # what the status says if the run has stopped
    _repairs: list[tuple[float, Callable[[], object]]] = field(default_factory=list)  # what ends a fault, and when
    _ended: dict[str, float] = field(default_factory=dict)  # command -> when it was first seen to have ended

    def launch(self, name: str) -> DeployCommand:
        """Start the server or a client."""
        if name == "server":
            return self.deployed.launch_server()
        bundle = redirect_bundle(self.deployed.bundle(name), self.proxies[name].port)
        return self.deployed.start_client(name, bundle, setup=no_setup)

    def run(self, seconds: float, last_faulty_round: int) -> None:
        """Let faults happen for some time, and then let the run end."""
        start = time.monotonic()
        next_fault = next_sample = start
        while (status := read_status(self.deployed.operator)).get("state") != "finished":
            now = time.monotonic()
            faulty = now - start < seconds and int(status.get("round", 0)) < last_faulty_round
            if faulty and now >= next_fault:
                self._cause_fault()
                next_fault = now + self.random.expovariate(1 / SECONDS_BETWEEN_FAULTS)
            if now >= next_sample:
                self._sample(status)
                next_sample = now + SAMPLE_SECONDS
            self._repair(now, everything=not faulty)
            self._restart(now)
            self._note_stop(status)
            time.sleep(0.2)

    def _cause_fault(self) -> None:
        kind = self.random.choices(list(FAULTS), list(FAULTS.values()))[0]
        duration = self.random.uniform(1.0, 40.0)
        name = self.random.choice([*(["server"] if kind in ("kill", "power") else []), *NAMES])
        self.faults[kind] += 1
        if kind == "power":
            self.deployed.commands[name].kill()
        elif kind == "kill":
            self._kill_one(self.deployed.commands[name])
        elif kind == "cut":
            self.proxies[name].disconnect()
            self._repairs.append((time.monotonic() + duration, self.proxies[name].reconnect))
        else:
            self.proxies[name].limit_rate(SLOW_BYTES_PER_SECOND)
            self._repairs.append((time.monotonic() + duration, lambda: self.proxies[name].limit_rate(None)))

    def _kill_one(self, command: DeployCommand) -> None:
        if pids := command.processes():
            pid = self.random.choice(sorted(pids))
            with suppress(psutil.NoSuchProcess):
                words = " ".join(psutil.Process(pid).cmdline())
                self.killed[next((kind for kind in PROCESSES if kind in words), "other")] += 1
                psutil.Process(pid).send_signal(signal.SIGKILL)

    def _repair(self, now: float, everything: bool) -> None:
        """End the faults that are due."""
        due = [repair for moment, repair in self._repairs if everything or moment <= now]
        self._repairs = [pair for pair in self._repairs if pair[1] not in due]
        for repair in due:
            repair()

    def _restart(self, now: float) -> None:
        """Start commands again that have ended, after the remaining processes were killed, as by systemd."""
        for name, command in list(self.deployed.commands.items()):
            if command.process.poll() is None:
                continue
            if now - self._ended.setdefault(name, now) >= RESTART_SECONDS:
                command.kill()
                self.restarts[name] += 1
                del self._ended[name]
                self.launch(name)

    def _note_stop(self, status: dict[str, Any]) -> None:
        reason = str(status.get("reason", "")).replace(f"{self.deployed.folder}/", "")
        if status.get("state") == "stopped" and self.stopped[-1:] != [reason]:
            self.stopped.append(reason)
            print("stopped:", reason, flush=True)

    def _sample(self, status: dict[str, Any]) -> None:
        self.samples.append({name: self._usage(name, command) for name, command in self.deployed.commands.items()})
        print(f"round {status.get('round', 0)}, {dict(self.faults)}, restarts {dict(self.restarts)}", flush=True)

    def _usage(self, name: str, command: DeployCommand) -> tuple[float, float]:
        folder = self.deployed.operator if name == "server" else self.deployed.client_folder(name)
        return sum(map(proportional_bytes, command.processes())) / 1e6, sum(file_bytes(folder)) / 1e6


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process; what several processes share is divided among them."""
    with suppress(psutil.Error, OSError):
        return int(psutil.Process(pid).memory_full_info().pss)
    return 0


def file_bytes(folder: Path) -> Iterator[int]:
    """Yield the sizes of all files in a folder."""
    for path in folder.rglob("*"):
        with suppress(OSError):  # it may have been removed
            yield path.stat().st_size


def thirds(samples: list[dict[str, tuple[float, float]]], name: str, part: int) -> dict[str, float]:
    """Return the medians of the first and the last third of the samples of a command."""
    values, third = [sample[name][part] for sample in samples], max(len(samples) // 3, 1)
    return {
        "first_third": round(statistics.median(values[:third]), 1),
        "last_third": round(statistics.median(values[-third:]), 1),
    }


def soak(minutes: float, rounds: int, seed: int) -> dict[str, Any]:
    """Run a federation under faults, and compare its models with a simulation's."""
    settings: dict[str, Any] = {"method": "fedper", "rounds": rounds, "min_clients": 1, "deadline": 30.0, "retry": 1000}
    settings["suspend_after"] = 0  # faults are random, so a client may have several in a row
    with TemporaryDirectory() as folder, ExitStack() as stack:
        deployed = stack.enter_context(federation(Path(folder), NAMES, **settings))
        proxies = {name: stack.enter_context(flaky_proxy(deployed)) for name in NAMES}
        test = Soak(deployed, proxies, random.Random(seed))
        deployed.start_server()
        for name in NAMES:
            test.launch(name)
        deployed.start_run()
        start = time.monotonic()
        test.run(60 * minutes, rounds - 3)
        run, seconds = load_run(deployed.operator / "run"), time.monotonic() - start
        try:
            deployed.check_same_models(run)
            bit_equal = True
        except AssertionError as error:
            print(error)
            bit_equal = False
        deployed.stop()
        schedule = schedule_of(run)
    return {
        "minutes": round(seconds / 60, 1),
        "rounds": len(schedule),
        "rounds_without_all_clients": sum(len(clients) < len(NAMES) for clients in schedule),
        "faults": dict(test.faults),
        "killed": dict(test.killed),
        "restarted_commands": dict(test.restarts),
        "stopped": test.stopped,
        "bit_equal_to_simulation": bit_equal,
        "memory_MB": {name: thirds(test.samples, name, 0) for name in ("server", *NAMES)},
        "disk_MB": {name: thirds(test.samples, name, 1) for name in ("server", *NAMES)},
    }


def main() -> None:
    """Run the soak test and write its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = soak(args.minutes, args.rounds, args.seed)
    machine = f"{psutil.cpu_count()} CPU cores, {platform.machine()}, torch {version('torch')}, flwr {version('flwr')}"
    result |= {"seed": args.seed, "date": date.today().isoformat(), "machine": machine}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
