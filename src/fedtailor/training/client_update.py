"""The client side of a round, and its inputs; used by simulated and deployed clients."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedtailor.core.batch import SharedContext, as_parts
from fedtailor.core.client_context import ClientContext
from fedtailor.core.memory_limits import fits_on_device
from fedtailor.core.method import Method
from fedtailor.core.model import Inputs, Model
from fedtailor.core.trees import Params, Tree, map_leaves
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError
from fedtailor.training.config import TrainingConfig


def client_update(method: Method, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
    """Train one client for one round.

    Returns its new `state`, its `upload`, its personal model (`trained`), and its `client_metrics` for the record.
    """
    result = method.train(ctx, state, message)
    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, dict) for part in result)):
        raise ConfigError(f"{type(method).__name__}.train must return two dicts: (state, upload).")
    state, upload = result
    return {
        "state": state,
        "upload": upload,
        "trained": method.trained(ctx, state, message, upload),
        "client_metrics": method.client_metrics(ctx, state, message, upload),
    }


def initial_model(
    model: Model, config: TrainingConfig, initial_weights: Mapping[str, Tensor] | None = None
) -> tuple[Model, Params]:
    """Return the model on its device and the initial parameters: `initial_weights`, or drawn from the run's seed."""
    device, dtype = config.torch_device, config.torch_dtype
    model = (model if initial_weights is None else model.with_initial_weights(initial_weights)).to(device, dtype)
    params = {name: p.to(device, dtype) for name, p in model.init(config.seed).items()}
    return model.with_precision(config.precision), params


def make_shared_context(
    config: TrainingConfig,
    model: Model,
    fed: Federation,
    sizes: Tensor,
    rounds: int,
    participation: float,
    largest: int | None = None,
) -> SharedContext:
    """Return the data, model, and settings that all clients of a run share.

    `fed` contains the data on this machine: all clients in a simulation, one client in a deployment. `sizes` contains
    the number of training samples of every client of the federation. `largest` is the largest number of samples on
    which a client trains, if it is not in `sizes`.
    """
    device, dtype = config.torch_device, config.torch_dtype
    config.augmentation.check(fed.shape)
    return SharedContext(
        model=model.mode(training=True),
        x=_place_inputs(fed.x, device),
        # times keep their precision, because rounding would make different ones equal
        y=fed.y.to(device, dtype) if fed.y.is_floating_point() and not fed.survival else fed.y.to(device),
        prepare=fed.make_preprocessing(dtype, device),
        batch_size=choose_batch_size(config, model, largest or int(sizes.max())),
        rounds=rounds,
        num_clients=len(sizes),
        total_size=int(sizes.sum()),
        seed=config.seed,
        dtype=dtype,
        participation=participation,
        augmentation=config.augmentation,
    )


def _place_inputs(x: Inputs, device: torch.device) -> Inputs:
    """Return inputs on the device, or unchanged on the host if they would take too much of the device's memory."""
    is_small = fits_on_device(sum(part.nbytes for part in as_parts(x).values()), device)
    target = device if is_small else torch.device("cpu")
    return map_leaves(lambda part: part.to(target).contiguous(), {"x": x})["x"]


def choose_batch_size(config: TrainingConfig, model: Model, largest: int) -> int:
    """Return the number of examples per batch, given the largest number of training samples of a client."""
    # Batch normalization cannot train on a single example, so its batches have at least two (one may be padding).
    return max(min(config.batch_size, largest), 2 if model.running_stats else 1)


def personal_state_dict(model: Model, params: Params, personal: Params) -> Params:
    """Return a personal model as a `state_dict`, or its tensors by name if its structure differs from the model's."""
    flat = {name: leaf.cpu() for name, leaf in personal.items()}
    if not params.keys() <= flat.keys():
        return flat
    return flat | model.state_dict({name: flat[name] for name in params})
