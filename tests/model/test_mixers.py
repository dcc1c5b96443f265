"""Decoders without attention: decoding, sizes, training, errors. What they share with others: test_decoder.py."""

import dataclasses
import re

import pytest
import torch
from test_decoder import CONTEXT, MIXERS, SMALL, build, tokens
from test_decoder import LONG as LENGTH

from lit_lazy.attention import AttentionSpec, GatedDeltaNet, Mamba2, RetNet
from lit_lazy.config import ModelConfig, TrainConfig
from lit_lazy.config.user_files import load_experiment
from lit_lazy.grid.ablation import Ablation, load_defined
from lit_lazy.measure.diagnostics import Maps, measure
from lit_lazy.model.decoder import Block, DecoderLM, flops_per_token
from lit_lazy.model.loss import token_nll
from lit_lazy.model.parameter_matching import matching_d_ff
from lit_lazy.support.names_to_paths import find, list_available
from lit_lazy.training.check_before_run import check_model
from lit_lazy.training.trained_parameters import build_parameter_groups

every_model = pytest.mark.parametrize("cfg", MIXERS.values(), ids=MIXERS)
TABLE1 = load_defined(find("ablations", "table1"), "ablation", Ablation)


@torch.no_grad()
@every_model
def test_a_state_of_one_size_is_kept_where_tokens_are_to_come(cfg):
    """Without a cache no state is kept."""
    check_model(cfg, CONTEXT)
    model, x = build(cfg), tokens(length=LENGTH)
    assert torch.equal(model(x), model(x))
    cache = model.new_cache()
    first = model(x[:, :9], cache)
    sizes = {layer.state.shape for layer in cache}
    assert not torch.equal(model(x[:, :9], cache), first)
    assert {layer.state.shape for layer in cache} == sizes
    assert all(layer.state.dtype == torch.float32 for layer in cache)


@every_model
def test_only_matrices_decay(cfg):
    model = build(cfg)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_parameter_groups(model, TrainConfig())
    decayed = [names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]]
    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "head"]
    assert {names[id(m.weight)] for m in linear} <= set(decayed)
    assert not [name for name in decayed if re.search(r"norm|convolution|decay|skip|embedding", name)]


class TestSize:
    """d = 8, 2 blocks, 2 heads of 4, d_ff = 16, counted by hand."""

    CFG = ModelConfig(d_model=8, n_layers=2, n_heads=2, d_ff=16)
    REST = 2 * (3 * 8 * 16 + 2 * 8) + 8 + 11 * 8

    @pytest.mark.parametrize(
        ("mixer", "parameters", "products"),
        [
            # q, k; v, gate, out; group norm
            (RetNet(), 2 * 8 * 8 + 3 * 8 * 16 + 2 * 16, 2 * 2 * 4 * 8),
            # z, x; B, C; dt of 2 heads; convolution with bias; A, dt, D; norm; out
            (Mamba2(state=3, head_dim=8), 8 * (32 + 6 + 2) + 22 * 5 + 3 * 2 + 16 + 16 * 8, 2 * 2 * 3 * 8 + 22 * 4),
            # keys of 3, values of 6 per head: q, k; v, gate, out; beta, dt; convolution; A, dt; norm
            (GatedDeltaNet(), 2 * 8 * 6 + 3 * 8 * 12 + 2 * 8 * 2 + 24 * 4 + 2 * 2 + 6, 3 * 2 * 3 * 6 + 24 * 4),
        ],
        ids=repr,
    )
    def test_parameters_and_flops(self, mixer, parameters, products):
        model = DecoderLM(dataclasses.replace(self.CFG, mixer=mixer), 11, 6, 0)
        assert sum(p.numel() for p in model.parameters()) == 2 * parameters + self.REST
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
        assert flops_per_token(model, 6) == flops_per_token(model, 600) == 6 * (linear + 2 * products)

    @pytest.mark.parametrize(
        # The MLP of the trigger task is too narrow for a mixer to match: attention has to do the averaging.
        "name",
        [name for name in list_available("experiments") if "tiny" not in name and name != "trigger"],
    )
    def test_the_rows_of_table1_have_as_many_parameters_on_any_base(self, name):
        """Models on the meta device; blocks within 1 %, without parameters that grow with the context."""
        base = load_experiment(find("experiments", name))
        vocabulary, context = 257, getattr(base.data, "context_length", 512)
        blocks, wholes = [], []
        for row in TABLE1.all_rows:
            cfg = row.apply_to(base).model
            with torch.device("meta"):
                parameters = Block(cfg, context, 0).named_parameters()
            # Bias tables grow with the context: 8,192 of the 58,500 parameters of a lazy block of stdlib_long.
            blocks.append(sum(p.numel() for path, p in parameters if not path.startswith("attention.bias.")))
            embeddings = vocabulary * cfg.d_model * (1 if cfg.tie_embeddings else 2)
            wholes.append(cfg.n_layers * blocks[-1] + embeddings + cfg.d_model)
        assert max(wholes) <= 1.02 * min(wholes)
        assert max(blocks) <= 1.015 * min(blocks)

    def test_an_mlp_that_cannot_give_so_much_is_refused(self):
        like = ModelConfig(d_model=64, n_heads=1, d_ff=64)
        message = r"^model.mixer=RetNet: has 33,024 parameters, and the block to match 28,672; .* of at least (\d+)$"
        with pytest.raises(ValueError, match=message) as refused:
            matching_d_ff(dataclasses.replace(like, mixer=RetNet()), like)
        like = dataclasses.replace(like, d_ff=int(re.match(message, str(refused.value))[1]))
        assert matching_d_ff(dataclasses.replace(like, mixer=RetNet()), like) >= 1


def test_what_attention_alone_has_is_not_measured():
    model, x = build(MIXERS["Mamba2"]), tokens(4, 12)
    batch = {"tokens": x, "targets": x.roll(-1, 1)}
    arrays = measure(model, [batch]).arrays
    assert model.attentions == []
    assert {name.partition("/")[0] for name in arrays} == {"hidden", "loss", "sample", "context"}
    assert "loss/evicted" not in arrays
    torch.testing.assert_close(
        torch.from_numpy(arrays["loss/by_position"]), token_nll(model(x), batch["targets"]).mean(0).detach()
    )
    for maps, named in ((Maps(layers=(0,)), "--layers 0"), (Maps(heads=(0, 1)), "--heads 0,1")):
        with pytest.raises(ValueError, match=f"^{named}: the model has no attention; leave the option out$"):
            maps.check(model, "--")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": AttentionSpec(window=4)}, "model.attention.window=4"),
        ({"n_kv_heads": 1}, "model.n_kv_heads=1"),
        ({"backend": "reference"}, "model.backend='reference'"),
    ],
)
def test_a_setting_of_attention_beside_a_mixer_is_refused(changes, message):
    with pytest.raises(
        ValueError, match=rf"^{message}.*has no effect in model.mixer=RetNet, .*leave one of the two out$"
    ):
        dataclasses.replace(SMALL, mixer=RetNet(), **changes)
