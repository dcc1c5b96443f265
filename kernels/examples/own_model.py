"""A language model of one's own with Lazy Attention: trained on a repeated pattern, then decoded with a cache.

python kernels/examples/own_model.py      # needs only torch and flash_lazy
"""

import torch
from torch import Tensor, nn

from flash_lazy import KeyValueCache, LazyAttention


class PatternModel(nn.Module):
    def __init__(self, words: int, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(LazyAttention(width, heads, kv_heads=2, reach=16) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor, caches: list[KeyValueCache] | None = None) -> Tensor:
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x = x + layer(nn.functional.rms_norm(x, x.shape[-1:]), cache)
        return self.head(x)

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> list[int]:
        """The most likely continuation of a prompt `[1, L]`, each token through the layers once."""
        caches, found = [KeyValueCache() for _ in self.layers], []
        for _ in range(count):
            ids = self(ids, caches)[:, -1:].argmax(-1)
            found.append(ids.item())
        return found


def make_optimiser(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose weight decay leaves out tau and bias."""
    kept = {
        id(module.get_parameter(name))
        for module in model.modules()
        if isinstance(module, LazyAttention)
        for name in module.no_weight_decay()
    }
    decayed = [p for p in model.parameters() if id(p) not in kept]
    others = [p for p in model.parameters() if id(p) in kept]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def train(model: PatternModel, ids: Tensor, steps: int) -> list[float]:
    """Losses of the steps on one batch `[B, L]`."""
    optimiser, losses = make_optimiser(model), []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    pattern = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]).repeat(4)[None]
    model = PatternModel(words=10)
    losses = train(model, pattern, steps=60)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.4f}, tau {model.layers[0].tau.tolist()}")
    print("continued:", model.generate(pattern[:, :11], count=8))
