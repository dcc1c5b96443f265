"""The shape of a layer, for tests that build only a part of it."""

from lit_lazy.attention import LayerShape


def layer_shape(n_heads: int, context_length: int, head_dim: int = 8, layer: int = 0) -> LayerShape:
    return LayerShape(n_heads, n_heads, head_dim, n_heads * head_dim, context_length, layer, n_layers=layer + 1)
