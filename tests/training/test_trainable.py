"""Frozen weights are neither changed nor paid for; a run from trained weights takes what it shares with them."""

import copy
import logging
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from test_run import LAZY, RAMP, config, run_until_killed, weights

from lit_lazy.attention import (
    AttentionSpec,
    Elastic,
    LearnedBias,
    Normaliser,
    NormaliserModule,
    SinkLogit,
    SSMax,
    Thresholded,
)
from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import ModelConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.model.decoder import DecoderLM, flops_per_token
from lit_lazy.optim import SGD, AdamW, Muon
from lit_lazy.training import trainer
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile, read_lines
from lit_lazy.training.check_before_run import prepare
from lit_lazy.training.checkpoints import change_model, write_untrained
from lit_lazy.training.cost_estimate import estimate_cost
from lit_lazy.training.execution_settings import ONE_DEVICE, Execution
from lit_lazy.training.ineffective_settings import check_init_from
from lit_lazy.training.module import LitLM
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import FINAL_CHECKPOINT, RunResult
from lit_lazy.training.trained_parameters import build_optimizer, freeze_others, lr_factor
from lit_lazy.training.trainer import build_module, fit

PATTERNS = ("blocks.*.attention.q.weight", "*.normaliser.tau", "*.bias.table", "*norm.weight")


def adapting(trained, **train):
    return replace(config(LAZY, trainable=PATTERNS, **train), init_from=trained)


def is_trained(name):
    return name.endswith(("q.weight", "tau", "table", "norm.weight"))


@pytest.mark.parametrize("optimiser", [AdamW(), SGD(), Muon()], ids=lambda one: type(one).__name__)
def test_the_frozen_weights_are_bit_equal_and_have_no_state(trained, tmp_path, optimiser):
    betas = {} if optimiser.adaptive else {"betas": (0.9, 0.95)}
    cfg = adapting(trained, optimiser=optimiser, ema_decay=0.8, weight_decay=0.1, lr=1e-2, **betas)
    source = prepare(cfg)
    module = build_module(cfg, source, ONE_DEVICE)
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}
    fit(module, source, tmp_path)
    after = dict(module.model.named_parameters())
    moved = {name for name in before if is_trained(name)}
    assert {name for name in before if not torch.equal(before[name], after[name])} == moved
    assert {name for name, p in after.items() if p.grad is not None} <= moved
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    (state,) = checkpoint["optimizer_states"]
    assert len(state["state"]) == sum(len(group["params"]) for group in state["param_groups"]) == len(moved)
    assert checkpoint["weight_average"].keys() == moved
    stored = [value for entry in state["state"].values() for value in entry.values() if value.dim()]
    assert {value.shape for value in stored} == {after[name].shape for name in moved}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_freeze_the_same(trained, tmp_path, strategy):
    cfg, execution = adapting(trained), Execution(devices=2, strategy=strategy)
    run(cfg, tmp_path / "2", logger=MetricFile(tmp_path / "2"), keep_checkpoint=True, execution=execution)
    run(cfg, tmp_path / "1", keep_checkpoint=True, execution=Execution(micro_batch=4))
    start = torch.load(trained, weights_only=True)["state_dict"]
    for name, value in weights(tmp_path / "2").items():
        if is_trained(name):
            torch.testing.assert_close(value, weights(tmp_path / "1")[name], rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(value, start[name]), name


def make_model(**changes):
    return DecoderLM(ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=32, **changes), 17, 16, seed=0)


def test_a_tied_head_is_trained_by_either_name():
    for pattern in ("head.weight", "embedding.weight"):
        model = make_model()
        assert "embedding.weight" not in freeze_others(model, [pattern])
        assert model.head.weight.requires_grad
    assert freeze_others(make_model(), []) == set()


def test_what_a_module_does_not_train_stays_so():
    """And needs no value from init_from: it is a constant, not random."""
    model = make_model(attention=AttentionSpec(Elastic(learn_tau=False)))
    frozen = freeze_others(model, ["*.q.weight", "*0*.tau"])
    assert not any("tau" in name for name in frozen)
    assert [attention.normaliser.tau.requires_grad for attention in model.attentions] == [False, False]


def test_muon_without_matrices_and_without_others():
    for patterns in (["*norm.weight"], ["*.q.weight"]):
        model, cfg = make_model(), config(trainable=tuple(patterns), optimiser=Muon()).train
        freeze_others(model, patterns)
        (group,) = build_optimizer(model, cfg).param_groups
        assert len(group["params"]) == (5 if "norm" in patterns[0] else 2)


class TestCost:
    def test_state_is_that_of_the_trained_parameters(self, trained):
        cfg = adapting(trained, ema_decay=0.5)
        source = prepare(cfg)
        cost = estimate_cost(cfg, source.outline, ONE_DEVICE)
        model = LitLM.create(cfg, source.vocab_size, source.context_length).model
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert 0 < count < cost.parameters == sum(p.numel() for p in model.parameters())
        assert cost.memory["weights"] == 4 * cost.parameters
        assert cost.memory["gradients"] == cost.memory["average"] == cost.memory["optimiser"] // 2 == 4 * count
        assert cost.disk == 2 * 4 * (cost.parameters + 3 * count)

    def test_a_frozen_matrix_costs_four_products_a_token(self):
        model = make_model()
        whole = flops_per_token(model, 16)
        freeze_others(model, ["*norm.weight"])
        matrices = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
        assert flops_per_token(model, 16) == whole - 2 * matrices


def test_a_variant_starts_with_what_it_shares(trained, caplog):
    with caplog.at_level(logging.INFO):
        own = build(replace(config(LAZY), init_from=trained)).state_dict()
    taken = torch.load(trained, weights_only=True)["state_dict"]
    fresh = build(config(LAZY)).state_dict()
    assert all(torch.equal(own[name], value) for name, value in taken.items())
    new = own.keys() - taken.keys()
    assert {name.rsplit(".", 2)[-1] for name in new} == {"tau", "table"}
    assert all(torch.equal(own[name], fresh[name]) for name in new)
    assert "are loaded; new: blocks.0.attention.bias.table" in caplog.text
    assert "unused: none" in caplog.text


def test_a_ramp_starts_at_its_own_beginning(lazy):
    """Not at the trained model's final tau."""
    module = build(replace(config(AttentionSpec(RAMP, LearnedBias())), init_from=lazy))
    assert [attention.normaliser.tau.tolist() for attention in module.model.attentions] == [[0.0, 0.0]] * 2
    own, taken = module.state_dict(), torch.load(lazy, weights_only=True)["state_dict"]
    assert {name.rsplit(".", 1)[-1] for name in own if not torch.equal(own[name], taken[name])} == {"tau"}


def test_it_is_in_the_key_by_its_content(trained, tmp_path):
    """By its weights and its model's settings, not by its path or by what else it holds, such as settings of a newer
    version. Without init_from the key is unchanged."""
    fingerprint = prepare(config()).fingerprint
    elsewhere = Path(shutil.copy(trained, tmp_path / "elsewhere.ckpt"))
    keys = [cell_key(replace(config(), init_from=path), fingerprint) for path in (trained, str(elsewhere), None)]
    assert keys[0] == keys[1] != keys[2]
    assert keys[2] == "27a179faa087"
    content = torch.load(trained, weights_only=True)
    settings = content["hyper_parameters"]
    older, other = copy.deepcopy(settings), copy.deepcopy(settings)
    del older["config"]["diagnosed_sequences"]
    other["config"]["model"]["norm_eps"] = 1e-3
    name, value = next(iter(content["state_dict"].items()))
    for changed, same in (
        (content | {"hyper_parameters": older, "optimizer_states": []}, True),
        (content | {"hyper_parameters": other}, False),
        (content | {"state_dict": content["state_dict"] | {name: value + 1}}, False),
    ):
        torch.save(changed, elsewhere)
        assert (cell_key(replace(config(), init_from=str(elsewhere)), fingerprint) == keys[0]) is same


def test_a_run_resumes_bit_for_bit_also_when_its_weights_have_moved(trained, finished, tmp_path):
    cfg = adapting(trained, optimiser=Muon(), ema_decay=0.8)
    whole = run(cfg, tmp_path / "whole", keep_checkpoint=True)
    run_until_killed(cfg, tmp_path / "killed", 13)
    moved = replace(cfg, init_from=str(shutil.copy(trained, tmp_path / "moved.ckpt")))
    run(moved, tmp_path / "killed", keep_checkpoint=True)
    assert not list((tmp_path / "killed").glob("*.damaged")), "it began again"
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "killed")[name]), name
    plain = RunResult.read(finished)
    assert plain.metrics["init/loss/val"] > whole.metrics["init/loss/val"]


@pytest.fixture(scope="module")
def lazy(tmp_path_factory):
    """A final.ckpt of Lazy Attention."""
    run(config(LAZY, steps=3), folder := tmp_path_factory.mktemp("lazy"), keep_checkpoint=True)
    return str(folder / FINAL_CHECKPOINT)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"tau_init": 3.0}, "normaliser.tau_init=3.0: has no effect, as its parameters are loaded from"),
        ({"tau_init": 3.0, "tau_ramp": 0.5}, None),
        ({"tau_init": 3.0, "threshold": "per_token"}, None),
        ({"tau_lr_scale": 2.0}, None),
    ],
)
def test_an_initial_value_of_what_is_loaded_is_refused(changes, refused, lazy):
    """Otherwise the rows of an axis over it would be one training, and tie."""
    spec = replace(LAZY, normaliser=replace(LAZY.normaliser, **changes))
    cfg = replace(config(spec), init_from=lazy)
    for check in (lambda: check_init_from(cfg, prepare(cfg).outline), lambda: build(cfg)):
        with nullcontext() if refused is None else pytest.raises(ValueError, match=refused):
            check()


class Scaled(NormaliserModule):
    def __init__(self, scale, persistent):
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale), persistent)

    def weights(self, scores, rows):  # noqa: ARG002
        return (self.scale * scores).softmax(-1)


@dataclass(frozen=True)
class OwnScale(Normaliser):
    scale: float = 1.0
    persistent: bool = True

    def build(self, shape):  # noqa: ARG002
        return Scaled(self.scale, self.persistent)


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        (SSMax(), SSMax(init=5.0), "init=5.0"),
        (SinkLogit(), SinkLogit(init=5.0), "init=5.0"),
        (OwnScale(), OwnScale(8.0), "scale=8.0"),
        (OwnScale(persistent=False), OwnScale(8.0, persistent=False), None),
    ],
)
def test_no_setting_is_silently_replaced_by_what_is_loaded(before, after, refused, tmp_path):
    """Whether its class declares that it is a first value or not, and whether a training or a change loads it."""
    made, cfg = (config(AttentionSpec(normaliser)) for normaliser in (before, after))
    module = LitLM.create(made, 17, 16)
    write_untrained(tmp_path / "before.ckpt", made, 17, 16, module.model.state_dict())
    given = replace(cfg, init_from=str(tmp_path / "before.ckpt"))
    for load in (lambda: change_model(module, cfg), lambda: build(given)):
        said = f"^model.attention.normaliser.{refused}: has no effect, as its parameters are loaded"
        with nullcontext() if refused is None else pytest.raises(ValueError, match=said):
            changed = load()
            assert changed.model.attentions[0].normaliser.scale == 8


def test_a_setting_with_another_effect_is_taken(tmp_path):
    """An embedding that is no longer the head, and a rule of more keys than its former setting allows."""
    for before, changes in ((config(), {"model.tie_embeddings": False}), (of(Thresholded()), {RULE: Thresholded(0.5)})):
        path = tmp_path / "before.ckpt"
        write_untrained(path, before, 17, 16, LitLM.create(before, 17, 16).model.state_dict())
        length = {"data.context_length": 64} if RULE in changes else {}
        build(replace_at(before, changes | length | {"init_from": str(path)}))


def of(normaliser):
    return config(AttentionSpec(normaliser))


RULE = "model.attention.normaliser"


def test_weights_that_another_model_reads_otherwise_are_new(tmp_path, caplog):
    """Those of heads of another width, and a head where the embedding is the head."""
    untied = replace_at(config(), {"model.tie_embeddings": False})
    path = tmp_path / "untied.ckpt"
    write_untrained(path, untied, 17, 16, LitLM.create(untied, 17, 16).model.state_dict())
    content = torch.load(path, weights_only=True)["state_dict"]
    with caplog.at_level(logging.INFO):
        build(replace_at(untied, {"model.n_heads": 4, "model.attention": AttentionSpec(), "init_from": str(path)}))
        module = build(replace_at(untied, {"model.tie_embeddings": True, "init_from": str(path)}))
    assert "attention.k.weight" in caplog.messages[0].partition("new: ")[2]
    assert "unused: head.weight" in caplog.messages[-1]
    assert torch.equal(module.model.head.weight, content["model.embedding.weight"])


def build(cfg):
    return trainer.build_module(cfg, prepare(cfg), Execution())


def test_an_initial_value_of_what_is_new_counts(trained):
    """Also one of the whole model, as long as it draws a parameter that is new."""
    changed = replace(config(LAZY).model, init_std=0.5)
    with pytest.raises(ValueError, match=r"model\.init_std=0\.5: has no effect"):
        build(replace(config(LAZY), model=changed, init_from=trained))
    build(replace(config(LAZY), model=replace(changed, d_ff=24), init_from=trained))


def test_the_logged_rate_is_the_schedules(trained, tmp_path):
    """Not that of tau, here the only group, which has a factor of its own."""
    attention, only_tau = AttentionSpec(Elastic(tau_lr_scale=10.0)), {"trainable": ("*.tau",), "log_every": 1}
    cfg = replace(config(attention, steps=5, **only_tau), init_from=trained)
    run(cfg, tmp_path, logger=MetricFile(tmp_path))
    logged = [line.metrics["train/lr"] for line in read_lines(tmp_path / METRICS) if "train/lr" in line.metrics]
    assert logged == [cfg.train.lr * lr_factor(step, cfg.train) for step in range(5)]
