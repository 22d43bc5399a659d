"""What a real federation costs beside Flower itself: three clients on this machine, with TLS and keys.

python benchmarks/federation.py [--rounds 6] [--megabytes 0.03,10,50] [--repeats 3]

bare    an app as one writes it with Flower: `Grid.send_and_receive`, a state_dict there and back, nothing trained
quick   the same, but it looks for messages as often as ours does: what is left between them is no shorter pause
ours    `fedtailor deploy`, the gate included: FedAvg on an MLP of that size, with a handful of samples a client

They take turns, so that what else the machine does hits all alike, and every turn starts everything anew. `seconds` are
from the first message of a round to its last answer (ours: with checks and the new model), `period` from round to
round with all that is in between. The first round, which also hands out the app, does not count. CPU seconds are of
all processes of a federation together; `others` is the share of the machine that somebody else used meanwhile.
Writes results/federation.json.
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

from fedtailor.deploy import app, link
from fedtailor.deploy.child import Child, command, environment, kin
from fedtailor.deploy.folder import enrolled, read_status
from fedtailor.deploy.keys import make_keys, open_bundle
from fedtailor.deploy.settings import make_deployment
from fedtailor.deploy.trial import running
from fedtailor.toml import to_toml

WAYS = ("bare", "quick", "ours")
NAMES = ("ann", "bob", "cleo")
SHAPE, CLASSES, SAMPLES = (1, 8, 8), 10, 8
PATIENCE = 900.0  # seconds for anything at all
RESULTS = Path(__file__).parent / "results" / "federation.json"
Numbers = dict[str, float]

_SERVER = """
import json
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


def exchange(grid, messages, often):
    if not often:
        return list(grid.send_and_receive(messages))
    waiting, replies, pause = set(grid.push_messages(messages)), [], 0.1
    while waiting:
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            replies.append(reply)
            pause = 0.1
        if waiting:
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
        began = time.perf_counter()
        content = RecordDict({"weights": ArrayRecord(weights)})
        messages = [Message(content, node, "train", group_id=str(number)) for node in nodes]
        replies = exchange(grid, messages, config["often"])
        line = {"round": number, "seconds": time.perf_counter() - began}
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
    own = 1e-4 * (1 + context.node_id % 97)  # Flower does not send again what it has seen: everyone's must be new
    weights = {name: leaf + own for name, leaf in weights.items()}
    return Message(RecordDict({"weights": ArrayRecord(weights)}), reply_to=message)
"""


def prepare(here: Path, hidden: int, rounds: int) -> Path:
    """An operator's folder with keys, and a few made-up samples for every client."""
    settings = {
        "method": {"name": "fedavg"}, "network": {"name": "mlp", "hidden": [hidden]}, "rounds": rounds,
        "batch_size": SAMPLES, "evaluate_every": rounds, "address": f"127.0.0.1:{free_port()}", "deadline": PATIENCE,
        "inputs": {"shape": list(SHAPE), "classes": CLASSES},
    }  # fmt: skip
    operator = here / "operator"
    app.begin(operator, make_deployment(settings))
    make_keys(operator, NAMES)
    for place, name in enumerate(NAMES):
        random = np.random.default_rng(place)
        x = random.uniform(size=(2, SAMPLES, *SHAPE)).astype(np.float32)
        y = random.integers(CLASSES, size=(2, SAMPLES))
        np.savez(here / f"{name}.npz", allow_pickle=False, x_train=x[0], y_train=y[0], x_test=x[1], y_test=y[1])
    return operator


@contextmanager
def ours(here: Path, operator: Path) -> Iterator[list[int]]:
    """As `fedtailor deploy` does it; gives the processes that Flower knows nothing of, the server first."""
    with ExitStack() as stack:
        started = [stack.enter_context(running(here / "server.log", "server", str(operator)))]
        until(lambda: "Serving" in (here / "server.log").read_text(), "the server")
        for name in NAMES:
            words = ("--name", name, "--bundle", str(operator / "bundles" / f"{name}.tar"), "--device", "cpu", "--yes")
            own = ("--data", str(here / f"{name}.npz"), "--folder", str(here / name))
            started.append(stack.enter_context(running(here / f"{name}.log", "client", *words, *own)))
        link.submit(operator)
        yield [process.pid for process in started]


@contextmanager
def plain(here: Path, operator: Path, config: dict[str, Any]) -> Iterator[list[int]]:
    """Flower alone, with the same keys."""
    (address,) = {open_bundle(operator / "bundles" / f"{n}.tar", here / n / "bundle").address for n in NAMES}
    package, home, keys = operator / "app" / "federation", operator / "home", operator / "keys"
    (package / "server_app.py").write_text(_SERVER)
    (package / "client_app.py").write_text(_CLIENT)
    with (operator / "app" / "pyproject.toml").open("a") as project:
        project.write(to_toml(config))
    home.mkdir()
    connection = {"address": address, "root-certificates": str(keys / "authority.crt")}
    (home / "config.toml").write_text(to_toml({"superlink": {"default": "bench", "bench": connection}}))
    pause = {} if config["often"] else {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0"}  # Flower's own
    with ExitStack() as stack:

        def start(home: Path, *words: str) -> None:
            home.mkdir(exist_ok=True)
            child = Child(home, words, environment(home, **pause), here / f"{home.parent.name}.log")
            stack.callback(child.stop)

        host, _, port = address.rpartition(":")
        start(
            home, command("flower-superlink"), "--host", host, "--port", port, "--enable-supernode-auth",
            "--ssl-ca-certfile", str(keys / "authority.crt"), "--ssl-certfile", str(keys / "server.crt"),
            "--ssl-keyfile", str(keys / "server.key"), "--database", str(operator / "superlink.db"),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        until(lambda: listens(host, int(port)), "the server")
        for name, about in enrolled(operator).items():
            (here / f"{name}.pub").write_text(about.public_key)
            flwr(home, "supernode", "register", str(here / f"{name}.pub"), "bench", "--name", name)
            start(
                here / name / "home", command("flower-supernode"), "--superlink", address, "--host", "127.0.0.1",
                "--port", str(free_port()), "--root-certificates", str(keys / "authority.crt"),
                "--auth-supernode-private-key", str(here / name / "bundle" / "key"),
            )  # fmt: skip
        flwr(home, "run", str(operator / "app"), "bench")
        yield []


def measure(way: str, hidden: int, rounds: int) -> dict[str, Any]:
    """One turn: a federation from its start to its end."""
    with TemporaryDirectory(prefix="fedtailor-bench-") as folder:
        here = Path(folder)
        operator = prepare(here, hidden, rounds)
        record = operator / "run" / "rounds.jsonl"
        config = {"rounds": rounds, "hidden": hidden, "clients": len(NAMES), "often": way == "quick"}
        if way == "ours":
            federation = ours(here, operator)
        else:
            record = here / "rounds.jsonl"
            federation = plain(here, operator, config | {"record": str(record)})
        with federation as extra:
            return watch(here, operator, record, rounds, extra)


def watch(here: Path, operator: Path, record: Path, rounds: int, extra: list[int]) -> dict[str, Any]:
    """What is seen of the rounds from outside, and what the server says of them."""
    seen: list[dict[str, Any]] = []
    peaks: Numbers = {}
    lines: list[dict[str, Any]] = []

    def next_round() -> bool:
        nonlocal lines
        if read_status(operator).get("state") == "stopped":
            raise RuntimeError(f"the run stopped: {read_status(operator).get('why')}")
        text = record.read_text() if record.is_file() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return len(lines) > len(seen)

    while len(seen) < rounds:
        until(next_round, f"round {len(seen) + 1}")
        found = processes(here, operator, extra)
        now = {"at": time.monotonic(), "loopback": loopback(), "all": computed(), "cpu": cpu(found)}
        seen += [now] * (len(lines) - len(seen))
        for kind, megabytes in memory(found).items():
            peaks[kind] = max(megabytes, peaks.get(kind, 0.0))
    usual = seen[: rounds - 1]  # the last round's end is also that of the evaluation
    first, last, count = usual[0], usual[-1], len(usual) - 1
    own = {kind: (took - first["cpu"].get(kind, 0.0)) / count for kind, took in last["cpu"].items()}
    others = (last["all"] - first["all"] - count * sum(own.values())) / (last["at"] - first["at"])
    return {
        "seconds": [line["seconds"] for line in lines[1:]],
        "period": [later["at"] - now["at"] for now, later in pairwise(usual)],
        "cpu_seconds": own,
        "loopback_MB": (last["loopback"] - first["loopback"]) / count / 1e6,
        "server_MB": peaks,
        "others": max(others, 0.0) / (os.cpu_count() or 1),
    }


# ---- what the system tells


def computed() -> float:
    """Seconds that this machine's cores have computed, for anybody."""
    times = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")  # less idle, and waiting for a disk


def loopback() -> float:
    """Bytes that ever went from this machine to itself."""
    return float(next(line.split()[1] for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line))


def processes(here: Path, operator: Path, extra: list[int]) -> dict[int, str]:
    """A federation's processes, by what they are for."""
    kinds = {"flower-superlink": "superlink", "flwr-serverapp": "serverapp", "flower-superexec": "superexec"}
    found = dict(zip(extra, ["gate"] + ["clients"] * len(NAMES), strict=False))
    for process in kin(operator / "home"):
        found[process.number] = next((kind for word, kind in kinds.items() if word in process.words), "other")
    return found | {process.number: "clients" for name in NAMES for process in kin(here / name / "home")}


def cpu(found: dict[int, str]) -> Numbers:
    """Seconds that these processes have computed, with those that they started and that ended."""
    seconds: Numbers = {}
    for number, kind in found.items():
        with suppress(OSError):
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            took = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            seconds[kind] = seconds.get(kind, 0.0) + took
    return seconds


def memory(found: dict[int, str]) -> Numbers:
    """The most megabytes that each of the server's processes ever held."""
    peaks = {}
    for number, kind in found.items():
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{number}/status").read_text().splitlines()
            peaks[kind] = int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1e3
    return {kind: megabytes for kind, megabytes in peaks.items() if kind != "clients"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def flwr(home: Path, *words: str) -> None:
    """One of Flower's commands."""
    subprocess.run([command("flwr"), *words], env=environment(home), capture_output=True, check=True, timeout=PATIENCE)


def listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {PATIENCE:.0f} s in vain for {what}")
        time.sleep(0.05)


# ---- the table


def spread(values: list[float]) -> Numbers:
    """The median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "low": low, "high": high}


def ratios(turns: list[dict[str, Any]], name: str, other: str) -> Numbers:
    """Ours to another, turn by turn, for a turn's median is of one time of the day."""
    medians = {way: [statistics.median(t[name]) for t in turns if t["way"] == way] for way in ("ours", other)}
    return spread([own / its for own, its in zip(medians["ours"], medians[other], strict=True)])


def summary(megabytes: float, hidden: int, turns: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"megabytes": megabytes, "hidden": hidden}
    for way in WAYS:
        own = [turn for turn in turns if turn["way"] == way]
        found[way] = {name: spread([s for turn in own for s in turn[name]]) for name in ("seconds", "period")}
        found[way]["loopback_MB"] = statistics.median(turn["loopback_MB"] for turn in own)
        for name, take in (("cpu_seconds", statistics.median), ("server_MB", max)):
            kinds = sorted({kind for turn in own for kind in turn[name]})
            found[way][name] = {kind: take([turn[name].get(kind, 0.0) for turn in own]) for kind in kinds}
    for name in ("seconds", "period"):
        found[f"ours_to_bare_{name}"] = ratios(turns, name, "bare")
        found[f"ours_to_quick_{name}"] = ratios(turns, name, "quick")
    return found | {"turns": turns}


def show(found: dict[str, Any]) -> None:
    for way in WAYS:
        own = found[way]
        took, period = own["seconds"], own["period"]
        memory = ", ".join(f"{kind} {megabytes:.0f} MB" for kind, megabytes in own["server_MB"].items())
        print(
            f"{found['megabytes']:6g} MB  {way:5}  {took['median']:6.2f} s a round ({took['low']:.2f} to "
            f"{took['high']:.2f}), {period['median']:6.2f} s from round to round, "
            f"{sum(own['cpu_seconds'].values()):5.1f} CPU s, "
            f"{own['loopback_MB']:6.1f} MB on loopback; {memory}"
        )
    for other in ("bare", "quick"):
        part, period = found[f"ours_to_{other}_seconds"], found[f"ours_to_{other}_period"]
        print(
            f"           ours is {part['median']:.2f} ({part['low']:.2f} to {part['high']:.2f}) of {other}, "
            f"from round to round {period['median']:.2f} ({period['low']:.2f} to {period['high']:.2f})"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=6, help="of a turn, at least 3")
    options.add_argument("--megabytes", default="0.03,10,50", help="of a model")
    options.add_argument("--repeats", type=int, default=3, help="turns of each")
    options.add_argument("--out", type=Path, default=RESULTS)
    asked = options.parse_args()
    if asked.rounds < 3:
        options.error("the first and the last round are not like the others: 3 are the fewest")
    os.environ["OMP_NUM_THREADS"] = "1"  # three clients share the machine
    sizes = []
    for megabytes in map(float, asked.megabytes.split(",")):
        inputs = int(np.prod(SHAPE))
        hidden = max(round((megabytes * 1e6 / 4 - CLASSES) / (inputs + 1 + CLASSES)), 1)
        turns = []
        for repeat in range(asked.repeats):
            for way in WAYS:
                turns.append({"way": way} | measure(way, hidden, asked.rounds))
                times = ", ".join(f"{took:.2f}" for took in turns[-1]["seconds"])
                print(
                    f"  turn {repeat + 1}, {way}: {times} s (others {turns[-1]['others']:.0%} of the machine)",
                    flush=True,
                )
        sizes.append(summary(megabytes, hidden, turns))
        show(sizes[-1])
    about = {
        "date": str(date.today()),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("fedtailor", "flwr", "torch")},
        "clients": len(NAMES),
        "rounds": asked.rounds,
    }
    asked.out.write_text(json.dumps(about | {"sizes": sizes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
