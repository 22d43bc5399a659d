"""The channel for uploads: clipped, noisy, thinned out, quantised. Methods do not know it.

client: change since what was sent → clip → noise → top → quantise     server: read → (trusted: clip → noise) → add
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import isfinite, sqrt
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fedtailor.coding import Form, beside, code, is_coded, is_readable, read
from fedtailor.errors import Refused
from fedtailor.method import Method
from fedtailor.privacy import Seed, epsilon, gaussian, require_accountant
from fedtailor.trees import Rows, Tree, leaves
from fedtailor.wire import deliver

_FORMS = ("none", "float16", "int8")


@dataclass(frozen=True)
class Channel:
    """What happens to uploads on their way; by default nothing.

    Clients are stacked on the leading axis, and each is coded by itself: one client alone is a stack of one.

    >>> channel, sent, uploads = Channel(clip=1.0), {"w": torch.zeros(1, 2)}, {"w": torch.tensor([[3.0, 4.0]])}
    >>> channel.decode(channel.encode(uploads, sent, [0], round=1, seed=0), sent, [0], round=1, seed=0)["w"]
    tensor([[0.6000, 0.8000]])
    """

    clip: float | None = None  # C, most that an upload's change may measure (L2 norm); none: any
    noise: float = 0.0  # z, deviation of Gaussian noise, in C: for privacy; 0: none
    delta: float = 1e-5  # δ, the chance for which the ε in the record does not hold
    trusted: bool = False  # the server adds noise z·C to the sum of a round; false: every client adds it to its upload
    top: float = 1.0  # share of every tensor that is sent, what changed most; 1: all
    quantise: Form = "none"  # how numbers are written: none (as they are), float16 or int8

    def __post_init__(self) -> None:
        def is_number(value: Any) -> bool:
            return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)

        refusals = [
            ("clip", self.clip is None or (is_number(self.clip) and self.clip > 0), "a number above 0, or none"),
            ("noise", is_number(self.noise) and self.noise >= 0, "a number from 0 on"),
            ("delta", is_number(self.delta) and 0 < self.delta < 1, "a number between 0 and 1"),
            ("trusted", isinstance(self.trusted, bool), "true or false"),
            ("top", is_number(self.top) and 0 < self.top <= 1, "a share above 0 and at most 1"),
            ("quantise", self.quantise in _FORMS, f"one of {', '.join(_FORMS)}"),
        ]
        for name, holds, words in refusals:
            if not holds:
                raise Refused(f"channel.{name} must be {words}, not {getattr(self, name)!r}.")
        if self.noise and self.clip is None:
            raise Refused("channel.noise is measured in channel.clip, the most one upload may change; set that too.")
        if self.trusted and not self.noise:
            raise Refused("channel.trusted says who adds the noise, and there is none; set channel.noise too.")

    @property
    def plain(self) -> bool:
        """Whether uploads arrive as they are."""
        return self.clip is None and self.top == 1 and self.quantise == "none"

    def check(self, method: Method) -> None:
        """Refuse a method for which this makes no sense."""
        if self.noise:
            require_accountant()
        if self.trusted and not method.plain_mean:
            values = {f.name: getattr(method, f.name) for f in fields(method)}
            could = "weights" in values and type(method)(**values | {"weights": "uniform"}).plain_mean
            what = "set its weights to 'uniform'" if could else "leave channel.trusted false"
            raise Refused(
                f"With channel.trusted only the plain mean of uploads is private, and {type(method).__name__} makes "
                f"another use of them; {what}."
            )

    def encode(self, uploads: Tree, sent: Tree, clients: Sequence[int], round: int, seed: Seed) -> Tree:
        """What crosses, stacked, for clients that were sent this: its bytes are what is counted."""
        if self.plain:
            return uploads
        if self.noise:
            _check_can_be_private(uploads)
        changes = self._clip(_visit(_change, uploads, sent))
        if self.noise and not self.trusted:
            changes = _add_noise(changes, self.noise * self._most, clients, round, seed)
        if self.top < 1:
            _check_can_be_thinned(uploads, sent)
        return _visit(self._code, changes, sent)

    def misfit(self, encoded: Tree, sent: Tree) -> str | None:
        """Where uploads of the right names and shapes are still nothing that `encode` writes, as somebody else's may
        be."""
        found: list[str] = []

        def look(path: str, node: Any, own: Any) -> Any:
            before = _numbers(own)
            if is_coded(node) and not is_readable(node, 0 if before is None else before[0].numel()):
                found.append(path)
            return node

        _visit(look, encoded, sent)
        return found[0] if found else None

    def decode(self, encoded: Tree, sent: Tree, clients: Sequence[int], round: int, seed: Seed) -> Tree:
        """The uploads as the server reads them."""
        if self.plain:
            return encoded
        usual = _usual_dtype(sent)
        changes = _visit(lambda _, node, own: _read(node, own, usual), encoded, sent)
        if self.trusted:  # last of all: of what a code makes of noisy uploads, the sum would not be as private
            changes = self._clip(changes)
            changes = _add_noise(changes, self.noise * self._most / sqrt(len(clients)), clients, round, seed)
        return _visit(_restore, changes, sent)

    def note(self, uploads: Tree, sent: Tree) -> Tree:
        """One number a client for the record, never sent: where there is a limit, how large the change was before."""
        norms = None if self.clip is None else _norms(_visit(_change, uploads, sent))
        return {} if norms is None else {"change_norm": norms}

    def spent(self, most: int) -> dict[str, Any]:
        """What the record says of a round: the privacy spent so far (`epsilon`), where there is noise, of the client
        most of whose uploads arrived."""
        return {"epsilon": epsilon(self.noise, most, self.delta)} if self.noise else {}

    @property
    def _most(self) -> float:
        """C."""
        return float("inf") if self.clip is None else self.clip

    def _clip(self, changes: Tree) -> Tree:
        """Every client's change at no more than C, in its direction."""
        norms = None if self.clip is None else _norms(changes)
        if norms is None:
            return changes
        factors = (self._most / norms).clamp(max=1)
        return _visit(lambda _, leaf, __: _of_values(lambda v: v * beside(factors.to(v.dtype), v), leaf), changes, {})

    def _code(self, path: str, change: Any, sent: Any) -> Any:
        numbers = _numbers(change)
        if numbers is None or not numbers.numel():
            return change
        return code(change, self.top if _reference(change, sent) is not None else 1.0, self.quantise)


def _visit(function: Callable[[str, Any, Any], Any], tree: Tree, other: Any, path: str = "") -> Tree:
    """function(path, leaf, what stands there in the other tree, if anything does) of every leaf, coded or not."""

    def visit(name: str, node: Any) -> Any:
        own = other.get(name) if isinstance(other, dict) else None
        if isinstance(node, dict) and not is_coded(node):
            return _visit(function, node, own, f"{path}{name}/")
        return function(f"{path}{name}", node, own)

    return {name: visit(name, node) for name, node in tree.items()}


def _numbers(leaf: Any) -> Tensor | None:
    """The real numbers of a leaf; whole numbers and bools are none."""
    values = leaf.values if isinstance(leaf, Rows) else leaf
    return values if isinstance(values, Tensor) and values.is_floating_point() else None


def _of_values(function: Callable[[Tensor], Tensor], leaf: Tensor | Rows) -> Tensor | Rows:
    """A leaf with a function of its real numbers; absent rows stay zeros, whole numbers and bools as they are."""
    numbers = _numbers(leaf)
    if numbers is None:
        return leaf
    if not isinstance(leaf, Rows):
        return function(numbers)
    rows: Rows = deliver({"rows": Rows(function(numbers), leaf.present)})["rows"]
    return rows


def _reference(leaf: Tensor | Rows, sent: Any) -> Tensor | None:
    """What the client was sent under the same name, if it is alike: the same thing before training."""
    numbers, before = _numbers(leaf), _numbers(sent)
    if numbers is None or before is None or isinstance(leaf, Rows) != isinstance(sent, Rows):
        return None
    return before if before.shape == numbers.shape else None


def _change(path: str, leaf: Tensor | Rows, sent: Any) -> Tensor | Rows:
    """What training changed; what was not sent, as it is."""
    before = _reference(leaf, sent)
    return leaf if before is None else _of_values(lambda values: values - before, leaf)


def _restore(path: str, change: Tensor | Rows, sent: Any) -> Tensor | Rows:
    """What was sent, and the change. A variance that a rough code made negative is 0."""
    before = _reference(change, sent)
    if before is None:
        return change
    after = _of_values(lambda values: before + values, change)
    return _of_values(torch.relu, after) if _is_variance(path) else after


def _read(node: Any, sent: Any, usual: torch.dtype) -> Any:
    """A leaf as it was before it was coded; its shape is that of what was sent, if some of it was left out."""
    if not is_coded(node):
        return node
    before = _numbers(sent)
    if before is None:
        return read(node, torch.Size(), usual)
    return read(node, before.shape, before.dtype)


def _usual_dtype(sent: Tree) -> torch.dtype:
    """The dtype of a run, by what was sent in it."""
    dtypes = [numbers.dtype for _, leaf in leaves(sent) if (numbers := _numbers(leaf)) is not None]
    return dtypes[0] if dtypes else torch.get_default_dtype()


def _norms(changes: Tree) -> Tensor | None:
    """The L2 norm of every client's change over all its tensors; None where there are no numbers."""
    found = [numbers for _, leaf in leaves(changes) if (numbers := _numbers(leaf)) is not None]
    norms = [torch.linalg.vector_norm(n.reshape(len(n), -1), dim=1, dtype=torch.float64) for n in found if n.numel()]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0) if norms else None


def _add_noise(changes: Tree, deviation: float, clients: Sequence[int], round: int, seed: Seed) -> Tree:
    def add(path: str, leaf: Tensor, _: Any) -> Tensor:
        return leaf + deviation * gaussian(leaf, clients, path, round, seed)

    return _visit(add, changes, {})


def _is_variance(path: str) -> bool:
    """Whether these are running variances of batch normalisation, by the name PyTorch gives them."""
    return path.rpartition("/")[2].rpartition(".")[2] == "running_var"


def _check_can_be_private(uploads: Tree) -> None:
    """Noise hides how large real numbers are, and nothing else."""
    for path, leaf in leaves(uploads):
        if isinstance(leaf, Rows):
            why = "which of its rows are there tells of the client's data"
        elif not leaf.is_floating_point():
            why = "it holds whole numbers or yes and no"
        elif _is_variance(path):
            raise Refused(
                f"Noise would make '{path}', a variance, negative; take a network without batch normalisation "
                "(network.norm='group'), or FedBN, which keeps it."
            )
        else:
            continue
        raise Refused(f"Noise cannot make the upload's '{path}' private, for {why}; take another method, or no noise.")


def _check_can_be_thinned(uploads: Tree, sent: Tree) -> None:
    """What was not sent cannot stay at it: a change of the client's own state that is left out is lost for good."""
    thinned: list[str] = []

    def find(path: str, leaf: Any, own: Any) -> Any:
        if not isinstance(leaf, Rows) and _reference(leaf, own) is not None:
            thinned.append(path)
        return leaf

    _visit(find, uploads, sent)
    if not thinned and any(True for _ in leaves(uploads)):
        raise Refused(
            "channel.top leaves numbers at what was sent, and no tensor of these uploads was sent under the same name; "
            "take channel.quantise instead."
        )
