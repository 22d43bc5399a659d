"""The parameters of convolutions and group normalizations."""

from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """The parameters of a convolution except its tensors."""

    size: Pair  # height and width of the input
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    biased: bool
    algorithm: str | None = None  # forced algorithm; None: chosen by device and sizes

    @property
    def out(self) -> Pair:
        """Height and width of the output.

        >>> Geometry((28, 28), (5, 5), (1, 1), (0, 0), (1, 1), 1, True).out
        (24, 24)
        """
        height, width = (
            (self.size[i] + 2 * self.padding[i] - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[i] + 1
            for i in range(2)
        )
        return height, width


@dataclass(frozen=True)
class Normalization:
    """What the fused operation computes: x normalized in groups, plus a residual if there is one, and ReLU of it."""

    groups: int
    eps: float
    relu: bool = False
    residual: bool = False
