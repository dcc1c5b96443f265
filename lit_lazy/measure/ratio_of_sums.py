"""The one accumulator: a ratio of sums."""

import torch
from torch import Tensor
from torchmetrics import Metric


class RatioOfSums(Metric):
    """sum(numerator) / sum(denominator) over everything seen, in fp64: a ratio of sums, never a mean of ratios.

    So the result does not depend on how the data was cut into batches. NaN (undefined) while the denominator's sum is
    at most `minimum`.
    """

    full_state_update = False
    higher_is_better = None
    numerator: Tensor
    denominator: Tensor

    def __init__(self, minimum: float = 0.0, sync_on_compute: bool = True) -> None:
        """sync_on_compute: add what the other processes of a group have seen; they have to compute it then too."""
        super().__init__(sync_on_compute=sync_on_compute)
        self.minimum = minimum
        for name in ("numerator", "denominator"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, numerator: Tensor, denominator: Tensor | float) -> None:
        """Add tensors of any shape (their sums are taken)."""
        self.numerator += numerator.double().sum()
        self.denominator += torch.as_tensor(denominator, dtype=torch.float64).sum().to(self.denominator.device)

    def compute(self) -> Tensor:
        """Scalar fp64."""
        if self.denominator <= self.minimum:
            return self.denominator.new_full((), float("nan"))
        return self.numerator / self.denominator
