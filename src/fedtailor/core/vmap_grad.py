"""Gradients under `torch.func.vmap`, without the import of PyTorch's compiler that `torch.func.grad` needs.

`torch.func.grad` imports `torch._dynamo` at its first call, which takes a second, and it always records the backward
pass for a further derivative. Here, the backward pass is recorded only if a transform for derivatives surrounds it.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _functorch

from fedtailor.core.trees import Tree, leaves, map_leaves

_NEEDED = (  # private names, which another version of PyTorch may not have
    "_grad_increment_nesting", "_grad_decrement_nesting", "_wrap_for_grad", "_unwrap_for_grad", "get_interpreter_stack",
    "TransformType", "get_inplace_requires_grad_allowed", "set_inplace_requires_grad_allowed",
)  # fmt: skip
_HAS_ALL = all(hasattr(_functorch, name) for name in _NEEDED)


def mapped_grad(function: Callable[[Tree], Tensor], params: Tree) -> Tree:
    """Return the gradient of a scalar function with respect to a tree, as `torch.func.grad` does.

    >>> double = torch.func.vmap(lambda w: mapped_grad(lambda tree: tree["w"].square().sum(), {"w": w})["w"])
    >>> double(torch.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """
    if not _HAS_ALL:
        gradient: Tree = torch.func.grad(function)(params)
        return gradient
    is_nested = _is_differentiated()
    level = _functorch._grad_increment_nesting()
    try:
        with torch.enable_grad():
            live = map_leaves(lambda leaf: _require_grad(_functorch._wrap_for_grad(leaf, level)), params)
            inputs = [leaf for _, leaf in leaves(live) if isinstance(leaf, Tensor)]
            output = function(live)
            if not output.requires_grad:
                return map_leaves(torch.zeros_like, params)
            found = torch.autograd.grad(output, inputs, create_graph=is_nested, materialize_grads=True)
            grads = iter([_functorch._unwrap_for_grad(grad, level) for grad in found])
    finally:
        _functorch._grad_decrement_nesting()
    return map_leaves(lambda _: next(grads), params)


def _is_differentiated() -> bool:
    """Return whether a transform for derivatives (`grad`, `vjp`, `jvp`) is active."""
    stack = _functorch.get_interpreter_stack() or ()
    return any(each.key() != _functorch.TransformType.Vmap for each in stack)


def _require_grad(leaf: Tensor) -> Tensor:
    before = _functorch.get_inplace_requires_grad_allowed()
    _functorch.set_inplace_requires_grad_allowed(True)
    try:
        return leaf.requires_grad_()
    finally:
        _functorch.set_inplace_requires_grad_allowed(before)
