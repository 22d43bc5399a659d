"""The loop that engines are measured against: FedAvg as a researcher would write it by hand in PyTorch.

One resident network and optimiser, samples on the device once as prepared floats, batches by index, no number read
back during a round, a running weighted average of the clients' models.
"""

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.machine import torch_threads
from works import Work


@dataclass(frozen=True, eq=False)
class HandWritten:
    """FedAvg, client after client; `shared` is the server's model and changes with every round."""

    net: nn.Module
    optimiser: torch.optim.Optimizer  # plain SGD keeps nothing between clients, so one serves all
    shared: dict[str, Tensor]
    x: Tensor
    y: Tensor
    train: list[Tensor]  # positions of every client's samples
    batch_size: int
    epochs: int

    @classmethod
    def build(
        cls, model: ft.Model, fed: ft.Federation, batch_size: int, epochs: int, lr: float, device: torch.device
    ) -> "HandWritten":
        assert model.build is not None and isinstance(fed.x, Tensor), "the loop takes a named network and one input"
        net = model.build().to(device).train()
        x = fed.preparation(torch.float32, device)(fed.x.to(device))
        assert isinstance(x, Tensor)
        train = [own.to(device) for own in fed.train]
        shared = {name: value.clone() for name, value in net.state_dict().items()}
        optimiser = torch.optim.SGD(net.parameters(), lr=lr)
        return cls(net, optimiser, shared, x, fed.y.to(device), train, batch_size, epochs)

    def round(self, clients: int) -> None:
        """The first so many train from the shared model, which becomes their average, weighted by samples."""
        train = self.train[:clients]
        total = sum(len(own) for own in train)
        average = {name: torch.zeros_like(value) for name, value in self.shared.items()}
        for own in train:
            self.net.load_state_dict(self.shared)
            self._train(own)
            for name, value in self.net.state_dict().items():
                average[name].add_(value, alpha=len(own) / total)
        self.shared.update(average)

    def _train(self, own: Tensor) -> None:
        for _ in range(self.epochs):
            order = own[torch.randperm(len(own), device=own.device)]
            for batch in torch.split(order, self.batch_size):
                self.optimiser.zero_grad(set_to_none=True)
                loss = nn.functional.cross_entropy(self.net(self.x[batch]), self.y[batch])
                torch.autograd.backward(loss)
                self.optimiser.step()


class Apart:
    """The loop in a process of its own, which does a round when asked."""

    def __init__(self, work: Work, lr: float, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, work, lr, device), daemon=True)
        self._process.start()

    def __enter__(self) -> "Apart":
        return self

    def __exit__(self, *_: object) -> None:
        self._here.send(None)
        self._process.join()

    def seconds(self, threads: int, clients: int) -> float:
        """A round of the first so many clients with so many threads."""
        self._here.send((threads, clients))
        return float(self._here.recv())


def _serve(asked: Connection, work: Work, lr: float, device: str) -> None:
    fed = work.federation()
    loop = HandWritten.build(work.model(fed), fed, work.batch_size, work.epochs, lr, torch.device(device))
    while (asking := asked.recv()) is not None:
        threads, clients = asking
        with torch_threads(threads):
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            loop.round(clients)
            if device == "cuda":
                torch.cuda.synchronize()
            asked.send(time.perf_counter() - started)
