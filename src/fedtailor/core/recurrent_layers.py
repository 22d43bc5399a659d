"""Recurrent layers from linear operations, which `torch.func.vmap` supports, unlike the kernels of PyTorch."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fedtailor.core.dropout import Dropout
from fedtailor.core.precision import to_float32
from fedtailor.core.vmap_context import is_transformed
from fedtailor.errors import ConfigError

State = tuple[Tensor, ...]  # of a layer: (hidden,), or (hidden, cell) of an LSTM
Weights = dict[str, Tensor | None]  # of one direction of one layer: weight_ih, weight_hh, bias_ih, bias_hh, weight_hr
Cell = Callable[[Tensor, State, Weights], State]  # (input gates, state, weights) -> new state

_KERNELS = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}
_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


def _lstm_cell(gates: Tensor, state: State, weights: Weights) -> State:
    hidden, cell = state
    gates = gates + _from_hidden(hidden, weights)
    width = cell.shape[-1]
    in_and_forget, candidate, out = torch.split(gates, [2 * width, width, width], -1)
    keep, forget = in_and_forget.sigmoid().chunk(2, -1)
    cell = forget * cell + keep * candidate.tanh()
    hidden = out.sigmoid() * cell.tanh()
    projection = weights["weight_hr"]
    return (hidden if projection is None else F.linear(hidden, projection)), cell


def _gru_cell(gates: Tensor, state: State, weights: Weights) -> State:
    (hidden,) = state
    width = hidden.shape[-1]
    (from_input, new_input), (from_hidden, new_hidden) = (
        torch.split(part, [2 * width, width], -1) for part in (gates, _from_hidden(hidden, weights))
    )
    reset, update = (from_input + from_hidden).sigmoid().chunk(2, -1)
    new = (new_input + reset * new_hidden).tanh()
    return (new + update * (hidden - new),)


def _tanh_cell(gates: Tensor, state: State, weights: Weights) -> State:
    return ((gates + _from_hidden(state[0], weights)).tanh(),)


def _relu_cell(gates: Tensor, state: State, weights: Weights) -> State:
    return ((gates + _from_hidden(state[0], weights)).relu(),)


def _from_hidden(hidden: Tensor, weights: Weights) -> Tensor:
    return F.linear(hidden, cast(Tensor, weights["weight_hh"]), weights["bias_hh"])


_CELLS: dict[str, Cell] = {"LSTM": _lstm_cell, "GRU": _gru_cell, "RNN_TANH": _tanh_cell, "RNN_RELU": _relu_cell}


class Recurrent(nn.RNNBase):
    """The forward pass of all recurrent layers; `between` is the dropout between layers, if there is any."""

    between: Dropout | None

    def forward(self, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            raise ConfigError(
                f"{type(self).__name__} does not take a PackedSequence, whose shape depends on the data; pass padded "
                "sequences, and select the outputs at each sequence's length."
            )
        batch_axis = 0 if self.batch_first and input.ndim == 3 else 1
        is_batched = input.ndim == 3
        x = input.transpose(0, 1) if batch_axis == 0 else input if is_batched else input.unsqueeze(1)
        initial = self._initial_state(x, hx, is_batched)
        outputs, final = self._run_layers(x, initial)
        outputs = outputs.transpose(0, 1) if batch_axis == 0 else outputs if is_batched else outputs.squeeze(1)
        states = tuple(part if is_batched else part.squeeze(1) for part in final)
        return outputs, states if self.mode == "LSTM" else states[0]

    def flatten_parameters(self) -> None:
        """Do nothing: only the kernel for GPUs, which is not used, needs weights in one block of memory."""

    def _initial_state(self, x: Tensor, hx: Any, is_batched: bool) -> State:
        """Return the initial states of all layers and directions: [layers × directions, batch, width]."""
        if hx is not None:
            given = hx if self.mode == "LSTM" else (hx,)
            return tuple(part if is_batched else part.unsqueeze(1) for part in given)
        rows = self.num_layers * (2 if self.bidirectional else 1)
        widths = (self.proj_size or self.hidden_size, self.hidden_size)[: 2 if self.mode == "LSTM" else 1]
        return tuple(to_float32(x.new_zeros(rows, x.shape[1], width)) for width in widths)  # sums over time

    def _run_layers(self, x: Tensor, initial: State) -> tuple[Tensor, State]:
        """Return the outputs of the last layer for all time steps, and the final states of all layers."""
        run, finals, directions = self._choose_kernel(x), [], 2 if self.bidirectional else 1
        for layer in range(self.num_layers):
            if layer and self.between is not None:
                x = self.between(x)
            rows = slice(layer * directions, (layer + 1) * directions)
            x, final = run(x, tuple(part[rows] for part in initial), layer)
            finals.append(final)
        return x, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))

    def _choose_kernel(self, x: Tensor) -> Callable[[Tensor, State, int], tuple[Tensor, State]]:
        """Return PyTorch's kernel on a CPU, which is two to five times as fast, unless a transform is active.

        On a GPU, that kernel has no second derivative and rounds to TF32. In bfloat16, it rounds the cell state.
        """
        is_plain = x.device.type == "cpu" and not is_transformed() and not torch.compiler.is_exporting()
        return self._run_kernel if is_plain and not torch.is_autocast_enabled("cpu") else self._run_cells

    def _run_kernel(self, x: Tensor, state: State, layer: int) -> tuple[Tensor, State]:
        """Run one layer in PyTorch's kernel."""
        weights = [w for own in self._weights_of(layer) for w in own.values() if w is not None]
        hidden = state if self.mode == "LSTM" else state[0]
        kernel: Any = _KERNELS[self.mode]
        outputs, *final = kernel(x, hidden, weights, self.bias, 1, 0.0, self.training, self.bidirectional, False)
        return outputs, tuple(final)

    def _run_cells(self, x: Tensor, state: State, layer: int) -> tuple[Tensor, State]:
        """Run one layer with one cell per time step."""
        cell, outputs, finals = _CELLS[self.mode], [], []
        for row, weights in enumerate(self._weights_of(layer)):
            current, hidden = tuple(part[row] for part in state), []
            gates = F.linear(x, cast(Tensor, weights["weight_ih"]), weights["bias_ih"]).unbind()
            for step in gates[::-1] if row else gates:
                current = cell(step, current, weights)
                hidden.append(current[0])
            outputs.append(torch.stack(hidden[::-1] if row else hidden))
            finals.append(current)
        return torch.cat(outputs, -1), tuple(torch.stack(parts) for parts in zip(*finals, strict=True))

    def _weights_of(self, layer: int) -> list[Weights]:
        """Return the weights of a layer, for each direction."""
        suffixes = [f"_l{layer}", f"_l{layer}_reverse"][: 2 if self.bidirectional else 1]
        return [{name: getattr(self, name + suffix, None) for name in _NAMES} for suffix in suffixes]

    def count_cost(self, output: tuple[Tensor, Any]) -> tuple[int, int]:
        """Return the multiplications and the stored values of a forward pass with this output."""
        outputs = output[0]
        rows = outputs.numel() // outputs.shape[-1]  # time steps × samples
        weights = [w for layer in range(self.num_layers) for own in self._weights_of(layer) for w in own.values()]
        matrices = [w for w in weights if w is not None and w.ndim == 2]
        return rows * sum(w.numel() for w in matrices), 2 * rows * sum(len(w) for w in matrices)


class LSTM(Recurrent, nn.LSTM):
    """An `nn.LSTM` that runs under vmap."""


class GRU(Recurrent, nn.GRU):
    """An `nn.GRU` that runs under vmap."""


class RNN(Recurrent, nn.RNN):
    """An `nn.RNN` that runs under vmap."""


class _SingleCell(nn.RNNCellBase):
    """The forward pass of one cell for one time step."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        is_lstm, weights = isinstance(self, nn.LSTMCell), {name: getattr(self, name, None) for name in _NAMES}
        if hx is None:
            state: State = (input.new_zeros(*input.shape[:-1], self.hidden_size),) * (2 if is_lstm else 1)
        else:
            state = hx if is_lstm else (hx,)
        kind = "LSTM" if is_lstm else "GRU" if isinstance(self, nn.GRUCell) else f"RNN_{self.nonlinearity}".upper()
        new = _CELLS[kind](F.linear(input, self.weight_ih, self.bias_ih), state, weights)
        return new if is_lstm else new[0]


class LSTMCell(_SingleCell, nn.LSTMCell):
    """An `nn.LSTMCell` that runs under vmap."""


class GRUCell(_SingleCell, nn.GRUCell):
    """An `nn.GRUCell` that runs under vmap."""


class RNNCell(_SingleCell, nn.RNNCell):
    """An `nn.RNNCell` that runs under vmap."""


_REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
}


def make_recurrent_functional(layer: nn.Module, salt: int) -> bool:
    """Change the class of a recurrent layer in place; return whether it is one. Subclasses may compute something else.

    >>> make_recurrent_functional(nn.LSTM(2, 3), salt=0)
    True
    """
    kind = _REPLACEMENTS.get(type(layer))
    if kind is None:
        return False
    layer.__class__ = kind
    if isinstance(layer, Recurrent):
        layer.between = Dropout(layer.dropout, salt) if layer.num_layers > 1 and layer.dropout > 0 else None
    return True
