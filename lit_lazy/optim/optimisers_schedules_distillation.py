"""Settings of optimisers, which build torch's for a model's parameter groups, of learning rate schedules, and of the
terms that compare a model with its teacher.

The teacher is the model of `init_from` as it was, under its own attention. A term is a frozen dataclass with one
function of the two models' passes over the same batch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_lazy.support.checked_fields import MOST_FACTOR, BelowOne, Bounds, CheckedFields, PositiveFloat, require

Group = dict[str, Any]
"""A parameter group of torch: `params` with their `lr` and `weight_decay`."""


class Optimiser(CheckedFields, ABC):
    """Settings of an optimiser, besides the shared `train.lr`, `train.weight_decay` and `train.betas`."""

    adaptive: ClassVar[bool] = True
    """Whether `train.betas` has an effect."""
    needs_whole_matrices: ClassVar[bool] = False
    """Whether a step needs full matrices, which must then not be sharded."""

    @abstractmethod
    def build(
        self, groups: Sequence[Group], matrices: Collection[Tensor], betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        """Build the optimiser of all parameters in the groups.

        matrices: the weight matrices of blocks among them.
        """

    def moments(self, matrix: bool) -> int:  # noqa: ARG002
        """Number of state values per weight. matrix: whether it is in a weight matrix of a block."""
        return 2


@dataclass(frozen=True)
class AdamW(Optimiser):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), torch's."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    def build(
        self,
        groups: Sequence[Group],
        matrices: Collection[Tensor],  # noqa: ARG002
        betas: tuple[float, float],
    ) -> torch.optim.Optimizer:
        devices = {parameter.device.type for group in groups for parameter in group["params"]}
        return torch.optim.AdamW(groups, betas=betas, eps=self.eps, fused=devices <= {"cuda", "cpu"} or None)


@dataclass(frozen=True)
class SGD(Optimiser):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013), torch's: decay is added to the gradient."""

    momentum: BelowOne = 0.9
    """Decay factor of the sum of gradients per step; 0 for no momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""

    adaptive = False

    def __post_init__(self) -> None:
        require(not self.nesterov or self.momentum > 0, "SGD.nesterov", True, "needs a momentum above 0")

    def build(
        self,
        groups: Sequence[Group],
        matrices: Collection[Tensor],  # noqa: ARG002
        betas: tuple[float, float],  # noqa: ARG002
    ) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, momentum=self.momentum, nesterov=self.nesterov)

    def moments(self, matrix: bool) -> int:  # noqa: ARG002
        return 1 if self.momentum else 0


@dataclass(frozen=True)
class Muon(Optimiser):
    """Orthogonalised momentum for the blocks' matrices, AdamW for all other parameters (Jordan et al. 2024, torch's).

    The others are embeddings, head, norms, tau and biases. Newton-Schulz iterations in bfloat16 make the matrices'
    momentum nearly orthogonal.
    """

    momentum: BelowOne = 0.95
    """Decay factor of the mean of a matrix's gradients per step."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    iterations: Annotated[int, Bounds(ge=1, le=99)] = 5
    """Number of Newton-Schulz iterations."""
    adjustment: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Size of a matrix's step: match_rms_adamw is 0.2 sqrt(max(rows, columns)), which suits AdamW's learning rates (Liu
    et al., arXiv 2502.16982); original is sqrt(max(1, rows / columns))."""
    lr_scale: Annotated[float, Bounds(gt=0, le=MOST_FACTOR)] = 1.0
    """Learning rate of the matrices as a multiple of `train.lr`."""
    eps: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment."""

    needs_whole_matrices = True

    def build(
        self, groups: Sequence[Group], matrices: Collection[Tensor], betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        chosen = set(matrices)
        others = _select_parameters(groups, lambda parameter: parameter not in chosen)
        own = _select_parameters(groups, chosen.__contains__)
        scaled = [{**group, "lr": self.lr_scale * group["lr"]} for group in own]
        settings = {"momentum": self.momentum, "nesterov": self.nesterov, "ns_steps": self.iterations}
        muon = partial(torch.optim.Muon, **settings, adjust_lr_fn=self.adjustment)
        adamw = partial(AdamW(self.eps).build, matrices=matrices, betas=betas)
        # One of the two may be left without parameters by `train.trainable`.
        return CombinedOptimizer(*(build(part) for build, part in ((adamw, others), (muon, scaled)) if part))

    def moments(self, matrix: bool) -> int:
        return 1 if matrix else 2


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimisers of different parameters combined: concatenated groups, one state, one checkpoint."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share_state()

    def _share_state(self) -> None:
        """Let the parts use the combined groups and state, which schedules and checkpoints change."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch replaces the groups and the state, so share them again."""
        super().load_state_dict(state_dict)
        self._share_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step each part; a closure runs once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def _select_parameters(groups: Sequence[Group], wanted: Callable[[Tensor], bool]) -> list[Group]:
    """The groups restricted to the wanted parameters, without empty ones."""
    parts = [{**group, "params": [*filter(wanted, group["params"])]} for group in groups]
    return [group for group in parts if group["params"]]


class Schedule(CheckedFields, ABC):
    """Settings of a schedule."""

    falls: ClassVar[bool] = True
    """Whether the schedule ends at `train.final_lr_fraction`, which has no effect otherwise."""

    @abstractmethod
    def factor(self, progress: float, final: float) -> float:
        """Factor on the peak learning rate.

        progress: finished share of the steps after the warm-up, 0 to 1. final: factor at the end.
        """


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from the peak to `train.final_lr_fraction` of it (Loshchilov and Hutter, arXiv 1608.03983)."""

    def factor(self, progress: float, final: float) -> float:
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class WSD(Schedule):
    """Warm-up, stable, decay: the peak, then a fall to `train.final_lr_fraction` (Hu et al., arXiv 2404.06395)."""

    decay_share: Annotated[float, Bounds(gt=0, le=1)] = 0.2
    """Share of the steps after the warm-up in which the rate decays."""
    decay: Literal["linear", "sqrt"] = "sqrt"
    """Form of the decay: linear, or sqrt, 1 - sqrt(u) for the finished share u (Hägele et al., arXiv 2405.18392)."""

    def factor(self, progress: float, final: float) -> float:
        fallen = max(0.0, 1 - (1 - progress) / self.decay_share)
        return 1 - (1 - final) * (math.sqrt(fallen) if self.decay == "sqrt" else fallen)


@dataclass(frozen=True)
class Constant(Schedule):
    """The peak learning rate until the end."""

    falls = False

    def factor(self, progress: float, final: float) -> float:  # noqa: ARG002
        return 1.0


class Passes(NamedTuple):
    """The passes of a model and of its teacher over the same tokens.

    mixed: what each layer's attention adds to the residual stream, `[B, L, d_model]`: the model's and the teacher's;
    empty unless the term `reads_attention`.
    average_logits: mean over the predicted tokens of a function that takes the model's and the teacher's logits
    `[N, V]`, float32, and gives `[N]`. They are computed in blocks of tokens, again in the backward pass, so that all
    logits are never in memory.
    """

    mixed: Sequence[tuple[Tensor, Tensor]]
    average_logits: Callable[[Callable[[Tensor, Tensor], Tensor]], Tensor]


class Distillation(CheckedFields, ABC):
    """Settings of a term, which is added to the loss."""

    active: ClassVar[bool] = True
    """Whether there is a teacher."""
    reads_attention: ClassVar[bool] = False
    """Whether the term compares the outputs of attention, layer by layer."""

    @abstractmethod
    def compute(self, passes: Passes) -> Tensor:
        """The term, a scalar, its weight included: a mean over sequences, so that micro-batches do not change it."""


@dataclass(frozen=True)
class NoDistillation(Distillation):
    """No teacher."""

    active = False

    def compute(self, passes: Passes) -> Tensor:
        raise NotImplementedError("there is no teacher")


@dataclass(frozen=True)
class Logits(Distillation):
    """T^2 KL(teacher || model) of the next token's distribution at temperature T, in nats (Hinton et al. 2015)."""

    weight: PositiveFloat = 1.0
    """Factor of the term."""
    temperature: PositiveFloat = 1.0
    """T, which divides the logits of both."""

    def compute(self, passes: Passes) -> Tensor:
        def compute_divergence(model: Tensor, teacher: Tensor) -> Tensor:
            own, expected = ((logits / self.temperature).log_softmax(-1) for logits in (model, teacher))
            return F.kl_div(own, expected, reduction="none", log_target=True).sum(-1)

        return self.weight * self.temperature**2 * passes.average_logits(compute_divergence)


@dataclass(frozen=True)
class AttentionOutputs(Distillation):
    """Squared error of each layer's attention output relative to the teacher's square, averaged over the layers.

    Both squares are means over a sequence.
    """

    weight: PositiveFloat = 1.0
    """Factor of the term."""

    reads_attention = True

    def compute(self, passes: Passes) -> Tensor:
        errors = [
            (model.float() - teacher.float()).square().mean((1, 2)) / teacher.float().square().mean((1, 2))
            for model, teacher in passes.mixed
        ]
        return self.weight * torch.stack(errors).mean()
