"""A client that is made up: by it, both sides know what a client will send before anyone sends anything."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fedtailor.deploy.settings import Deployment
from fedtailor.engines.sequential import Sequential
from fedtailor.method import Setup
from fedtailor.model import Model
from fedtailor.samples import Samples
from fedtailor.trees import Params, Tree, flatten, repeat
from fedtailor.wire import deliver
from fedtailor.work import common_of, start_of, work

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sent:
    """A tensor that crosses."""

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int


def only(own: Tensor, index: int, device: torch.device) -> Samples:
    """The samples of one client among others whose samples are elsewhere."""
    return Samples([own.new_empty(0)] * index + [own], device)


def example_upload(
    deployment: Deployment, model: Model, params: Params, sizes: Tensor, number: int, sent: Tree
) -> Tree:
    """What a client with a few made-up samples would upload after such a message, a stack of one: names, shapes and
    dtypes are everyone's."""
    fed = deployment.inputs.examples(deployment.seed)
    common = common_of(deployment, model, fed, sizes, deployment.length, 1.0)
    setup = Setup(model, params, len(sizes), sizes, deployment.length, deployment.seed)
    state = repeat(deployment.method.init_client(setup), 1)
    engine = Sequential(common, only(fed.train[0], 0, _CPU))
    with torch.no_grad():
        made = engine.apply(lambda *own: {"upload": work(deployment.method, *own)["upload"]}, number, [0], state, sent)
        return deployment.channel.encode(deliver(made["upload"]), sent, [0], number, b"nobody's")


def preview(deployment: Deployment, clients: int, own_size: int) -> dict[str, list[Sent]]:
    """What crosses in the first round, "down" and "up", among so many clients."""
    model, params = start_of(deployment.model(), deployment)
    sizes = torch.full((clients,), own_size)
    setup = Setup(model, params, clients, sizes, deployment.length, deployment.seed)
    with torch.no_grad():
        sent = deliver(deployment.method.send(deployment.method.init_server(setup), [0], 1))
    upload = example_upload(deployment, model, params, sizes, 1, sent)
    return {"down": list_tensors(sent), "up": list_tensors(upload)}


def list_tensors(stacked: Tree) -> list[Sent]:
    """Every tensor of a stack of one."""
    found = []
    for name, leaf in flatten(stacked).items():
        shape = tuple(leaf.shape[1:])
        kind = str(leaf.dtype).removeprefix("torch.")
        found.append(Sent(name, kind, shape, prod(shape) * leaf.element_size()))
    return found
