"""Gates: factors on the heads' outputs, independent of the normaliser; a norm is one of them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lit_lazy.attention.mixer import LayerShape, SelfInitialised
from lit_lazy.support.checked_fields import CheckedFields

Per = Literal["element", "head"]


HEAD_NORM_EPS = 1e-5
"""Of the norm of a head's output, as published for Differential Attention."""


class GateModule(nn.Module):
    """Parameters of a gate; this base class gates nothing."""

    def forward(self, out: Tensor, x: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        """Gate the heads' outputs `[B, H, L, D]`.

        x `[B, L, d_model]` is the layer's normalised input and v `[B, Hkv, L, D]` the values, both of the queries'
        tokens.
        """
        return out


class Gate(CheckedFields, ABC):
    """Settings of a gate."""

    @abstractmethod
    def build(self, shape: LayerShape) -> GateModule: ...


@dataclass(frozen=True)
class NoGate(Gate):
    """No gate."""

    def build(self, shape: LayerShape) -> GateModule:  # noqa: ARG002
        return GateModule()


@dataclass(frozen=True)
class OutputGate(Gate):
    """`sigmoid(x W)` on the output of each head, x the layer's normalised input (Qiu et al., arXiv 2505.06708, G1)."""

    per: Per = "element"
    """One gate per element of a head's output, or one per head."""
    starts_open: bool = False
    """A factor of 2, and W = 0 at first, which changes nothing: for a model that was trained without the gate."""

    def build(self, shape: LayerShape) -> GateModule:
        return _OutputGate(shape, self, shape.d_model)


class _OutputGate(GateModule):
    def __init__(self, shape: LayerShape, spec: OutputGate, inputs: int) -> None:
        super().__init__()
        self.n_heads = shape.n_heads
        width = shape.head_dim if spec.per == "element" else 1
        self.scale = 2.0 if spec.starts_open else 1.0
        self.linear = (_ZeroLinear if spec.starts_open else nn.Linear)(inputs, shape.n_heads * width, bias=False)

    def forward(self, out: Tensor, x: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        gate = self.scale * torch.sigmoid(self.linear(x))
        return out * gate.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


class _ZeroLinear(nn.Linear, SelfInitialised):
    """A linear layer whose weights start at zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


@dataclass(frozen=True)
class ValueGate(OutputGate):
    """`sigmoid(v W)` on the output of each head, v the values of the query's own token (arXiv 2510.09017)."""

    def build(self, shape: LayerShape) -> GateModule:
        return _ValueGate(shape, self, shape.n_kv_heads * shape.head_dim)


class _ValueGate(_OutputGate):
    def forward(self, out: Tensor, x: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return super().forward(out, v.transpose(1, 2).flatten(2), v)


@dataclass(frozen=True)
class HeadNorm(Gate):
    """RMSNorm of each head's output, with a learned gain that the heads share (Li et al., arXiv 2605.06611)."""

    def build(self, shape: LayerShape) -> GateModule:
        return _HeadNorm(shape)


class _HeadNorm(GateModule):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.head_dim, eps=HEAD_NORM_EPS)

    def forward(self, out: Tensor, x: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return self.norm(out.to(self.norm.weight.dtype)).to(out.dtype)
