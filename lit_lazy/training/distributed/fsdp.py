"""A model that is spread over the devices, and checkpoints of it like those of any other."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lit_lazy.support.sharding import gather_full_tensor


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2. Its checkpoints hold whole tensors in one file, which rank 0 writes and any way of execution resumes.

    Lightning's own number the optimiser's states in another order than the optimiser does, and cannot load a tensor
    whose rows the devices do not share evenly.
    """

    def __init__(self, devices: int) -> None:
        super().__init__(data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All parameters, on rank 0; the others have to ask for them too."""
        assert self.model
        return self._gather_state(self.model.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """All of an optimiser's state, on rank 0; the others have to ask for it too."""
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
        """Every device takes its part of model and optimisers from the file."""
        assert self.model
        content = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        self.model.load_state_dict(_shard_state(self.model.state_dict(), content["state_dict"]))
        for optimizer, state in zip(self.optimizers, content["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            parts = {
                index: {name: _shard_tensor(value, parameters[index]) for name, value in values.items()}
                for index, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": parts})
        return content


def _shard_state(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _shard_tensor(given[name], value) for name, value in own.items()}


def _shard_tensor(value: Tensor, like: Tensor) -> Tensor:
    """What this device has of a whole tensor, if it shares `like` with others and the two are of one shape."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
