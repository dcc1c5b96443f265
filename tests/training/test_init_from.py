"""Runs that start from the weights of a trained model: the loaded weights and the run's key."""

import copy
import logging
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_run import LAZY, RAMP, config, run_until_killed, weights

from lit_lazy.attention import AttentionSpec, LearnedBias
from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.training import trainer
from lit_lazy.training.check_before_run import prepare
from lit_lazy.training.check_settings import check_init_from
from lit_lazy.training.execution import Execution
from lit_lazy.training.module import LitLM
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import FINAL_CHECKPOINT, RunResult


def test_a_variant_starts_with_what_it_shares(trained: str, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_ramp_starts_at_its_own_beginning(lazy: str) -> None:
    """Not at the trained model's final tau."""
    module = build(replace(config(AttentionSpec(RAMP, LearnedBias())), init_from=lazy))
    assert [attention.normaliser.tau.tolist() for attention in module.model.attentions] == [[0.0, 0.0]] * 2
    own, taken = module.state_dict(), torch.load(lazy, weights_only=True)["state_dict"]
    assert {name.rsplit(".", 1)[-1] for name in own if not torch.equal(own[name], taken[name])} == {"tau"}


def test_it_is_in_the_key_by_its_content(trained: str, tmp_path: Path) -> None:
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


def test_a_run_from_weights_resumes_also_when_they_have_moved(trained: str, finished: Path, tmp_path: Path) -> None:
    cfg = replace(config(LAZY), init_from=trained)
    whole = run(cfg, tmp_path / "whole", keep_checkpoint=True)
    run_until_killed(cfg, tmp_path / "killed", 13)
    moved = replace(cfg, init_from=str(shutil.copy(trained, tmp_path / "moved.ckpt")))
    run(moved, tmp_path / "killed", keep_checkpoint=True)
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "killed")[name]), name
    plain = RunResult.read(finished)
    assert plain.metrics["init/loss/val"] > whole.metrics["init/loss/val"]


@pytest.fixture(scope="module")
def lazy(tmp_path_factory: pytest.TempPathFactory) -> str:
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
def test_an_initial_value_of_what_is_loaded_is_refused(changes: dict[str, Any], refused: str | None, lazy: str) -> None:
    """Otherwise the rows of an axis over it would be one training, and tie."""
    spec = replace(LAZY, normaliser=replace(LAZY.normaliser, **changes))
    cfg = replace(config(spec), init_from=lazy)
    for check in (lambda: check_init_from(cfg, prepare(cfg).outline), lambda: build(cfg)):
        with nullcontext() if refused is None else pytest.raises(ValueError, match=refused):
            check()


def build(cfg: RunConfig) -> LitLM:
    return trainer.build_module(cfg, prepare(cfg), Execution())


def test_an_initial_value_of_what_is_new_counts(trained: str) -> None:
    """Also one of the whole model, as long as a parameter of it is new."""
    changed = replace(config(LAZY).model, init_std=0.5)
    build(replace(config(LAZY), model=changed, init_from=trained))
    same = replace(changed, attention=AttentionSpec())
    with pytest.raises(ValueError, match=r"model\.init_std=0\.5: has no effect"):
        build(replace(config(LAZY), model=same, init_from=trained))
