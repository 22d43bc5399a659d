"""Benchmark a deployed federation against plain Flower: three clients on this machine, with TLS and keys.

python benchmarks/federation.py [--rounds 6] [--megabytes 0.03,10,50] [--repeats 3]

bare    a plain Flower app: `Grid.send_and_receive`, a state_dict in both directions, no training
quick   the same app, but it polls as often as FedTailor, so that polling does not explain the remaining difference
ours    `fedtailor deploy` with its reverse proxy: FedAvg on an MLP of that size, with a few samples per client

The variants alternate, so that other load on the machine affects all of them, and each turn starts new processes.
`seconds` is the time from the first message of a round to its last reply (ours: including checks and the new model);
`period` is the time between the ends of two rounds. The first round, which also distributes the app, does not count.
CPU seconds cover all processes of a federation; `others` is the fraction of the machine that other processes used. The
results are written to results/federation.json.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedtailor.deploy.keys import make_keys, open_bundle
from fedtailor.deploy.selftest import run_command
from fedtailor.deploy.server import flower_app, superlink
from fedtailor.deploy.server.operator_folder import enrolled_clients, read_status
from fedtailor.deploy.subprocesses import Subprocess, command_line, find_processes, flower_command, flower_environment
from fedtailor.experiments.deployment import make_deployment
from fedtailor.runs.toml import to_toml

VARIANTS = ("bare", "quick", "ours")
NAMES = ("ann", "bob", "cleo")
SHAPE, CLASSES, SAMPLES = (1, 8, 8), 10, 8
TIMEOUT = 900.0  # seconds for each step
RESULTS = Path(__file__).parent / "results" / "federation.json"
Values = dict[str, float]

_SERVER = """
import json
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


def exchange(grid, messages, poll_often):
    if not poll_often:
        return list(grid.send_and_receive(messages))
    pending, replies, pause = set(grid.push_messages(messages)), [], 0.1
    while pending:
        for reply in grid.pull_messages(pending):
            pending.discard(reply.metadata.reply_to_message_id)
            replies.append(reply)
            pause = 0.1
        if pending:
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
    return replies


@app.main()
def main(grid, context):
    config = context.run_config
    while len(nodes := list(grid.get_node_ids())) < config["clients"]:
        time.sleep(0.5)
    layers = torch.nn.Linear(64, config["hidden"]), torch.nn.ReLU(), torch.nn.Linear(config["hidden"], 10)
    weights = torch.nn.Sequential(*layers).state_dict()
    for number in range(1, config["rounds"] + 1):
        started = time.perf_counter()
        content = RecordDict({"weights": ArrayRecord(weights)})
        messages = [Message(content, node, "train", group_id=str(number)) for node in nodes]
        replies = exchange(grid, messages, config["poll-often"])
        line = {"round": number, "seconds": time.perf_counter() - started}
        states = [reply.content["weights"].to_torch_state_dict() for reply in replies]
        weights = {name: sum(state[name] for state in states) / len(states) for name in weights}
        with Path(config["record"]).open("a") as file:
            file.write(json.dumps(line) + "\\n")
"""
_CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    weights = message.content["weights"].to_torch_state_dict()
    offset = 1e-4 * (1 + context.node_id % 97)  # Flower does not send equal tensors twice, so each client's must differ
    weights = {name: leaf + offset for name, leaf in weights.items()}
    return Message(RecordDict({"weights": ArrayRecord(weights)}), reply_to=message)
"""


def prepare(root: Path, hidden: int, rounds: int) -> Path:
    """Create an operator's folder with keys, and a few random samples per client."""
    settings = {
        "method": {"name": "fedavg"}, "network": {"name": "mlp", "hidden": [hidden]}, "rounds": rounds,
        "batch_size": SAMPLES, "evaluate_every": rounds, "address": f"127.0.0.1:{free_port()}", "deadline": TIMEOUT,
        "inputs": {"shape": list(SHAPE), "classes": CLASSES},
    }  # fmt: skip
    operator = root / "operator"
    flower_app.create_operator_folder(operator, make_deployment(settings))
    make_keys(operator, NAMES)
    for client, name in enumerate(NAMES):
        random = np.random.default_rng(client)
        x = random.uniform(size=(2, SAMPLES, *SHAPE)).astype(np.float32)
        y = random.integers(CLASSES, size=(2, SAMPLES))
        np.savez(root / f"{name}.npz", allow_pickle=False, x_train=x[0], y_train=y[0], x_test=x[1], y_test=y[1])
    return operator


@contextmanager
def run_fedtailor(root: Path, operator: Path) -> Iterator[list[int]]:
    """Run `fedtailor deploy` and yield the PIDs of the processes that Flower does not start, the server first."""
    with ExitStack() as stack:
        started = [stack.enter_context(run_command(root / "server.log", "server", str(operator)))]
        wait_until(lambda: "Serving" in (root / "server.log").read_text(), "the server")
        for name in NAMES:
            bundle = ("--name", name, "--bundle", str(operator / "bundles" / f"{name}.tar"), "--device", "cpu", "--yes")
            paths = ("--data", str(root / f"{name}.npz"), "--folder", str(root / name))
            started.append(stack.enter_context(run_command(root / f"{name}.log", "client", *bundle, *paths)))
        superlink.submit(operator)
        yield [process.pid for process in started]


@contextmanager
def run_plain_flower(root: Path, operator: Path, config: dict[str, Any]) -> Iterator[list[int]]:
    """Run plain Flower with the same keys; there are no other processes to yield."""
    (address,) = {open_bundle(operator / "bundles" / f"{n}.tar", root / n / "bundle").address for n in NAMES}
    package, home, keys = operator / "app" / "federation", operator / "home", operator / "keys"
    (package / "server_app.py").write_text(_SERVER)
    (package / "client_app.py").write_text(_CLIENT)
    with (operator / "app" / "pyproject.toml").open("a") as project:
        project.write(to_toml(config))
    home.mkdir()
    connection = {"address": address, "root-certificates": str(keys / "authority.crt")}
    (home / "config.toml").write_text(to_toml({"superlink": {"default": "bench", "bench": connection}}))
    interval = {} if config["poll-often"] else {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0"}  # Flower's default
    with ExitStack() as stack:

        def start(home: Path, *command: str) -> None:
            home.mkdir(exist_ok=True)
            process = Subprocess(home, command, flower_environment(home, **interval), root / f"{home.parent.name}.log")
            stack.callback(process.stop)

        host, _, port = address.rpartition(":")
        start(
            home, flower_command("flower-superlink"), "--host", host, "--port", port, "--enable-supernode-auth",
            "--ssl-ca-certfile", str(keys / "authority.crt"), "--ssl-certfile", str(keys / "server.crt"),
            "--ssl-keyfile", str(keys / "server.key"), "--database", str(operator / "superlink.db"),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        wait_until(lambda: is_listening(host, int(port)), "the server")
        for name, client in enrolled_clients(operator).items():
            (root / f"{name}.pub").write_text(client.public_key)
            flwr(home, "supernode", "register", str(root / f"{name}.pub"), "bench", "--name", name)
            start(
                root / name / "home", flower_command("flower-supernode"), "--superlink", address, "--host", "127.0.0.1",
                "--port", str(free_port()), "--root-certificates", str(keys / "authority.crt"),
                "--auth-supernode-private-key", str(root / name / "bundle" / "key"),
            )  # fmt: skip
        flwr(home, "run", str(operator / "app"), "bench")
        yield []


def measure(variant: str, hidden: int, rounds: int) -> dict[str, Any]:
    """Run one turn: a federation from its start to its end."""
    with TemporaryDirectory(prefix="fedtailor-bench-") as folder:
        root = Path(folder)
        operator = prepare(root, hidden, rounds)
        record = operator / "run" / "rounds.jsonl"
        config = {"rounds": rounds, "hidden": hidden, "clients": len(NAMES), "poll-often": variant == "quick"}
        if variant == "ours":
            federation = run_fedtailor(root, operator)
        else:
            record = root / "rounds.jsonl"
            federation = run_plain_flower(root, operator, config | {"record": str(record)})
        with federation as pids:
            return observe(root, operator, record, rounds, pids)


def observe(root: Path, operator: Path, record: Path, rounds: int, pids: list[int]) -> dict[str, Any]:
    """Measure the rounds from outside, and read the times that the server records."""
    snapshots: list[dict[str, Any]] = []
    peaks: Values = {}
    lines: list[dict[str, Any]] = []

    def next_round() -> bool:
        nonlocal lines
        if read_status(operator).get("state") == "stopped":
            raise RuntimeError(f"the run stopped: {read_status(operator).get('reason')}")
        text = record.read_text() if record.is_file() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return len(lines) > len(snapshots)

    while len(snapshots) < rounds:
        wait_until(next_round, f"round {len(snapshots) + 1}")
        found = processes(root, operator, pids)
        now = {"at": time.monotonic(), "loopback": loopback(), "all": cpu_seconds_of_machine(), "cpu": cpu(found)}
        snapshots += [now] * (len(lines) - len(snapshots))
        for kind, megabytes in memory(found).items():
            peaks[kind] = max(megabytes, peaks.get(kind, 0.0))
    measured = snapshots[: rounds - 1]  # the end of the last round includes the evaluation
    first, last, count = measured[0], measured[-1], len(measured) - 1
    used = {kind: (seconds - first["cpu"].get(kind, 0.0)) / count for kind, seconds in last["cpu"].items()}
    others = (last["all"] - first["all"] - count * sum(used.values())) / (last["at"] - first["at"])
    return {
        "seconds": [line["seconds"] for line in lines[1:]],
        "period": [later["at"] - now["at"] for now, later in pairwise(measured)],
        "cpu_seconds": used,
        "loopback_MB": (last["loopback"] - first["loopback"]) / count / 1e6,
        "server_MB": peaks,
        "others": max(others, 0.0) / (os.cpu_count() or 1),
    }


# ---- system statistics


def cpu_seconds_of_machine() -> float:
    """Return the CPU seconds that all processes on this machine have used."""
    times = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")  # without idle and iowait


def loopback() -> float:
    """Return the bytes sent over the loopback interface."""
    return float(next(line.split()[1] for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line))


def processes(root: Path, operator: Path, pids: list[int]) -> dict[int, str]:
    """Return the PIDs of a federation's processes with their roles."""
    kinds = {"flower-superlink": "superlink", "flwr-serverapp": "serverapp", "flower-superexec": "superexec"}
    found = dict(zip(pids, ["proxy"] + ["clients"] * len(NAMES), strict=False))
    for process in find_processes(operator / "home"):
        found[process.pid] = next((kind for word, kind in kinds.items() if word in command_line(process)), "other")
    homes = [root / name / part for name in NAMES for part in ("home", "home/worker", "home/executor")]
    return found | {process.pid: "clients" for home in homes for process in find_processes(home)}


def cpu(found: dict[int, str]) -> Values:
    """Return the CPU seconds of these processes and of their ended children, by role."""
    seconds: Values = {}
    for pid, kind in found.items():
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            seconds[kind] = seconds.get(kind, 0.0) + used
    return seconds


def memory(found: dict[int, str]) -> Values:
    """Return the peak memory of the server's processes in megabytes, by role."""
    peaks = {}
    for pid, kind in found.items():
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            peaks[kind] = int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1e3
    return {kind: megabytes for kind, megabytes in peaks.items() if kind != "clients"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def flwr(home: Path, *args: str) -> None:
    """Run one of Flower's commands."""
    subprocess.run(
        [flower_command("flwr"), *args], env=flower_environment(home), capture_output=True, check=True, timeout=TIMEOUT
    )


def is_listening(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False


def wait_until(condition: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {TIMEOUT:.0f} s for {description}")
        time.sleep(0.05)


# ---- results


def spread(values: list[float]) -> Values:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "low": low, "high": high}


def ratios(turns: list[dict[str, Any]], name: str, other: str) -> Values:
    """Return the ratios of ours to another variant, paired by turn because the load on the machine varies over time."""
    medians = {v: [statistics.median(t[name]) for t in turns if t["way"] == v] for v in ("ours", other)}
    return spread([a / b for a, b in zip(medians["ours"], medians[other], strict=True)])


def summary(megabytes: float, hidden: int, turns: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"megabytes": megabytes, "hidden": hidden}
    for variant in VARIANTS:
        own_turns = [turn for turn in turns if turn["way"] == variant]
        found[variant] = {name: spread([s for turn in own_turns for s in turn[name]]) for name in ("seconds", "period")}
        found[variant]["loopback_MB"] = statistics.median(turn["loopback_MB"] for turn in own_turns)
        for name, take in (("cpu_seconds", statistics.median), ("server_MB", max)):
            kinds = sorted({kind for turn in own_turns for kind in turn[name]})
            found[variant][name] = {kind: take([turn[name].get(kind, 0.0) for turn in own_turns]) for kind in kinds}
    for name in ("seconds", "period"):
        found[f"ours_to_bare_{name}"] = ratios(turns, name, "bare")
        found[f"ours_to_quick_{name}"] = ratios(turns, name, "quick")
    return found | {"turns": turns}


def show(found: dict[str, Any]) -> None:
    for variant in VARIANTS:
        values = found[variant]
        seconds, period = values["seconds"], values["period"]
        memory = ", ".join(f"{kind} {megabytes:.0f} MB" for kind, megabytes in values["server_MB"].items())
        print(
            f"{found['megabytes']:6g} MB  {variant:5}  {seconds['median']:6.2f} s per round ({seconds['low']:.2f} to "
            f"{seconds['high']:.2f}), {period['median']:6.2f} s between rounds, "
            f"{sum(values['cpu_seconds'].values()):5.1f} CPU s, "
            f"{values['loopback_MB']:6.1f} MB on loopback; {memory}"
        )
    for other in ("bare", "quick"):
        ratio, period = found[f"ours_to_{other}_seconds"], found[f"ours_to_{other}_period"]
        print(
            f"           ours is {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) of {other}, "
            f"between rounds {period['median']:.2f} ({period['low']:.2f} to {period['high']:.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="rounds per turn, at least 3")
    parser.add_argument("--megabytes", default="0.03,10,50", help="model sizes")
    parser.add_argument("--repeats", type=int, default=3, help="turns per variant")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.rounds < 3:
        parser.error("--rounds must be at least 3, because the first and the last round are not measured")
    os.environ["OMP_NUM_THREADS"] = "1"  # three clients share the machine
    sizes = []
    for megabytes in map(float, args.megabytes.split(",")):
        inputs = int(np.prod(SHAPE))
        hidden = max(round((megabytes * 1e6 / 4 - CLASSES) / (inputs + 1 + CLASSES)), 1)
        turns = []
        for repeat in range(args.repeats):
            for variant in VARIANTS:
                turns.append({"way": variant} | measure(variant, hidden, args.rounds))
                times = ", ".join(f"{seconds:.2f}" for seconds in turns[-1]["seconds"])
                print(
                    f"  turn {repeat + 1}, {variant}: {times} s (others {turns[-1]['others']:.0%} of the machine)",
                    flush=True,
                )
        sizes.append(summary(megabytes, hidden, turns))
        show(sizes[-1])
    info = {
        "date": str(date.today()),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("fedtailor", "flwr", "torch")},
        "clients": len(NAMES),
        "rounds": args.rounds,
    }
    args.out.write_text(json.dumps(info | {"sizes": sizes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
