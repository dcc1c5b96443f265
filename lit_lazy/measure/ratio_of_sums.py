"""`RatioOfSums`, the accumulator of scalar metrics."""

import torch
from torch import Tensor
from torchmetrics import Metric


class RatioOfSums(Metric):
    """sum(numerator) / sum(denominator) over all updates, in fp64.

    Unlike a mean of ratios, the result does not depend on the division into batches. NaN (undefined) while the
    denominator's sum is at most `minimum`.
    """

    full_state_update = False
    higher_is_better = None
    numerator: Tensor
    denominator: Tensor

    def __init__(self, minimum: float = 0.0, sync_on_compute: bool = True) -> None:
        """sync_on_compute: include the updates of the group's other processes, which must call `compute` too."""
        super().__init__(sync_on_compute=sync_on_compute)
        self.minimum = minimum
        for name in ("numerator", "denominator"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, numerator: Tensor, denominator: Tensor | float) -> None:
        """Add the sums of tensors of any shape."""
        self.numerator += numerator.double().sum()
        self.denominator += torch.as_tensor(denominator, dtype=torch.float64).sum().to(self.denominator.device)

    def compute(self) -> Tensor:
        """The ratio, fp64 scalar."""
        if self.denominator <= self.minimum:
            return self.denominator.new_full((), float("nan"))
        return self.numerator / self.denominator
