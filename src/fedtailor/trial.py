"""What is tried out before round 1: that model and data fit, that the model can be repeated, how many threads pay."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.batch import Common, pick
from fedtailor.errors import Refused
from fedtailor.federation import Federation
from fedtailor.machine import total_memory, usable_cores
from fedtailor.model import Model, cross_entropy
from fedtailor.pure import batch_key
from fedtailor.trees import Params

_SMALL_STEP = 2.5e7  # products: about a millisecond of one thread
_COPIES = 8  # of weights and activations while a step is in work: values, slopes, what is kept for the way back


def check_fit(model: Model, params: Params, common: Common, fed: Federation) -> None:
    """Try the model on the first client's first sample, so that what does not fit is said before round 1."""
    mine = fed.train[0][:1].to(common.y.device)
    first, targets = common.prepare(pick(common.x, mine)), common.y[mine]
    classify = model.loss is cross_entropy
    try:
        outputs = model.logits(params, first)
        losses = model.loss(outputs, targets.clamp(max=outputs.shape[1] - 1) if classify else targets)
    except Refused:
        raise
    except Exception as error:  # whatever a user's module raises is the reason to tell
        shape = fed.shape if fed.shape is not None else {name: tuple(part.shape[1:]) for name, part in fed.x.items()}
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise Refused(f"The model does not take client {fed.names[0]}'s inputs, {shape}: {reason}.") from error
    if losses.shape != (1,):
        raise Refused(f"The loss must give one number an example, not the shape {tuple(losses.shape)}.")
    beyond = fed.y >= outputs.shape[1] if classify else torch.zeros(1, dtype=torch.bool)
    if bool(beyond.any()):
        raise Refused(f"Client {fed.owner(beyond)} has labels beyond the model's {outputs.shape[1]} outputs.")
    _check_purity(common, params, torch.cat([mine, mine]))


def _check_purity(common: Common, params: Params, samples: Tensor) -> None:
    """A module that draws from torch's generator or changes its buffers cannot be repeated: refuse it."""
    module = common.model.module
    batch_key.set(0)
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        drawn = _generators()
        common.model.logits(params, common.prepare(pick(common.x, samples)))
        if not all(torch.equal(before, after) for before, after in zip(drawn, _generators(), strict=True)):
            raise Refused("The model's forward draws random numbers, which cannot be repeated; use nn.Dropout layers.")
    for name, buffer in module.named_buffers():
        if not torch.equal(kept[name], buffer):
            raise Refused(f"The model's forward changes its buffer '{name}', which clients would share; leave it out.")


def _generators() -> list[Tensor]:
    """The states of torch's own generators."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


@dataclass(frozen=True)
class Effort:
    """What a step of one client takes."""

    products: int  # multiplications
    memory: int  # bytes


def effort_of(model: Model, params: Params, common: Common) -> Effort:
    """Counted on one sample. A function of the model and the batch alone, so that what is made to depend on it is the
    same in the same run."""
    products, outputs = 0, 0

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal products, outputs
        if not isinstance(output, Tensor):
            return
        outputs += output.numel()
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor):  # linear, convolution: a row of weights an output
            products += output.numel() * weight[0].numel()

    hooks = [layer.register_forward_hook(count) for layer in model.module.modules()]
    model.logits(params, common.prepare(pick(common.x, slice(0, 1))))
    for hook in hooks:
        hook.remove()
    weights = sum(p.numel() for p in params.values())
    numbers = _COPIES * (weights + common.batch_size * outputs)
    # forward, and twice back
    return Effort(3 * common.batch_size * max(products, weights), numbers * common.dtype.itemsize)


def useful_threads(effort: Effort) -> int:
    """One thread where a step is small: there, sharing it costs more than it gains, and a hundred times more on a busy
    machine."""
    return torch.get_num_threads() if effort.products > _SMALL_STEP else 1


def most_at_once(effort: Effort, device: torch.device) -> int:
    """How many clients may train at once in half of the device's memory, on each core of a CPU; at least one."""
    return max(1, total_memory(device) // 2 // effort.memory // (1 if device.type == "cuda" else usable_cores()))
