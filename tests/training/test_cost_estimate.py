"""A dry run predicts the training's parameters, tokens, FLOPs and memory."""

import logging
import re
from dataclasses import replace

import pytest
import tokenizers
import torch
from mistakes import expect_refusal
from test_run import LAZY, config

from lit_lazy.attention import AttentionSpec, Entmax15, Softmax
from lit_lazy.command.main import main
from lit_lazy.config.overrides import apply_overrides
from lit_lazy.config.schema import ModelConfig
from lit_lazy.config.user_files import experiment
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import head_nll
from lit_lazy.support.console import format_duration
from lit_lazy.support.machine import measure_saved_bytes
from lit_lazy.training import cost_estimate
from lit_lazy.training.check_before_run import prepare
from lit_lazy.training.cost_estimate import estimate_cost, require_fit
from lit_lazy.training.execution_settings import ONE_DEVICE, Execution
from lit_lazy.training.ineffective_settings import list_ineffective
from lit_lazy.training.run import run


def test_counts_are_those_of_the_run():
    cfg = config()
    source = prepare(cfg)
    cost = estimate_cost(cfg, source.outline, Execution(devices=2, micro_batch=2))
    model = DecoderLM(cfg.model, source.vocab_size, source.context_length, seed=0)
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert cost.tokens == 20 * 8 * 16
    assert cost.parts == 2
    assert cost.memory["weights"] == cost.memory["gradients"] == cost.memory["optimiser"] // 2 == 4 * cost.parameters
    spread = estimate_cost(cfg, source.outline, Execution(devices=2, strategy="fsdp"))
    assert spread.memory["weights"] == 2 * cost.parameters


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", [LAZY, AttentionSpec(Softmax()), AttentionSpec(Entmax15())], ids=repr)
def test_the_activations_of_a_whole_model(attention, precision):
    """Within 15 % of a prediction from one block and few tokens."""
    model = ModelConfig(d_model=64, n_layers=4, n_heads=4, d_ff=160, attention=attention, tie_embeddings=False)
    cfg = replace(config(precision=precision), model=model)
    cfg = replace(cfg, data=replace(cfg.data, context_length=256, validation_sequences=4))
    source = prepare(cfg)
    predicted = estimate_cost(cfg, source.outline, ONE_DEVICE).memory
    made = DecoderLM(model, source.vocab_size, source.context_length, seed=0)
    batch = source.train.__getitems__(list(range(8)))
    tokens = torch.cat((batch["tokens"], batch["targets"][:, -1:]), 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        saved = measure_saved_bytes(
            lambda: head_nll(made.compute_hidden(tokens[:, :-1]), made.head.weight, tokens[:, 1:]).mean(),
            [*made.parameters(), *made.buffers()],
        )
    assert predicted["activations"] == pytest.approx(saved - predicted["logits"] / 3, rel=0.15)


def test_what_cannot_fit_is_refused_with_its_parts():
    cfg = config()
    cost = estimate_cost(cfg, prepare(cfg).outline, ONE_DEVICE)
    cost = replace(cost, memory={"weights": 10**15, "activations": 2 * 10**15})
    with pytest.raises(ValueError, match=r"--micro-batch=None: needs 3.0 PB \(weights 1.0 PB, activations 2.0 PB\)"):
        require_fit(cost, ONE_DEVICE)


WINDOW, BIAS, RULE = (f"--model.attention.{name}" for name in ("window", "bias", "normaliser"))
NOTED = ("model.", "train.")


def unused(setting, same):
    return f"{setting}: has no effect on 16 tokens in 1 layer: outputs and gradients are those with {same}"


OF_LITTLE_EFFECT = [
    ([f"{WINDOW}=15", f"{BIAS}=LearnedBias", f"{BIAS}.length=14"], []),
    # FIRE's length has an effect.
    ([f"{WINDOW}=99", f"{BIAS}=Fire", f"{BIAS}.length=99"], [unused(f"{WINDOW}=99", "None")]),
    (
        [f"{WINDOW}=16", f"{BIAS}=LearnedBias", f"{BIAS}.length=99"],
        [unused(f"{WINDOW}=16", "None"), unused(f"{BIAS}.length=99", "None")],
    ),
    (
        ["--model.position=Rope", "--model.position.skip_layers=[0,1]", "--model.attention.full_layers=[0]"],
        [unused("--model.position.skip_layers=(0, 1)", "(0,)"), unused("--model.attention.full_layers=(0,)", "()")],
    ),
    ([f"{RULE}=OffByOne", f"{RULE}.renormalise=true"], [unused(f"{RULE}=OffByOne", "Softmax")]),
    # These differ from the default in one of two places, or only while the model trains.
    ([f"{RULE}=Elastic", f"{RULE}.tau_lr_scale=0.5"], []),
    (["--model.attention.gate=OutputGate", "--model.attention.gate.starts_open=true"], []),
    ([f"{RULE}=Elastic", f"{RULE}.threshold=seq_len"], []),
    (
        ["--train.steps=10", "--train.warmup_steps=6", "--train.ema_decay=0.95"],
        [
            "--train.warmup_steps=6: leaves 4 of 10 steps at the full rate and below; 1 would be a tenth",
            "--train.ema_decay=0.95: averages about 20 steps and the first ones; a smaller one forgets these",
        ],
    ),
]


@pytest.mark.parametrize(("given", "noted"), OF_LITTLE_EFFECT, ids=str)
def test_a_setting_of_little_effect_is_noted(given, noted):
    cfg = apply_overrides(experiment("backcopy_tiny"), given)[0]
    assert sorted(list_ineffective(cfg, 16)) == sorted(setting[2:] for setting in noted)


@pytest.mark.parametrize(("given", "noted"), [OF_LITTLE_EFFECT[1], OF_LITTLE_EFFECT[-1]], ids=str)
def test_it_is_said_once(given, noted, tmp_path, capsys, caplog):
    """By a training, its dry run and that of a grid, whose two rows have their own biases."""
    expected = [setting[2:] for setting in noted]
    grid = ["ablate", "run", "table2", "--base", "backcopy_tiny", "--rows", "softmax,lazy", "--seeds", "0"]
    commands = [(["train", "backcopy_tiny", *given], expected)]
    if f"{WINDOW}=99" in given:
        commands.append(([*grid, given[0]], expected[:1]))
    for command, wanted in commands:
        assert main([*command, "--dry-run"]) == 0
        lines = [line.removeprefix("note:").strip() for line in capsys.readouterr().out.splitlines()]
        assert sorted(line for line in lines if line.startswith(NOTED)) == sorted(wanted)
    with caplog.at_level(logging.INFO, "lit_lazy.training.run"):
        run(apply_overrides(experiment("backcopy_tiny"), given)[0], tmp_path)
    assert sorted(said for said in caplog.messages if said.startswith(NOTED)) == sorted(expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU: the speed of one is known")
def test_a_small_training_is_priced_in_units_that_fit(tmp_path, capsys):
    """Also for more devices than this machine has; nothing is created."""
    dry = ["train", "backcopy_tiny", "--dry-run", "--runs", str(tmp_path / "runs")]
    assert main([*dry, "--devices", "8"]) == 0
    assert "on each of 8 devices 1 micro-batch of 1 sequence" in capsys.readouterr().out
    assert main(dry) == 0
    out = capsys.readouterr().out
    assert "2,880 parameters; attention: Softmax, NoBias\n" in out
    lines = dict(line.split(":", 1) for line in out.splitlines() if ":" in line)
    assert "on 1 device 1 micro-batch of " in lines["step"]
    assert "weights 11.5 kB, " in lines["memory"]
    assert "69.1 kB while it runs" in lines["disk"]  # two of weights and two moments
    timed = r" +here about 0:\d\d, from 5 timed steps on one device; less than a minute on 1 H200, at an assumed 20%.*"
    assert re.fullmatch(timed, lines["time"])
    assert not (tmp_path / "runs").exists()


def test_340m_is_priced_without_a_network(tmp_path, monkeypatch, capsys):
    """Its text may be missing, and for a training its tokenizer too, whose vocabulary has the usual size."""
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "cache"))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.add_special_tokens(["<s>", "</s>", *(f"<{i}>" for i in range(31_998))])
    made.save(str(tmp_path / "32k.json"))
    dry, tokenizer = ["--dry-run", "--devices", "8", "--micro-batch", "4"], f"--data.tokenizer={tmp_path}/32k.json"

    def price(*command):
        assert main([*command, *dry]) == 0
        return capsys.readouterr().out

    elsewhere = price("train", "fineweb_340m", "--gpu", "a100")
    assert "note:   data.tokenizer='gla-tokenizer.json' is not here; a vocabulary of 32,000 is assumed\n" in elsewhere
    hours = re.search(r"(\S+) h on 8 A100, (\d+) GPU-hours, at an assumed 20% of 312 TFLOP/s each\n", elsewhere)
    assert hours
    assert float(hours[1]) * 8 == pytest.approx(float(hours[2]), rel=0.01)
    out = price("train", "fineweb_340m", tokenizer)
    assert out.splitlines()[:4] == elsewhere.splitlines()[:4]
    assert "374,064,512 parameters" in out
    assert "the training sees 16,106,127,360 tokens" in out
    assert "4 micro-batches of 4 sequences" in out
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("place")
def test_a_gpu_is_assumed_by_a_dry_run_only(capsys):
    for given, said in ((["--dry-run", "--gpu", "v9"], "--gpu='v9': must be one of H200, "),
                        (["--gpu", "h100"], "--gpu h100: is assumed by --dry-run only")):  # fmt: skip
        assert said in expect_refusal(["train", "backcopy_tiny", *given], capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_large_grid_is_priced_for_the_cpu_that_trains_it(monkeypatch, capsys):
    """And not for a GPU that is not there, which made six core-hours three minutes."""
    monkeypatch.setattr(cost_estimate, "MOST_FLOPS_OF_A_TIMED_STEP", 0.0)
    monkeypatch.setattr(cost_estimate, "measure_cpu_flops", lambda: 1e6)
    command = ["ablate", "run", "table2", "--base", "backcopy_tiny", "--rows", "softmax", "--dry-run", "--workers", "2"]
    assert main([*command, "--seeds", "0,1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    cfg = experiment("backcopy_tiny")
    seconds = estimate_cost(cfg, prepare(cfg).outline, Execution()).flops / 1e6
    assert f"about {format_duration(seconds)} of training with 2 workers" in out
    assert "the speed of a product of matrices here" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_dry_run_prices_what_another_machine_would_train(monkeypatch, capsys):
    """This machine has neither the memory nor the backend, which is said."""
    monkeypatch.setattr("flash_lazy.fused.configurations.INTERPRETED", False)
    monkeypatch.setattr("lit_lazy.support.machine.measure_total_memory", lambda: 10**9)
    large, triton = ["--model.d_model=4096", "--model.n_layers=80", "--model.n_heads=32"], "--model.backend=triton"
    missing = "model.backend='triton' needs a GPU, and this machine has none; leave it at auto, or give chunked"
    for given in ([*large, triton], large):
        assert main(["train", "backcopy_tiny", *given, "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert (f"here:   {missing}\n" in out) == ("here:" in out) == (triton in given)
        assert "backcopy_tiny: 5,400,895,488 parameters" in out
        of_cpu = r"time: +here about (\d+:)?\d+:\d\d, from the speed of a product of matrices here; "
        assert bool(re.search(of_cpu, out)) == (given == large)
