"""The shape of a layer, for tests that build only a part of it, and the size of what a computation allocates."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_lazy.attention import LayerShape


def layer_shape(n_heads: int, context_length: int, head_dim: int = 8, layer: int = 0) -> LayerShape:
    return LayerShape(n_heads, n_heads, head_dim, n_heads * head_dim, context_length, layer, n_layers=layer + 1)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of an operator's result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else [found]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return found
