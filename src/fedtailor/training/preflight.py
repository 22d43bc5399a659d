"""Checks before round 1: the model fits the data and is deterministic; the cost of a step sets threads and chunks."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.core.attention_layers import MultiheadAttention
from fedtailor.core.batch import SharedContext, as_parts, take_samples
from fedtailor.core.dropout import FunctionalDropout, batch_key
from fedtailor.core.model import Inputs, Model
from fedtailor.core.recurrent_layers import Recurrent
from fedtailor.core.system import machine_cores, total_memory
from fedtailor.core.trees import Params
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, FedTailorError, reason

_SMALL_STEP = 2.5e7  # multiplications: about a millisecond on one thread
_COPIES = 8  # of weights and activations during a step: values, gradients, and tensors saved for backward


def check_model_fits(model: Model, params: Params, shared: SharedContext, fed: Federation) -> torch.Size:
    """Run the model on the first client's first sample, and raise `ConfigError` if it does not fit the data.

    Returns the shape of the output for one sample.
    """
    sample = fed.train[0][:1].to(shared.y.device)
    inputs, targets = shared.prepare(take_samples(shared.x, sample)), shared.y[sample]
    is_classification = model.is_classifier
    try:
        outputs = model.logits(params, inputs)
        targets = targets.clamp(max=outputs.shape[1] - 1) if is_classification else targets
        losses = model.losses(outputs, targets)
    except FedTailorError:
        raise
    except Exception as error:  # a user's module may raise anything
        shape = fed.shape if fed.shape is not None else {name: tuple(part.shape[1:]) for name, part in fed.x.items()}
        numbers = "" if _are_floats(inputs) else " If these integers are numbers, not tokens, convert them to float32."
        lower = " If it works in float32, remove the setting precision." if model.precision == "bf16" else ""
        raise ConfigError(
            f"The model fails on client {fed.names[0]}'s inputs of shape {shape}: {reason(error)}.{numbers or lower}"
        ) from error
    if losses.shape != (1,):
        actual = "a scalar" if losses.ndim == 0 else f"the shape {tuple(losses.shape)} for one example"
        raise ConfigError(f"The loss must return one value per example, got {actual}. Use reduction='none'.")
    too_large = fed.y >= outputs.shape[1] if is_classification else torch.zeros(1, dtype=torch.bool)
    if bool(too_large.any()):
        owner = fed.find_owner(too_large)
        raise ConfigError(f"{owner} has labels beyond the model's {outputs.shape[1]} outputs; add outputs.")
    _check_deterministic(shared, params, torch.cat([sample, sample]))
    return outputs.shape[1:]


def _are_floats(inputs: Inputs) -> bool:
    return all(part.is_floating_point() for part in as_parts(inputs).values())


def _check_deterministic(shared: SharedContext, params: Params, samples: Tensor) -> None:
    """Raise `ConfigError` if the model's forward draws from torch's generators or changes its buffers."""
    module = shared.model.module
    batch_key.set(0)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=[]), FunctionalDropout():
        states = _generator_states()
        shared.model.logits(params, shared.prepare(take_samples(shared.x, samples)))
        if not all(torch.equal(before, after) for before, after in zip(states, _generator_states(), strict=True)):
            raise ConfigError(
                "The model's forward draws random numbers, which makes runs irreproducible; use nn.Dropout layers."
            )
    for name, buffer in module.named_buffers():
        if not torch.equal(buffers[name], buffer):
            raise ConfigError(
                f"The model's forward changes its buffer '{name}', which all clients share; remove that buffer."
            )


def find_dropout_calls(shared: SharedContext, params: Params) -> SharedContext:
    """Return the context with `calls_dropout` of its model: whether the code of the network calls `F.dropout`, or
    attention with dropout, instead of layers. Replacing such calls slows down all others, so other models skip it.
    """
    batch_key.set(0)
    rows = torch.tensor([0, 0], device=shared.y.device)  # two samples, because of batch normalization
    with FunctionalDropout() as found:
        shared.model.logits(params, shared.prepare(take_samples(shared.x, rows)))
    return replace(shared, model=replace(shared.model, calls_dropout=found.calls > 0))


def _generator_states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


@dataclass(frozen=True)
class StepCost:
    """The cost of one training step of one client."""

    multiplications: int
    memory: int  # bytes


def measure_step_cost(model: Model, params: Params, shared: SharedContext) -> StepCost:
    """Estimate the cost of a step by counting multiplications and activations of one sample.

    The result depends only on the model and the batch size, so choices based on it are reproducible.
    """
    multiplications, activations = 0, 0

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal multiplications, activations
        if isinstance(layer, Recurrent | MultiheadAttention):
            own_multiplications, own_activations = layer.count_cost(output)
            multiplications, activations = multiplications + own_multiplications, activations + own_activations
        if not isinstance(output, Tensor):
            return
        activations += output.numel()
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and not isinstance(layer, nn.Embedding):
            multiplications += output.numel() * weight[0].numel()  # linear, convolution: one row of weights per output

    hooks = [layer.register_forward_hook(count) for layer in model.module.modules()]
    first = torch.zeros(1, dtype=torch.int64, device=shared.y.device)
    model.logits(params, shared.prepare(take_samples(shared.x, first)))
    for hook in hooks:
        hook.remove()
    weights = sum(p.numel() for p in params.values())
    values = _COPIES * (weights + shared.batch_size * activations)
    # The backward pass costs twice the forward pass.
    return StepCost(3 * shared.batch_size * max(multiplications, weights), values * shared.dtype.itemsize)


def choose_num_threads(step_cost: StepCost) -> int:
    """Return 1 for small steps, which more threads slow down, by up to a hundred times on a busy machine."""
    return torch.get_num_threads() if step_cost.multiplications > _SMALL_STEP else 1


def max_concurrent_clients(step_cost: StepCost, device: torch.device) -> int:
    """Return how many clients fit into half of the device's memory in one batch (per core of a CPU), at least 1."""
    return max(1, total_memory(device) // 2 // step_cost.memory // (machine_cores() if device.type == "cpu" else 1))
