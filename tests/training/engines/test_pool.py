"""Tests of the pool engine: it is bit-identical to the sequential engine and leaves no processes behind."""

import os
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import METHOD_PARAMS, error_message, models, tiny_federation
from fedtailor.core.system import available_cores
from fedtailor.core.trees import Rows, Tree, flatten
from fedtailor.methods import METHODS
from fedtailor.training.engines import pool as pool_module
from fedtailor.training.engines.pool import Pool
from fedtailor.training.engines.processes import WorkQueue
from support.contexts import make_engine

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.accelerator.is_available(), reason="the pool needs fork and no GPU"
)
CLIENTS = [0, 1, 2, 3]


@pytest.fixture(autouse=True)
def fork_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork after the first client; otherwise the tiny clients of these tests would finish before."""
    monkeypatch.setattr(pool_module, "_FORK_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def check_cleanup() -> Iterator[None]:
    """Check that no test leaves a process or an open file behind.

    Other tests may have started child processes that still run, so only new ones count.
    """
    before, children_before = open_files(), child_processes()
    yield
    assert open_files() <= before
    assert child_processes() <= children_before


def open_files() -> set[str]:
    folder = Path("/proc/self/fd")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def child_processes() -> set[str]:
    """Return the ids of all children of this process, including zombies."""
    tasks = Path("/proc/self/task")
    return {child for children in tasks.glob("*/children") for child in children.read_text().split()}


def identical(a: Tree, b: Tree) -> bool:
    left, right = flatten(a), flatten(b)
    assert list(left) == list(right)
    return all(torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left)


def make_pool(net: nn.Module, workers: int = 2) -> Pool:
    """Return a pool for clients of 9, 4, 7, and 1 samples; with two workers, one of them is this process."""
    shared, sequential = make_engine(net)
    return Pool(shared, sequential.samples, workers)


def apply(function: Callable[..., Tree], net: nn.Module, *trees: Tree, workers: int = 2) -> Tree:
    """Apply a function to every client in a pool."""
    return make_pool(net, workers).apply(function, 1, CLIENTS, *trees)


@pytest.mark.parametrize("name", METHOD_PARAMS)
def test_pool_matches_sequential_to_the_bit(name: str, net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)  # two workers on any machine
    runs = [
        ft.simulate(METHODS[name](), net, tiny_federation(), schedule=[CLIENTS, [0, 3]], batch_size=2,
                    dtype=torch.float64, engine=engine, device="cpu", evaluate_every=2)
        for engine in ("sequential", "pool")
    ]  # fmt: skip
    one, other = ({"server": run.server, **{str(c): run.client(c) for c in CLIENTS}} for run in runs)
    assert identical(one, other)
    for moment in ("received", "trained"):
        assert all(identical(*pair) for pair in zip(*(models(run, moment) for run in runs), strict=True))


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_pool_bits_do_not_depend_on_number_of_workers(workers: int) -> None:
    """The network has layers that usually have hidden state and global randomness."""
    torch.manual_seed(0)
    layers = {"fc": nn.Linear(4, 6), "norm": nn.BatchNorm1d(6), "relu": nn.ReLU(), "drop": nn.Dropout(0.3)}
    net = nn.Sequential(OrderedDict(layers, head=nn.Linear(6, 3))).double()
    method = ft.methods.FedAvg(momentum=0.5)
    message = {"params": ft.wrap(net).init(0)}

    def train(ctx: ft.ClientContext) -> Tree:
        return method.train(ctx, {}, message)[1]

    assert identical(apply(train, net, workers=workers), make_engine(net)[1].apply(train, 1, CLIENTS))


def all_leaf_types(ctx: ft.ClientContext, own: Tree) -> Tree:
    """Return a table with absent rows, floats, integers, booleans, an empty tensor, and a transposed tensor."""
    table = Rows(own["a"].expand(3, 2) * 0.1, torch.arange(3) <= ctx.index)
    return {"table": table, "nested": {"float": own["a"] + ctx.index, "int": ctx.index, "bool": ctx.index > 1},
            "empty": torch.zeros(0, 5), "transposed": own["a"] * torch.arange(6.0).reshape(2, 3).T}  # fmt: skip


def test_pool_returns_all_leaf_types(net: nn.Module) -> None:
    trees = {"a": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    expected = make_engine(net)[1].apply(all_leaf_types, 1, CLIENTS, trees)
    assert identical(apply(all_leaf_types, net, trees), expected)


def test_pool_memory_is_reused_only_after_release(net: nn.Module) -> None:
    pool = make_pool(net)

    def fill(value: float) -> Tree:
        return pool.apply(lambda ctx: {"a": torch.full((5,), value), "b": ctx.index}, 1, CLIENTS)

    one, two = fill(1.0), fill(2.0)
    part = one["a"][3]
    address = one["a"].data_ptr()
    del one
    fill(3.0)
    assert part.tolist() == [1.0] * 5 and two["a"].flatten().tolist() == [2.0] * 20  # a view keeps the memory in use
    del part
    assert fill(4.0)["a"].data_ptr() == address


def test_pool_result_names_may_change_between_rounds(net: nn.Module) -> None:
    """The structure of earlier results determines the shared memory, but may change."""
    pool = make_pool(net)

    def work(ctx: ft.ClientContext) -> Tree:
        return {f"round{ctx.round}": torch.ones(ctx.round) * ctx.index}

    for number in (1, 1, 2, 3, 3):
        found = pool.apply(work, number, CLIENTS)
        assert found[f"round{number}"].tolist() == [[client] * number for client in CLIENTS]


def test_pool_runs_clients_in_parallel_processes(net: nn.Module) -> None:
    """Each of two workers waits until the other has started, which a single process could not."""
    main_pipe, worker_pipe = os.pipe(), os.pipe()
    main_pid = os.getpid()

    def meet(ctx: ft.ClientContext) -> Tree:
        if int(ctx.index) in (0, 2):  # the two longest; the shortest runs before forking
            mine, other = (main_pipe, worker_pipe) if os.getpid() == main_pid else (worker_pipe, main_pipe)
            os.write(mine[1], b"!")
            os.read(other[0], 1)
        return {"process": torch.tensor(os.getpid()), "threads": torch.tensor(torch.get_num_threads())}

    found = apply(meet, net)
    for end in (*main_pipe, *worker_pipe):
        os.close(end)
    assert len({int(found["process"][client]) for client in (0, 2)}) == 2
    assert found["threads"].tolist() == [1] * 4


def test_pool_with_small_work_does_not_fork(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_FORK_SECONDS", 1e9)
    found = apply(lambda ctx: {"process": torch.tensor(os.getpid())}, net)
    assert found["process"].tolist() == [os.getpid()] * 4


def test_pool_restores_number_of_threads(net: nn.Module) -> None:
    """Forking after two threads were used must not hang."""
    torch.set_num_threads(2)
    try:
        assert float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()) == 300**3
        found = apply(lambda ctx: {"sum": (torch.ones(300, 300) @ torch.ones(300, 300)).sum()}, net)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert found["sum"].tolist() == [300**3] * 4


class CustomError(Exception):
    """An error that cannot be pickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"custom: {first + second}")


def failing(client: int) -> Callable[[ft.ClientContext], Tree]:
    def work(ctx: ft.ClientContext) -> Tree:
        if int(ctx.index) == client:
            raise CustomError(client, 40)
        return {}

    return work


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_pool_raises_original_error_of_client(client: int, workers: int, net: nn.Module) -> None:
    with pytest.raises(CustomError, match=f"custom: {client + 40}") as caught:
        apply(failing(client), net, workers=workers)
    assert caught.traceback[-1].name == "work"  # the original place of the error


def test_pool_with_differing_structures_raises_config_error(net: nn.Module) -> None:
    message = error_message(lambda: apply(lambda ctx: {"own": torch.zeros(int(ctx.size))}, net))
    assert "'own' is" in message and "of the same names, shapes, and dtypes" in message
    double = lambda ctx: {"own": torch.zeros(1, dtype=torch.float64 if int(ctx.index) == 2 else torch.float32)}  # noqa: E731
    assert "torch.float64 for client" in error_message(lambda: apply(double, net))


def test_pool_with_in_place_change_in_worker_raises(net: nn.Module) -> None:
    def modify(ctx: ft.ClientContext, own: Tree) -> Tree:
        return {"a": own["a"].add_(1) if int(ctx.index) == 0 else own["a"]}

    assert "Client 0 modified 'a' in place" in error_message(lambda: apply(modify, net, {"a": torch.zeros(4)}))


@contextmanager
def act_in_worker(act: Callable[[], object]) -> Iterator[Callable[[ft.ClientContext], Tree]]:
    """Yield a client function that calls `act` only in a forked worker; this process waits until a worker has."""
    started, main_pid = os.pipe(), os.getpid()

    def work(ctx: ft.ClientContext) -> Tree:
        if os.getpid() != main_pid:
            os.write(started[1], b"!")
            act()
        elif int(ctx.index) != 3:  # the shortest runs before there are workers
            os.read(started[0], 1)
            os.write(started[1], b"!")  # for when this process takes the next client
        return {"index": ctx.index}

    yield work
    for end in started:
        os.close(end)


def run_out_of_memory() -> None:
    raise MemoryError("no memory\nleft")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "A worker process was killed while it trained client"),
        (run_out_of_memory, "failed in a worker process but not when run again (MemoryError: no memory)"),
    ],
    ids=["killed", "unrepeatable error"],
)
def test_pool_with_lost_worker_raises(act: Callable[[], object], words: str, net: nn.Module) -> None:
    with act_in_worker(act) as work:
        assert words in error_message(lambda: apply(work, net))


def test_pool_interrupt_kills_workers(net: nn.Module) -> None:
    """This process is interrupted while a worker waits forever."""
    never, main_pid = os.pipe(), os.getpid()

    def work(ctx: ft.ClientContext) -> Tree:
        if os.getpid() != main_pid:
            os.read(never[0], 1)
        elif int(ctx.index) != 3:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        apply(work, net)
    for end in never:
        os.close(end)


@pytest.mark.usefixtures("default_sigint")
def test_pool_workers_ignore_interrupt(net: nn.Module) -> None:
    """A terminal sends SIGINT to all processes; only the one that the user started handles it."""
    with act_in_worker(lambda: os.kill(os.getpid(), signal.SIGINT)) as work:
        assert apply(work, net)["index"].tolist() == CLIENTS


def test_pool_orphaned_worker_stops_after_current_client(net: nn.Module) -> None:
    log, test_pid = os.pipe(), os.getpid()

    def work(ctx: ft.ClientContext) -> Tree:
        if os.getppid() == test_pid and int(ctx.index) != 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.getppid() != test_pid:
            while os.getppid() == parent:
                pass
            os.write(log[1], b"!")
        return {}

    middle = os.fork()
    if not middle:
        parent = os.getpid()
        try:
            apply(work, net)
        finally:
            os._exit(1)
    os.close(log[1])
    os.waitpid(middle, 0)
    done = b"".join(iter(lambda: os.read(log[0], 9), b""))  # ends when the last process exits
    os.close(log[0])
    assert len(done) <= 1


def test_pool_output_of_workers_appears_once(net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output that is buffered when a worker is forked would be printed by both processes."""

    def work(ctx: ft.ClientContext) -> Tree:
        print(f"client {int(ctx.index)}")
        return {}

    with (tmp_path / "output").open("a") as buffered, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", buffered)
        print("before")
        apply(work, net)
    lines = (tmp_path / "output").read_text().splitlines()
    assert sorted(lines) == ["before", *(f"client {client}" for client in CLIENTS)]


def process_of_each_client(ctx: ft.ClientContext, own: Tree) -> Tree:
    """Return which process trained the client."""
    return {"double": 2 * own["a"], "process": torch.tensor(os.getpid())}


def test_pool_workers_of_repeated_function_stay_alive_until_close(net: nn.Module) -> None:
    pool, before = make_pool(net, workers=3), child_processes()
    living = []
    for number in range(4):
        values = {"a": torch.arange(4.0) + number}
        found = pool.apply(process_of_each_client, number, CLIENTS, values)
        assert found["double"].tolist() == [2.0 * (client + number) for client in CLIENTS]
        living.append(child_processes() - before)
    assert living[0] == set() and len(living[1]) == 2  # forked for one call, then for all further ones
    assert living[1] == living[2] == living[3]
    pool.close()
    assert child_processes() == before


def test_pool_sends_all_layouts_to_living_workers(net: nn.Module) -> None:
    """Repeated rows, transposed rows, tables, an empty tensor, and earlier results, which are in shared memory."""
    pool, sequential = make_pool(net), make_engine(net)[1]

    def both(ctx: ft.ClientContext, own: Tree, earlier: Tree) -> Tree:
        table = Rows(own["table"].values + earlier["repeated"].sum(), own["table"].present)
        return {
            **own,
            "table": table,
            "repeated": own["repeated"] * 2 + ctx.index,
            "strides": own["transposed"] @ own["w"],
        }

    table = Rows(torch.rand(4, 3, 2), torch.rand(4, 3) > 0.5)
    own = {"repeated": torch.rand(1, 5).expand(4, 5), "transposed": torch.rand(4, 6, 3).mT, "table": table,
           "empty": torch.zeros(4, 0), "sliced": torch.rand(4, 9)[:, 2:5], "w": torch.rand(4, 6)}  # fmt: skip
    earlier = expected = {"repeated": torch.rand(4, 5)}
    for number in range(4):
        expected = sequential.apply(both, number, CLIENTS, own, expected)
        earlier = pool.apply(both, number, CLIENTS, own, earlier)
        assert identical(earlier, expected)


def test_pool_replaces_idle_worker_that_was_killed(net: nn.Module) -> None:
    pool, before = make_pool(net), child_processes()
    for number in range(5):
        found = pool.apply(process_of_each_client, number, CLIENTS, {"a": torch.ones(4)})
        assert found["double"].tolist() == [2.0] * 4
        if number == 2:
            (worker,) = child_processes() - before
            os.kill(int(worker), signal.SIGKILL)


def test_pool_with_living_worker_killed_at_work_raises(net: nn.Module) -> None:
    pool, started, main_pid = make_pool(net), os.pipe(), os.getpid()

    def work(ctx: ft.ClientContext) -> Tree:
        if ctx.round == 3 and os.getpid() != main_pid:
            os.write(started[1], b"!")
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.round == 3:
            os.read(started[0], 1)
            os.write(started[1], b"!")
        return {"index": ctx.index}

    for number in (1, 2):
        assert pool.apply(work, number, CLIENTS)["index"].tolist() == CLIENTS
    assert "A worker process was killed while it trained client" in error_message(lambda: pool.apply(work, 3, CLIENTS))
    for end in started:
        os.close(end)


def test_pool_error_in_living_worker_is_raised_and_later_calls_work(net: nn.Module) -> None:
    pool = make_pool(net)

    def work(ctx: ft.ClientContext) -> Tree:
        if ctx.round == 3 and int(ctx.index) != 3:
            raise CustomError(int(ctx.index), 40)
        return {"index": ctx.index}

    for number in (1, 2, 3, 4, 5):
        if number == 3:
            with pytest.raises(CustomError):
                pool.apply(work, number, CLIENTS)
        else:
            assert pool.apply(work, number, CLIENTS)["index"].tolist() == CLIENTS


def test_pool_idle_workers_end_with_main_process(net: nn.Module) -> None:
    log, middle = os.pipe(), os.fork()
    if not middle:
        try:
            pool = make_pool(net, workers=3)
            for number in (1, 2, 3):
                pool.apply(process_of_each_client, number, CLIENTS, {"a": torch.ones(4)})
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(log[1])
    os.waitpid(middle, 0)
    assert os.read(log[0], 1) == b""  # all processes that had the other end are gone
    os.close(log[0])


@pytest.mark.parametrize("engine", ["pool", "vectorized"])
def test_run_leaves_no_workers(net: nn.Module, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """The run is still in use, so its engine is, too; a run that fails ends its workers as well."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    chunk: dict[str, Any] = {"chunk_size": 1} if engine == "vectorized" else {}
    before, living = child_processes(), []

    def train(**settings: Any) -> ft.Run:
        return ft.simulate(
            ft.methods.FedAvg(), net, tiny_federation(), rounds=4, held_out_clients=1, dtype=torch.float64,
            engine=engine, device="cpu", **chunk, **settings,
        )  # fmt: skip

    def fail_in_round_3(record: Any) -> None:
        living.append(child_processes() - before)
        if record["round"] == 3:
            raise CustomError(1, 2)

    run = train()
    assert child_processes() == before and len(run.records) == 4
    with pytest.raises(CustomError):
        train(on_round_end=fail_in_round_3)
    assert len(living[-1]) >= 1 and child_processes() == before


def test_work_queue_gives_every_task_once() -> None:
    tasks = list(range(10_000))
    queue = WorkQueue.create(tasks)
    taken = list(iter(queue.take, ()))
    queue.close()
    assert sorted(position for positions in taken for position in positions) == tasks
    assert taken[0][0] == 0  # in order, the longest first


def test_pool_needs_no_gpu_and_uses_all_cores(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, sequential = make_engine(net)
    assert Pool(shared, sequential.samples).workers == available_cores() >= 1
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert "on a machine with a GPU" in error_message(lambda: make_pool(net))
