"""The pool of processes computes what the sequential engine does, to the last bit, and leaves nothing behind."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import SOME_FAST, refusal, tiny_federation
from fedtailor.engines import pool
from fedtailor.engines.forking import Tickets
from fedtailor.engines.pool import Pool
from fedtailor.engines.sequential import Sequential
from fedtailor.machine import usable_cores
from fedtailor.methods import METHODS
from fedtailor.rounds import Rounds
from fedtailor.settings import Settings
from fedtailor.trees import Rows, Tree, flatten

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.accelerator.is_available(), reason="the pool needs fork and no GPU"
)
EVERYONE = [0, 1, 2, 3]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork after the first client, however fast it was: tiny clients would all be done before it pays."""
    monkeypatch.setattr(pool, "_PATIENCE", 0.0)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a process or an open file behind, whether its work succeeds or fails."""
    before = open_files()
    yield
    assert open_files() <= before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # that there are no children, not even ended ones


def open_files() -> set[str]:
    kept = Path("/proc/self/fd")
    return {each.name for each in kept.iterdir()} if kept.exists() else set()


def start(method: ft.Method, net: nn.Module, workers: int | None, dtype: Any = "float64") -> Rounds:
    """A run over clients of 9, 4, 7 and 1 samples in batches of 2, with a pool where workers are given."""
    settings = Settings(batch_size=2, engine="sequential", device="cpu", dtype=dtype)
    loop = Rounds.build(settings, method, ft.wrap(net), tiny_federation(), [EVERYONE] * 3)
    if workers is not None:
        loop.engine = Pool(loop.common, loop.train, workers)
    return loop


def identical(a: Tree, b: Tree) -> bool:
    left, right = flatten(a), flatten(b)
    assert list(left) == list(right)
    return all(torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left)


def outcome(loop: Rounds, schedule: list[list[int]]) -> Tree:
    """All that is left of a run: the server, every client's state and models."""
    for number, clients in enumerate(schedule, start=1):
        loop.round(number, clients)
    states = {str(client): loop.states.one(client) for client in EVERYONE}
    received, trained = loop.received(EVERYONE, len(schedule) + 1), loop.as_trained(EVERYONE)
    return {"server": loop.server, "states": states, "received": received, "trained": trained}


class Unsteady(nn.Module):
    """Batch normalisation and dropout, which hide state and draw numbers elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.fc(x)))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", [[EVERYONE] * 3, [[0, 3], [1, 2, 3], [3]]], ids=["full", "partial"])
@pytest.mark.parametrize("name", SOME_FAST)
def test_every_method_ends_with_the_same_bits(name: str, schedule: list[list[int]], net: nn.Module) -> None:
    ends = [outcome(start(METHODS[name](), net, workers), schedule) for workers in (None, 2)]
    assert identical(*ends)


@pytest.mark.parametrize("method", [ft.methods.FedAvg(), ft.methods.FedAPA(), ft.methods.LAG(ft.methods.Scaffold())])
@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_bits_do_not_depend_on_the_number_of_workers(method: ft.Method, workers: int) -> None:
    torch.manual_seed(0)
    net = Unsteady()
    ends = [outcome(start(method, net, each, "float32"), [EVERYONE] * 2) for each in (None, workers)]
    assert identical(*ends)


def apply(function: Callable[..., Tree], net: nn.Module, *trees: Tree, workers: int = 2, engine: Any = Pool) -> Tree:
    """A function of every client; with two workers, one of them is this process."""
    loop = start(ft.methods.FedAvg(), net, None)
    chosen = engine(loop.common, loop.train, workers) if engine is Pool else engine(loop.common, loop.train)
    result: Tree = chosen.apply(function, 1, EVERYONE, *trees)
    return result


def odd(local: ft.LocalView, own: Tree) -> Tree:
    """All kinds of leaves: a table with absent rows, a number, whole numbers, bools, nothing at all."""
    table = Rows(own["a"].expand(3, 2) * 0.1, torch.arange(3) <= local.index)
    return {"table": table, "deep": {"number": own["a"] + local.index, "whole": local.index, "yes": local.index > 1},
            "nothing": torch.zeros(0, 5), "turned": own["a"] * torch.arange(6.0).reshape(2, 3).T}  # fmt: skip


def test_every_kind_of_leaf_comes_back(net: nn.Module) -> None:
    trees = {"a": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    assert identical(apply(odd, net, trees), apply(odd, net, trees, engine=Sequential))


def test_results_stay_as_they_are_while_in_use_and_then_make_room(net: nn.Module) -> None:
    loop = start(ft.methods.FedAvg(), net, 2)

    def filled(value: float) -> Tree:
        return loop.engine.apply(lambda local: {"a": torch.full((5,), value), "b": local.index}, 1, EVERYONE)

    one, two = filled(1.0), filled(2.0)
    part = one["a"][3]
    where = one["a"].data_ptr()
    del one
    filled(3.0)
    assert part.tolist() == [1.0] * 5 and two["a"].flatten().tolist() == [2.0] * 20  # a part keeps all of it
    del part
    assert filled(4.0)["a"].data_ptr() == where


def test_names_may_change_from_round_to_round(net: nn.Module) -> None:
    """What workers gave before says how to make room for what they give next, but does not bind it."""
    loop = start(ft.methods.FedAvg(), net, 2)

    def work(local: ft.LocalView) -> Tree:
        return {f"round{local.round}": torch.ones(local.round) * local.index}

    for number in (1, 1, 2, 3, 3):
        found = loop.engine.apply(work, number, EVERYONE)
        assert found[f"round{number}"].tolist() == [[client] * number for client in EVERYONE]


def test_clients_are_shared_among_processes(net: nn.Module) -> None:
    """Each of two workers waits for the other to begin, which one process alone could not."""
    here, there = os.pipe(), os.pipe()
    home = os.getpid()

    def meet(local: ft.LocalView) -> Tree:
        if int(local.index) in (0, 2):  # the two longest; the shortest is tried here before anyone is forked
            mine, other = (here, there) if os.getpid() == home else (there, here)
            os.write(mine[1], b"!")
            os.read(other[0], 1)
        return {"process": torch.tensor(os.getpid()), "threads": torch.tensor(torch.get_num_threads())}

    found = apply(meet, net)
    for end in (*here, *there):
        os.close(end)
    assert len({int(found["process"][client]) for client in (0, 2)}) == 2
    assert found["threads"].tolist() == [1] * 4


def test_small_work_is_not_shared(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_PATIENCE", 1e9)
    found = apply(lambda local: {"process": torch.tensor(os.getpid())}, net)
    assert found["process"].tolist() == [os.getpid()] * 4


def test_threads_of_the_process_stay_its_own(net: nn.Module) -> None:
    """Also a fork after two threads have worked must not hang."""
    torch.set_num_threads(2)
    try:
        assert float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()) == 300**3
        ends = [outcome(start(ft.methods.FedAvg(), net, workers), [EVERYONE]) for workers in (None, 2)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert all(torch.allclose(a, b) for a, b in zip(*(flatten(end).values() for end in ends), strict=True))


class Sour(Exception):
    """An error of a user's own, which no pickle could carry."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"sour: {first + second}")


def failing(client: int) -> Callable[[ft.LocalView], Tree]:
    def work(local: ft.LocalView) -> Tree:
        if int(local.index) == client:
            raise Sour(client, 40)
        return {}

    return work


@pytest.mark.parametrize("client", EVERYONE)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_an_error_arrives_as_it_was_raised(client: int, workers: int, net: nn.Module) -> None:
    with pytest.raises(Sour, match=f"sour: {client + 40}") as caught:
        apply(failing(client), net, workers=workers)
    assert caught.traceback[-1].name == "work"  # with the place where it happened


def test_a_refusal_arrives_as_a_refusal(net: nn.Module) -> None:
    said = refusal(lambda: apply(lambda local: {"own": torch.zeros(int(local.size))}, net))
    assert "'own' is" in said and "of the same names, shapes and dtypes" in said
    said = refusal(lambda: apply(lambda local: {"own": torch.zeros(1, dtype=KINDS[int(local.index)])}, net))
    assert "torch.float64 for client" in said


KINDS = [torch.float32, torch.float32, torch.float64, torch.float32]


def test_a_change_in_place_is_refused_in_a_worker_too(net: nn.Module) -> None:
    def touch(local: ft.LocalView, own: Tree) -> Tree:
        return {"a": own["a"].add_(1) if int(local.index) == 0 else own["a"]}

    assert "Client 0's work changed 'a' in place" in refusal(lambda: apply(touch, net, {"a": torch.zeros(4)}))


def only_in_a_worker(act: Callable[[], object]) -> Callable[[ft.LocalView], Tree]:
    """Act in a forked process alone; this one waits until a worker is at it, so that there is one."""
    begun, home = os.pipe(), os.getpid()

    def work(local: ft.LocalView) -> Tree:
        if os.getpid() != home:
            os.write(begun[1], b"!")
            act()
        elif int(local.index) != 3:  # the shortest is tried before there are workers
            os.read(begun[0], 1)
            os.write(begun[1], b"!")  # for when this process takes the next client
        return {}

    work.ends = begun  # type: ignore[attr-defined]
    return work


def refused_in_a_worker(act: Callable[[], object], net: nn.Module) -> str:
    work = only_in_a_worker(act)
    try:
        return refusal(lambda: apply(work, net))
    finally:
        for end in work.ends:  # type: ignore[attr-defined]
            os.close(end)


def test_a_killed_worker_is_said_in_a_sentence(net: nn.Module) -> None:
    said = refused_in_a_worker(lambda: os.kill(os.getpid(), signal.SIGKILL), net)
    assert "A worker was killed while client" in said


def test_an_error_that_cannot_be_repeated_is_told(net: nn.Module) -> None:
    def lack() -> None:
        raise MemoryError("no room\nfor more")

    assert "failed on a worker but not when tried again (MemoryError: no room)" in refused_in_a_worker(lack, net)


def test_an_interrupt_ends_the_workers(net: nn.Module) -> None:
    """This process is interrupted while a worker waits for ever."""
    never, home = os.pipe(), os.getpid()

    def work(local: ft.LocalView) -> Tree:
        if os.getpid() != home:
            os.read(never[0], 1)
        elif int(local.index) != 3:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        apply(work, net)
    for end in never:
        os.close(end)


def test_an_interrupt_is_not_for_the_workers(net: nn.Module) -> None:
    """A terminal sends it to all processes; only the one that the user started answers."""
    home = os.getpid()

    def work(local: ft.LocalView) -> Tree:
        if os.getpid() != home:
            os.kill(os.getpid(), signal.SIGINT)
        return {"index": local.index}

    assert apply(work, net)["index"].tolist() == EVERYONE


def test_an_orphan_finishes_its_client_and_no_other(net: nn.Module) -> None:
    log, test = os.pipe(), os.getpid()

    def work(local: ft.LocalView) -> Tree:
        if os.getppid() == test and int(local.index) != 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.getppid() != test:
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
    done = b"".join(iter(lambda: os.read(log[0], 9), b""))  # ends when the last process has
    os.close(log[0])
    assert len(done) <= 1


def test_what_workers_print_is_seen_once(net: nn.Module, capfd: pytest.CaptureFixture[str]) -> None:
    def work(local: ft.LocalView) -> Tree:
        print(f"client {int(local.index)}\n", end="")  # one write: the capture has no buffer, so two may interleave
        return {}

    print("before")
    apply(work, net)
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == ["before", *(f"client {each}" for each in EVERYONE)]


def test_every_position_of_a_long_queue_is_taken_once() -> None:
    queue = list(range(10_000))
    tickets = Tickets.issue(queue)
    taken = list(iter(tickets.take, ()))
    tickets.close()
    assert sorted(position for positions in taken for position in positions) == queue
    assert taken[0][0] == 0  # the longest first


def test_there_is_a_worker_for_every_usable_core(net: nn.Module) -> None:
    loop = start(ft.methods.FedAvg(), net, None)
    assert Pool(loop.common, loop.train).workers == usable_cores() >= 1


def test_what_the_pool_cannot_do_is_refused(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = start(ft.methods.FedAvg(), net, None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert "beside a GPU" in refusal(lambda: Pool(loop.common, loop.train))
    monkeypatch.delattr(os, "fork")
    assert "needs os.fork" in refusal(lambda: Pool(loop.common, loop.train))
