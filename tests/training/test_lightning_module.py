"""Parameter groups (weight decay, learning rates), the schedule and the loss."""

import math

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lit_lazy.attention import AttentionSpec, Elastic, Fire, LearnedAbsolute
from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import load_module
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.support.names_to_paths import find
from lit_lazy.training.module import LitLM
from lit_lazy.training.parameter_groups import build_parameter_groups, lr_factor

VOCAB, CONTEXT = 11, 12
BASE = RunConfig(
    Backcopy(vocab_size=VOCAB - 1, context_length=CONTEXT, train_sequences=32, validation_sequences=8),
    ModelConfig(d_model=8, n_layers=2, n_heads=2, d_ff=12, tie_embeddings=False),
    TrainConfig(steps=20, warmup_steps=4, lr=0.01, weight_decay=0.1, log_every=1, val_every=100),
)
TIED = {"model.tie_embeddings": True}
OTHERS = {"model.position": LearnedAbsolute(), "model.attention": AttentionSpec(Elastic(), Fire())}
VARIANTS = {
    **{row.name: row.changes for row in load_module(find("ablations", "table2")).ablation.all_rows},
    "tied": TIED,
    "tied, FIRE, learned positions": TIED | OTHERS,
    "frozen tau": {"model.attention.normaliser": Elastic(learn_tau=False)},
}
MATRICES = {f"attention.{name}.weight" for name in "qkv"} | {
    *("attention.out.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.down.weight")
}


def module(cfg=BASE):
    return LitLM.create(cfg, VOCAB, CONTEXT)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_parameter_groups(changes):
    """Every trainable parameter is in one group; only the blocks' matrices and an untied head decay."""
    cfg = replace_at(BASE, changes).model
    model = DecoderLM(cfg, VOCAB, CONTEXT, 0)
    groups = build_parameter_groups(model, BASE.train)
    names = {id(p): name for name, p in model.named_parameters()}
    grouped = [names[id(p)] for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    head = set() if cfg.tie_embeddings else {"head.weight"}
    assert decayed == {f"blocks.{i}.{name}" for i in range(2) for name in MATRICES} | head
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}
    scale = getattr(cfg.attention.normaliser, "tau_lr_scale", 1.0)
    for group in groups:
        for parameter in group["params"]:
            is_tau = names[id(parameter)].endswith("normaliser.tau")
            assert group["lr"] == pytest.approx(0.01 * (scale if is_tau else 1))


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


def test_the_loss_is_minus_the_log_probability_in_fp32():
    logits = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(1))
    nll = token_nll(logits, targets)
    for b in range(2):
        for t in range(5):
            p = logits[b, t].double().exp()
            assert nll[b, t].item() == pytest.approx(-math.log(p[targets[b, t]] / p.sum()), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*")
def test_validation_is_the_mean_over_tokens_and_the_excess_over_the_oracle(tmp_path):
    """Also if the last batch is smaller."""
    data, lit = BASE.data.load().validation, module()
    loader = DataLoader(data, batch_size=3, collate_fn=lambda batch: batch)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet)
    (logged,) = trainer.validate(lit, loader, verbose=False)
    whole = data.__getitems__(list(range(8)))
    with torch.no_grad():
        nll = token_nll(lit.model.cpu()(whole["tokens"]), whole["targets"]).double()
    assert logged["val/loss"] == pytest.approx(nll.mean().item(), rel=1e-6)
    assert logged["val/excess"] == pytest.approx((nll - whole["oracle_nll"]).mean().item(), rel=1e-6)
