"""FSDP with the checkpoint format of a single device."""

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lit_lazy.model.decoder import gather_full_tensor


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2. Rank 0 writes checkpoints of full tensors in one file, which any execution can resume.

    Lightning's checkpoints number the optimiser's states in another order than the optimiser, and cannot load a tensor
    whose rows do not divide evenly over the devices.
    """

    def __init__(self, devices: int) -> None:
        super().__init__(data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All parameters on rank 0, else {}. A collective: all ranks must call it."""
        assert self.model
        return self._gather_state(self.model.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimiser's full state on rank 0, else {}. A collective: all ranks must call it."""
        return self._gather_state(optimizer.state_dict())

    def _gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        def gather(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            found = gather_full_tensor(value)
            return found.cpu() if self.is_global_zero else None

        gathered = tree_map(gather, state)
        return gathered if self.is_global_zero else {}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load this device's shard of model and optimisers."""
        assert self.model
        content = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        full = content["state_dict"]
        sharded = {name: _shard_tensor(full[name], value) for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(sharded)
        for optimizer, state in zip(self.optimizers, content["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            parts = {
                index: {name: _shard_tensor(value, parameters[index]) for name, value in values.items()}
                for index, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": parts})
        return content


def _shard_tensor(value: Tensor, like: Tensor) -> Tensor:
    """This device's shard of a full tensor, if `like` is sharded and has the same shape."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
