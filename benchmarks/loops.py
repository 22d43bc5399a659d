"""The baseline of the engine benchmark: FedAvg as a hand-written PyTorch loop.

The loop uses one network and one optimizer, keeps preprocessed samples on the device, selects batches by index, reads
no value back during a round, and keeps a running weighted average of the clients' models.
"""

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.core.system import torch_threads
from works import Workload


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

    @classmethod
    def build(
        cls, model: ft.Model, fed: ft.Federation, batch_size: int, epochs: int, lr: float, device: torch.device
    ) -> "HandWrittenLoop":
        assert model.build is not None and isinstance(fed.x, Tensor), (
            "the loop needs a named network and a single input"
        )
        net = model.build().to(device).train()
        x = fed.make_preprocessing(torch.float32, device)(fed.x.to(device))
        assert isinstance(x, Tensor)
        train = [indices.to(device) for indices in fed.train]
        shared = {name: value.clone() for name, value in net.state_dict().items()}
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        return cls(net, optimizer, shared, x, fed.y.to(device), train, batch_size, epochs)

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
                loss = nn.functional.cross_entropy(self.net(self.x[batch]), self.y[batch])
                torch.autograd.backward(loss)
                self.optimizer.step()


class LoopProcess:
    """The loop in a separate process, which runs a round on request."""

    def __init__(self, workload: Workload, lr: float, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, workload, lr, device), daemon=True)
        self._process.start()

    def __enter__(self) -> "LoopProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.send(None)
        self._process.join()

    def seconds(self, threads: int, clients: int) -> float:
        """Return the seconds of a round of the first `clients` clients with this number of threads."""
        self._connection.send((threads, clients))
        return float(self._connection.recv())


def _serve(connection: Connection, workload: Workload, lr: float, device: str) -> None:
    fed = workload.federation()
    model = workload.model(fed)
    loop = HandWrittenLoop.build(model, fed, workload.batch_size, workload.epochs, lr, torch.device(device))
    while (request := connection.recv()) is not None:
        threads, clients = request
        with torch_threads(threads):
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            loop.round(clients)
            if device == "cuda":
                torch.cuda.synchronize()
            connection.send(time.perf_counter() - started)
