"""Int8: equal to integer arithmetic, hurt by a planted outlier, without effect on the model."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from lit_lazy.config.user_files import experiment
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.measure.diagnostics import sample_validation
from lit_lazy.measure.int8 import Int8, quantise
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll

DATA = Backcopy(vocab_size=16, context_length=32, train_sequences=4, validation_sequences=48)
MODEL = dataclasses.replace(experiment("backcopy_tiny").model, d_model=32, n_layers=2, n_heads=2, init_std=0.2)


class IntegerLinear(nn.Module):
    """A linear layer in integers, for inputs of at most a given size."""

    def __init__(self, layer, largest):
        super().__init__()
        self.weight_scale, self.scale = layer.weight.abs().max() / 127, largest / 127
        self.weight = (layer.weight / self.weight_scale).round().long()

    def forward(self, x):
        whole = (x / self.scale).round().clamp(-127, 127).long()  # quantised passes may exceed the range
        return (whole @ self.weight.T) * (self.scale * self.weight_scale)


def build():
    return DecoderLM(MODEL, 17, 32, seed=1)


def test_rounding_is_to_whole_steps_of_the_largest_value():
    x = torch.tensor([-2.0, 0.005, 1.0, 2.54, 9.0])
    assert quantise(x, torch.tensor(2.54)).tolist() == pytest.approx([-2.0, 0.0, 1.0, 2.54, 2.54])
    assert quantise(torch.zeros(2), torch.tensor(0.0)).tolist() == [0, 0]


def test_loss_is_that_of_integer_arithmetic():
    """In fp64, so that no entry is so near to the middle of two steps that rounding errors decide."""
    model = build().double()
    (batch,) = sample_validation(DATA.load(), 6)
    integer = copy.deepcopy(model)
    largest = {}

    def read(name):
        return lambda _, args: largest.update({name: args[0].abs().max()})

    layers = {name: part for name, part in model.blocks.named_modules() if isinstance(part, nn.Linear)}
    hooks = [layer.register_forward_pre_hook(read(name)) for name, layer in layers.items()]
    with torch.no_grad():
        exact = token_nll(model(batch["tokens"]), batch["targets"]).mean().item()
        for hook in hooks:
            hook.remove()
        for name, layer in layers.items():
            integer.blocks.set_submodule(name, IntegerLinear(layer, largest[name]))
        expected = token_nll(integer(batch["tokens"]), batch["targets"]).mean().item()
    found = Int8(sequences=6).measure(model, DATA)
    assert found == pytest.approx({"int8/loss": expected, "int8/loss_rise": expected - exact}, rel=1e-5, abs=1e-6)
    assert abs(expected - exact) > 1e-4
