"""What is tried out before round 1: that model and data fit, that the model can be repeated, how many threads pay."""

from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.errors import Refused
from fedtailor.federation import Federation
from fedtailor.local import Common, pick
from fedtailor.model import Model, cross_entropy
from fedtailor.pure import batch_key
from fedtailor.trees import Params

_SMALL_STEP = 2.5e7  # products: about a millisecond of one thread


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


def useful_threads(model: Model, params: Params, common: Common) -> int:
    """One thread where a step is small: there, sharing it costs more than it gains, and a hundred times more on a busy
    machine. A function of the model and the batch alone, so that the same run gives the same bits."""
    products = 0

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal products
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and isinstance(output, Tensor):  # linear, convolution: a row of weights an output
            products += output.numel() * weight[0].numel()

    hooks = [layer.register_forward_hook(count) for layer in model.module.modules()]
    model.logits(params, common.prepare(pick(common.x, slice(0, 1))))
    for hook in hooks:
        hook.remove()
    step = 3 * common.batch_size * max(products, sum(p.numel() for p in params.values()))  # forward, and twice back
    return torch.get_num_threads() if step > _SMALL_STEP else 1
