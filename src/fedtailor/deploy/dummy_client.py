"""A client with random data, from which both sides know the structure of an upload before a client sends one."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fedtailor.core.method import Setup
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, flatten, repeat
from fedtailor.experiments.deployment import Deployment
from fedtailor.training.channel.payload import mask_absent_rows
from fedtailor.training.client_update import client_update, initial_model, make_shared_context
from fedtailor.training.engines.sequential import Sequential
from fedtailor.training.sample_index import SampleIndex

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a message or an upload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def single_client_index(samples: Tensor, client: int, device: torch.device) -> SampleIndex:
    """Return the index of one client's samples; the clients before it have none on this machine."""
    return SampleIndex([samples.new_empty(0)] * client + [samples], device)


def dummy_upload(deployment: Deployment, model: Model, params: Params, sizes: Tensor, number: int, sent: Tree) -> Tree:
    """Return what a client with a few random samples would upload after the message `sent`, as a stack of one.

    Its names, shapes, and dtypes are those of all clients.
    """
    fed = deployment.dummy_federation(deployment.seed)
    shared = make_shared_context(deployment, model, fed, sizes, deployment.num_rounds, 1.0)
    setup = Setup(model, params, len(sizes), sizes, deployment.num_rounds, deployment.seed)
    state = repeat(deployment.method.init_client(setup), 1)
    engine = Sequential(shared, single_client_index(fed.train[0], 0, _CPU))
    with torch.no_grad():
        results = engine.apply(
            lambda *args: {"upload": client_update(deployment.method, *args)["upload"]}, number, [0], state, sent
        )
        return deployment.channel.encode(mask_absent_rows(results["upload"]), sent, [0], number, b"dummy")


def preview_payload(deployment: Deployment, clients: int, num_samples: int) -> dict[str, list[TensorInfo]]:
    """Return the tensors that the server ("down") and a client ("up") send in the first round of `clients` clients."""
    model, params = initial_model(deployment.model(), deployment)
    sizes = torch.full((clients,), num_samples)
    setup = Setup(model, params, clients, sizes, deployment.num_rounds, deployment.seed)
    with torch.no_grad():
        sent = mask_absent_rows(deployment.method.send(deployment.method.init_server(setup), [0], 1))
    upload = dummy_upload(deployment, model, params, sizes, 1, sent)
    return {"down": list_tensors(sent), "up": list_tensors(upload)}


def list_tensors(stacked: Tree) -> list[TensorInfo]:
    """Return all tensors of a stack of one."""
    tensors = []
    for name, leaf in flatten(stacked).items():
        shape = tuple(leaf.shape[1:])
        dtype = str(leaf.dtype).removeprefix("torch.")
        tensors.append(TensorInfo(name, dtype, shape, prod(shape) * leaf.element_size()))
    return tensors
