"""Memory that forked processes share: results of worker processes, and trees that are sent to them."""

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

import torch
from torch import Tensor

from fedtailor.core.trees import Tree, cache_by_identity, flatten, map_leaves

_MAX_UNUSED = 2  # blocks: one for the results of a round, and one for the trees that are sent to workers
_ALIGNMENT = 64  # bytes
_TEXT_BYTES = 1024


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in shared memory, as it is named in a message to another process."""

    block: int
    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(eq=False)
class SharedMemory:
    """Blocks of memory that processes share which are forked after the block was made.

    A block is reused when no tensor refers to it any more, because allocating new pages takes ten times as long as
    writing to existing ones.
    """

    blocks: dict[int, mmap.mmap] = field(default_factory=dict)  # in use and unused, by number
    text: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _TEXT_BYTES))  # an error message
    _unused: list[int] = field(default_factory=list)  # the last was released last
    _starts: dict[int, int] = field(default_factory=dict)  # address of each block
    _numbers: "count[int]" = field(default_factory=count)

    def allocate(self, rows: int, tree: Tree) -> Tree:
        """Return uninitialized memory for `rows` stacked trees with the structure of `tree`."""
        sizes = [rows * leaf.nbytes for leaf in flatten(tree).values()]
        places = iter(self._places(sizes))
        return map_leaves(lambda leaf: next(places).view(leaf.dtype).view(rows, *leaf.shape), tree)

    def share(self, trees: Sequence[Tree]) -> tuple[list[Tree], list[Tensor]]:
        """Return trees of `TensorPlace`, and tensors to hold while they are used. A tensor outside of the blocks is
        copied, with its strides; a dimension that repeats the same memory is copied once."""
        flat = {id(leaf): leaf for tree in trees for leaf in flatten(tree).values() if self._block_of(leaf) is None}
        sources = [_without_repeats(leaf) for leaf in flat.values()]
        copies = self._places([source.nbytes for source in sources]) if sources else []
        shared: dict[int, Tensor] = {}
        for (key, leaf), source, copy in zip(flat.items(), sources, copies, strict=True):
            target = copy.view(leaf.dtype).as_strided(source.shape, source.stride())
            target.copy_(source)
            strides = [0 if old == 0 else new for old, new in zip(leaf.stride(), target.stride(), strict=True)]
            shared[key] = target.as_strided(leaf.shape, strides)

        def place(leaf: Tensor) -> TensorPlace:
            return self._place_of(shared.get(id(leaf), leaf))

        return [map_leaves(place, tree) for tree in trees], list(shared.values())

    def place(self, tree: Tree) -> Tree:
        """Return a tree of `TensorPlace` for a tree that is in the blocks."""
        return map_leaves(self._place_of, tree)

    def find(self, tree: Tree) -> Tree:
        """Return the tensors of a tree of `TensorPlace`, in any process that has the blocks."""

        def tensor(place: TensorPlace) -> Tensor:
            buffer = torch.frombuffer(self.blocks[place.block], dtype=torch.uint8)[place.offset :]
            usable = buffer[: len(buffer) // place.dtype.itemsize * place.dtype.itemsize]
            return usable.view(place.dtype).as_strided(place.shape, place.strides)

        return map_leaves(cache_by_identity(tensor), tree)

    def _places(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return uninitialized bytes of these sizes, all in one block."""
        ends = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        number = self._take_block(max(1, ends[-1]))
        view = memoryview(self.blocks[number])  # lives as long as any tensor that uses it
        weakref.finalize(view, self._release, number).atexit = False
        buffer = torch.frombuffer(view, dtype=torch.uint8)
        return [buffer[start : start + size] for start, size in zip(ends, sizes, strict=False)]

    def _take_block(self, size: int) -> int:
        fitting = [number for number in self._unused[::-1] if len(self.blocks[number]) >= size]
        if fitting:
            number = min(fitting, key=lambda number: len(self.blocks[number]))
            self._unused.remove(number)
            return number
        number, block = next(self._numbers), mmap.mmap(-1, size)
        self.blocks[number], self._starts[number] = block, torch.frombuffer(block, dtype=torch.uint8).data_ptr()
        return number

    def _release(self, number: int) -> None:
        self._unused.append(number)
        if len(self._unused) > _MAX_UNUSED:
            smallest = min(self._unused, key=lambda number: len(self.blocks[number]))
            self._unused.remove(smallest)
            del self.blocks[smallest], self._starts[smallest]

    def _block_of(self, leaf: Tensor) -> int | None:
        address = leaf.data_ptr()
        found = (n for n, start in self._starts.items() if start <= address < start + len(self.blocks[n]))
        return next(found, None)

    def _place_of(self, leaf: Tensor) -> TensorPlace:
        block = self._block_of(leaf)
        if block is None:  # an empty tensor has no address
            block = next(iter(self.blocks))
            return TensorPlace(block, 0, leaf.dtype, tuple(leaf.shape), leaf.stride())
        offset = leaf.data_ptr() - self._starts[block]
        return TensorPlace(block, offset, leaf.dtype, tuple(leaf.shape), leaf.stride())


def _without_repeats(leaf: Tensor) -> Tensor:
    """Return the distinct values of a tensor, in the same order in memory if they are dense."""
    for dim, (size, stride) in enumerate(zip(leaf.shape, leaf.stride(), strict=True)):
        if stride == 0 and size > 1:
            leaf = leaf.narrow(dim, 0, 1)
    spread = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)) + 1
    return leaf if spread == leaf.numel() else leaf.contiguous()
