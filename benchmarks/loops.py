"""The baseline of the engine benchmark: FedAvg as a hand-written PyTorch loop.

The loop uses one network and one optimizer, keeps preprocessed samples on the device, selects batches by index, reads
no value back during a round, and keeps a running weighted average of the clients' models. `LoopStyle` says what else a
user might do to make it fast.
"""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.core.system import torch_threads
from works import Workload


@dataclass(frozen=True)
class LoopStyle:
    """How a loop computes; the default is plain float32."""

    bf16: bool = False  # autocast to bfloat16
    channels_last: bool = False  # memory format of images and convolutions
    compiled: bool = False  # torch.compile of forward and loss

    def __str__(self) -> str:
        parts = ["bf16" if self.bf16 else "float32", "channels last" * self.channels_last, "compiled" * self.compiled]
        return ", ".join(filter(None, parts))


PLAIN = LoopStyle()


@dataclass(frozen=True, eq=False)
class HandWrittenLoop:
    """FedAvg, one client after another; `shared` is the server's model, which every round updates."""

    net: nn.Module
    optimizer: torch.optim.Optimizer  # SGD without momentum is stateless, so all clients can use it
    shared: dict[str, Tensor]
    x: Tensor
    y: Tensor
    train: list[Tensor]  # sample indices of each client
    batch_size: int
    epochs: int
    style: LoopStyle = PLAIN

    @classmethod
    def build(
        cls, model: ft.Model, fed: ft.Federation, workload: Workload, lr: float, device: torch.device, style: LoopStyle
    ) -> "HandWrittenLoop":
        assert model.build is not None and isinstance(fed.x, Tensor), (
            "the loop needs a named network and a single input"
        )
        net = model.build().to(device).train()
        x = fed.make_preprocessing(torch.float32, device)(fed.x.to(device))
        assert isinstance(x, Tensor)
        if style.channels_last:
            net, x = net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]
        train = [indices.to(device) for indices in fed.train]
        shared = {name: value.clone() for name, value in net.state_dict().items()}
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        y, batch_size, epochs = fed.y.to(device), workload.batch_size, workload.epochs
        return cls(net, optimizer, shared, x, y, train, batch_size, epochs, style)

    def round(self, clients: int) -> None:
        """Train the first `clients` clients and replace the shared model by their average, weighted by samples."""
        train = self.train[:clients]
        total = sum(len(indices) for indices in train)
        average = {name: torch.zeros_like(value) for name, value in self.shared.items()}
        for indices in train:
            self.net.load_state_dict(self.shared)
            self._train(indices)
            for name, value in self.net.state_dict().items():
                average[name].add_(value, alpha=len(indices) / total)
        self.shared.update(average)

    def _train(self, indices: Tensor) -> None:
        for _ in range(self.epochs):
            order = indices[torch.randperm(len(indices), device=indices.device)]
            for batch in torch.split(order, self.batch_size):
                self.optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(self._loss(self.x[batch], self.y[batch]))
                self.optimizer.step()

    @cached_property
    def _loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.style.bf16):
                outputs = self.net(x)
            return nn.functional.cross_entropy(outputs.float(), y)

        return torch.compile(loss, dynamic=False) if self.style.compiled else loss


class LoopProcess:
    """The loop in a separate process, which runs a round on request."""

    def __init__(self, workload: Workload, lr: float, device: str, style: LoopStyle = PLAIN) -> None:
        context = multiprocessing.get_context("spawn")
        self.processor = 0.0  # seconds of the processor in the last round
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, workload, lr, device, style), daemon=True)
        self._process.start()

    def __enter__(self) -> "LoopProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.send(None)
        self._process.join()

    def seconds(self, threads: int, clients: int) -> float:
        """Return the seconds of a round of the first `clients` clients with this number of threads."""
        self._connection.send((threads, clients))
        taken, self.processor = self._connection.recv()
        return float(taken)


def _serve(connection: Connection, workload: Workload, lr: float, device: str, style: LoopStyle) -> None:
    fed = workload.federation()
    model = workload.model(fed)
    loop = HandWrittenLoop.build(model, fed, workload, lr, torch.device(device), style)
    while (request := connection.recv()) is not None:
        threads, clients = request
        with torch_threads(threads):
            if device == "cuda":
                torch.cuda.synchronize()
            started, processor = time.perf_counter(), time.thread_time()
            loop.round(clients)
            if device == "cuda":
                torch.cuda.synchronize()
            connection.send((time.perf_counter() - started, time.thread_time() - processor))
