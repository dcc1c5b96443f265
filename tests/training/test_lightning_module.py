"""Parameter groups (weight decay, learning rates), the schedule and the loss."""

import math
from itertools import pairwise

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lit_lazy.attention import AttentionSpec, Elastic, Fire, KerpleLog, LearnedAbsolute, LearnedBias, T5Bias
from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig
from lit_lazy.config.serialisation import replace_at, to_dict
from lit_lazy.config.user_files import load_module
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.support.named_files import find
from lit_lazy.training.module import DivergedError, LitLM
from lit_lazy.training.optimiser import build_parameter_groups, lr_factor

VOCAB, CONTEXT = 11, 12
BASE = RunConfig(
    Backcopy(vocab_size=VOCAB - 1, context_length=CONTEXT, train_sequences=32, validation_sequences=8),
    ModelConfig(d_model=8, n_layers=2, n_heads=2, d_ff=12, tie_embeddings=False),
    TrainConfig(steps=20, warmup_steps=4, lr=0.01, weight_decay=0.1, log_every=1, val_every=100),
)
VARIANTS = {
    row.name: replace_at(BASE, row.changes).model for row in load_module(find("ablations", "table2")).ablation.all_rows
} | {
    "tied": replace_at(BASE, {"model.tie_embeddings": True}).model,
    "tied, FIRE, learned positions": replace_at(
        BASE,
        {
            "model.tie_embeddings": True,
            "model.position": LearnedAbsolute(),
            "model.attention": AttentionSpec(Elastic(), Fire()),
        },
    ).model,
}
MATRICES = {f"attention.{name}.weight" for name in "qkv"} | {
    *("attention.out.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.down.weight")
}


def module(cfg=BASE):
    return LitLM.create(cfg, VOCAB, CONTEXT)


@pytest.mark.parametrize("cfg", VARIANTS.values(), ids=VARIANTS)
def test_parameter_groups(cfg):
    """Every trainable parameter is in one group; only the blocks' matrices and an untied head decay."""
    model = DecoderLM(cfg, VOCAB, CONTEXT, 0)
    groups = build_parameter_groups(model, BASE.train)
    names = {id(p): name for name, p in model.named_parameters()}
    grouped = [names[id(p)] for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {f"blocks.{i}.{name}" for i in range(2) for name in MATRICES} | (
        set() if cfg.tie_embeddings else {"head.weight"}
    )
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}
    scale = getattr(cfg.attention.normaliser, "tau_lr_scale", 1.0)
    for group in groups:
        for parameter in group["params"]:
            is_tau = names[id(parameter)].endswith("normaliser.tau")
            assert group["lr"] == pytest.approx(0.01 * (scale if is_tau else 1))


def test_frozen_tau_is_in_no_group():
    model = module(replace_at(BASE, {"model.attention.normaliser": Elastic(learn_tau=False)})).model
    frozen = {id(a.normaliser.tau) for a in model.attentions}
    assert not frozen & {id(p) for group in build_parameter_groups(model, BASE.train) for p in group["params"]}


def test_tau_keeps_its_ratio_through_the_schedule():
    lit = module(replace_at(BASE, {"model.attention.normaliser": Elastic(tau_lr_scale=0.25)}))
    configured = lit.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    assert configured["lr_scheduler"]["interval"] == "step"
    taus = {id(a.normaliser.tau) for a in lit.model.attentions}
    for step in range(BASE.train.steps + 1):
        for group in optimizer.param_groups:
            scale = 0.25 if taus & {id(p) for p in group["params"]} else 1
            assert group["lr"] == pytest.approx(scale * 0.01 * lr_factor(step, BASE.train))
        optimizer.step()
        scheduler.step()
    assert optimizer.defaults["betas"] == (0.9, 0.95)


class TestSchedule:
    CFG = TrainConfig(steps=100, warmup_steps=10, final_lr_fraction=0.1)

    def test_warm_up_is_linear_and_ends_at_the_peak(self):
        assert [lr_factor(step, self.CFG) for step in range(10)] == pytest.approx([(s + 1) / 10 for s in range(10)])
        assert lr_factor(10, self.CFG) == 1

    def test_cosine_ends_at_the_fraction_and_stays(self):
        assert lr_factor(100, self.CFG) == pytest.approx(0.1)
        assert lr_factor(1000, self.CFG) == pytest.approx(0.1)
        assert lr_factor(55, self.CFG) == pytest.approx((1 + 0.1) / 2)
        quarter = 10 + 90 // 3
        assert lr_factor(quarter, self.CFG) == pytest.approx(0.1 + 0.9 * 0.75)  # (1 + cos 60°) / 2

    def test_falls_without_jumps(self):
        factors = [lr_factor(step, self.CFG) for step in range(9, 101)]
        drops = [a - b for a, b in pairwise(factors)]
        assert min(drops) >= 0
        assert max(drops) < 1.01 * 0.9 * math.pi / 2 / 90  # the cosine's steepest slope

    def test_without_warm_up_it_starts_at_the_peak(self):
        assert lr_factor(0, TrainConfig(steps=10, warmup_steps=0)) == 1

    def test_a_fraction_of_one_is_constant(self):
        cfg = TrainConfig(steps=10, warmup_steps=0, final_lr_fraction=1.0)
        assert {lr_factor(step, cfg) for step in range(11)} == {1.0}


class TestLoss:
    def test_is_minus_the_log_probability(self):
        logits = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(0))
        targets = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(1))
        nll = token_nll(logits, targets)
        for b in range(2):
            for t in range(5):
                p = logits[b, t].double().exp()
                expected = -math.log(p[targets[b, t]] / p.sum())
                assert nll[b, t].item() == pytest.approx(expected, rel=1e-5)

    def test_is_taken_in_fp32(self):
        logits = torch.randn(1, 3, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
        targets = torch.zeros(1, 3, dtype=torch.long)
        assert torch.equal(token_nll(logits, targets), token_nll(logits.float(), targets))

    def test_equal_logits_cost_the_log_of_the_vocabulary(self):
        nll = token_nll(torch.zeros(2, 3, VOCAB), torch.zeros(2, 3, dtype=torch.long))
        torch.testing.assert_close(nll, torch.full((2, 3), math.log(VOCAB)))


def trainer(tmp_path, **options):
    return L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **options,
    )  # fmt: skip


def batches(dataset):
    return DataLoader(dataset, batch_size=8, collate_fn=lambda batch: batch)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*", "ignore:.*no `val_dataloader`.*"
)
class TestTraining:
    def test_validation_is_the_mean_over_tokens_and_the_excess_over_the_oracle(self, tmp_path):
        """Also if the last batch is smaller."""
        data = BASE.data.load().validation
        lit = module()
        loader = DataLoader(data, batch_size=3, collate_fn=lambda batch: batch)
        (logged,) = trainer(tmp_path).validate(lit, loader, verbose=False)
        whole = data.__getitems__(list(range(8)))
        with torch.no_grad():
            nll = token_nll(lit.model.cpu()(whole["tokens"]), whole["targets"]).double()
        assert logged["val/loss"] == pytest.approx(nll.mean().item(), rel=1e-6)
        assert logged["val/excess"] == pytest.approx((nll - whole["oracle_nll"]).mean().item(), rel=1e-6)

    def test_a_loss_that_is_not_finite_ends_the_training(self, tmp_path):
        lit = module()
        lit.model.head.weight.data[0, 0] = math.nan
        with pytest.raises(DivergedError, match="training loss is nan at step 0"):
            trainer(tmp_path, max_steps=2).fit(lit, batches(BASE.data.load().train))

    def test_frozen_parts_stay_and_others_move(self, tmp_path):
        attention = AttentionSpec(Elastic(tau_init=0.5, learn_tau=False), LearnedBias())
        lit = module(replace_at(BASE, {"model.attention": attention}))
        before = {name: p.detach().clone() for name, p in lit.model.named_parameters()}
        trainer(tmp_path, max_steps=2).fit(lit, batches(BASE.data.load().train))
        for name, parameter in lit.model.named_parameters():
            assert torch.equal(parameter, before[name]) is name.endswith("tau"), name

    def test_a_checkpoint_loads_with_weights_only(self, tmp_path):
        cfg = replace_at(BASE, {"model.attention": AttentionSpec(Elastic(), KerpleLog(), window=5), "seed": 3})
        lit, fit = module(cfg), trainer(tmp_path, max_steps=1)
        fit.fit(lit, batches(BASE.data.load().train))
        fit.save_checkpoint(tmp_path / "x.ckpt")
        again = LitLM.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
        assert again.cfg == cfg
        for name, value in lit.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], value), name


def test_config_object_and_dict_give_the_same_model():
    cfg = replace_at(BASE, {"model.attention.bias": T5Bias(n_buckets=8)})
    one, other = module(cfg), LitLM(to_dict(cfg), VOCAB, CONTEXT)
    assert one.cfg == other.cfg == cfg
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
