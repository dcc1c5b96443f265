"""Model, attention, loss, parameter groups and the step benchmark (tests/timings) need only torch."""

from pathlib import Path

from torch_alone import run_alone

TRAINS = """
import importlib.util
names = ("numpy", "lightning", "torchmetrics", "mlflow", "optuna", "datasets", "triton")
assert not [name for name in names if importlib.util.find_spec(name)]

import torch
from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias
from lit_lazy.config import ModelConfig, TrainConfig
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.generation import generate
from lit_lazy.model.loss import token_nll
from lit_lazy.training.trained_parameters import build_parameter_groups

cfg = ModelConfig(d_model=16, n_heads=2, d_ff=32, attention=AttentionSpec(Elastic(), LearnedBias()))
model, train = DecoderLM(cfg, vocab_size=8, context_length=8, seed=0), TrainConfig(steps=60, warmup_steps=2)
optimiser = torch.optim.AdamW(build_parameter_groups(model, train), lr=1e-2)
ids = torch.arange(36).view(4, 9) % 8
losses = []
for step in range(60):
    loss = token_nll(model(ids[:, :-1]), ids[:, 1:]).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
assert generate(model, [[1, 2], [3]], 3) == [[3, 4, 5], [4, 5, 6]]
"""


def test_a_model_trains_where_nothing_else_is(torch_site: Path) -> None:
    run_alone(TRAINS, torch_site)
