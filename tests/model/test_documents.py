"""Packed documents with a mask: logits, loss and metrics of each token equal those of its single document."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flash_lazy.cpu.library import find_obstacle
from lit_lazy.attention import (
    AffineScaled,
    Alibi,
    ASEntmax,
    AttentionSpec,
    ClippedSoftmax,
    Differential,
    Elastic,
    LearnedAbsolute,
    LearnedBias,
    NoBias,
    NoPosition,
    OutputGate,
    Rope,
    Softmax,
    SSMax,
    Thresholded,
)
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.source_interface import DataSource
from lit_lazy.data.text import Text
from lit_lazy.data.token_dataset import DocumentDataset
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.measure.diagnostics import measure
from lit_lazy.measure.evaluation import evaluate
from lit_lazy.measure.lengths import loss_by_position
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.training.execution_settings import ONE_DEVICE
from lit_lazy.training.module import LitLM
from lit_lazy.training.run import run

VOCABULARY, L = 37, 24
KERNEL = "chunked" if find_obstacle() else "cpu"
LENGTHS = ((5, 1, 18), (24,), (1, 2, 3, 4, 14))
"""Lengths of the documents in each of three windows."""
VARIANTS = {
    "softmax": (AttentionSpec(), Rope()),
    "softmax with a bias": (AttentionSpec(Softmax(), LearnedBias(9, init_std=0.5)), Rope()),
    "elastic": (AttentionSpec(Elastic(), LearnedBias(init_std=0.5)), Rope()),
    "elastic by token, windowed": (AttentionSpec(Elastic(threshold="per_token"), Alibi(), window=4), NoPosition()),
    "elastic renormalised": (AttentionSpec(Elastic(renormalise=True), gate=OutputGate()), LearnedAbsolute()),
    "clipped": (AttentionSpec(ClippedSoftmax(alpha=0.5), LearnedBias(init_std=0.5)), Rope()),
    "ssmax": (AttentionSpec(SSMax(), NoBias(), window=6), Rope()),
    "differential": (AttentionSpec(Differential()), Rope()),
    "thresholded": (AttentionSpec(Thresholded(0.5), LearnedBias(init_std=0.5)), Rope()),
    "affine-scaled": (AttentionSpec(AffineScaled(), LearnedBias(init_std=0.5), window=7), Rope()),
    "asentmax": (AttentionSpec(ASEntmax(), LearnedBias(init_std=0.5)), Rope()),
}


def places():
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])


def model(spec, position, dtype=torch.float64):
    cfg = ModelConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, attention=spec, position=position)
    made = DecoderLM(cfg, VOCABULARY, L, seed=1).to(dtype)
    for name, parameter in made.named_parameters():
        if "attention.normaliser" in name:  # off their initial values
            torch.nn.init.uniform_(parameter, -0.2, 0.9, generator=torch.Generator().manual_seed(2))
    return made


def tokens():
    return torch.randint(VOCABULARY, (len(LENGTHS), L + 1), generator=torch.Generator().manual_seed(0))


def alone(made, sequences):
    """Logits `[B, L, V]` and stats of each row and layer, computed per document."""
    logits, stats = [], []
    for row, lengths in zip(sequences, LENGTHS, strict=True):
        hidden, found = zip(
            *(made.compute_residual(text[None], with_stats=True) for text in row.split(lengths)), strict=True
        )
        logits.append(torch.cat(hidden, 1))
        layers = zip(*found, strict=True)
        stats.append([[torch.cat(field, -1) for field in zip(*layer, strict=True)] for layer in layers])
    return made.head(made.norm(torch.cat(logits))), stats


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_with_a_mask_is_each_document_alone(name):
    made = model(*VARIANTS[name])
    sequences = tokens()[:, :-1]
    expected, by_row = alone(made, sequences)
    found = made(sequences, place=places())
    assert (found - expected).abs().max() < 1e-12
    again, stats = made.compute_residual(sequences, places(), with_stats=True)
    assert (made.head(made.norm(again)) - expected).abs().max() < 1e-12
    for layer, found_stats in enumerate(stats):
        for row, wanted in enumerate(by_row):
            for x, y in zip(found_stats, wanted[layer], strict=True):
                assert (x[row] - y[0]).abs().max() < 1e-12
    assert (made(sequences) - expected).abs().max() > 1e-3  # the mask has an effect
    gradients = []
    for logits in (found, expected):
        made.zero_grad()
        (logits.sin() * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None})
    for parameter, gradient in gradients[0].items():
        assert (gradient - gradients[1][parameter]).abs().max() < 1e-10 * (1 + gradient.abs().max()), parameter


def source():
    sequences = tokens()
    ends = torch.cumsum(torch.tensor([n for lengths in LENGTHS for n in lengths]), 0).numpy()
    data = DocumentDataset(sequences, torch.arange(0, 3 * L, L).numpy(), ends)
    return DataSource("x", VOCABULARY, L, "x", {}, data, data)


def test_evaluation_and_training_use_the_mask():
    made, train = model(*VARIANTS["elastic"]), TrainConfig(batch_size=2)
    data = source()
    batch = data.train.__getitems__([0, 1, 2])
    assert torch.equal(batch["place"], places())
    logits, by_row = alone(made, batch["tokens"])
    nll = token_nll(logits, batch["targets"]).double()
    found = evaluate(made, data, train.precision, train.batch_size)
    assert found["loss/val"] == pytest.approx(nll.mean().item(), rel=1e-6)
    late = places() >= 7
    first = [layer[2][0][:, late[row]] for row, layers in enumerate(by_row) for layer in layers]
    assert found["sink/first_key_weight"] == pytest.approx(torch.cat(first, -1).mean().item(), rel=1e-6)
    zeros = sum(layer[3].sum().item() for layers in by_row for layer in layers)
    visible = (places() + 1).sum().item() * 2 * 4  # layers, heads
    assert found["sparsity/zero"] == pytest.approx(zeros / visible, rel=1e-6)

    cfg = RunConfig(Text(), ModelConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48), train)
    module = LitLM.create(cfg, VOCABULARY, L)
    module.model = made
    module.set_execution(ONE_DEVICE)
    module._trainer = SimpleNamespace(global_step=0)
    assert module.training_step(batch, 0).item() == pytest.approx(nll.mean().item(), rel=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_diagnostics_look_at_the_first_document_of_each_window(name):
    """The loss equals that of single documents, independent of later ones."""
    made = model(*VARIANTS[name], torch.float32)
    sequences, place = tokens(), places()
    batch = {"tokens": sequences[:, :-1], "targets": sequences[:, 1:], "place": place}
    found = measure(made, [batch]).arrays
    first = place == torch.arange(L)
    nll = token_nll(alone(made, batch["tokens"])[0], batch["targets"]).double().masked_fill(~first, 0)
    expected = (nll.sum(0) / first.sum(0)).detach().numpy()
    assert found["loss/by_position"] == pytest.approx(expected, abs=1e-5)
    assert loss_by_position(made, batch).numpy() == pytest.approx(expected, abs=1e-5)
    metrics = Diagnostics(found).metrics()
    assert metrics["loss/sample"] == pytest.approx((nll.sum() / first.sum()).item(), rel=1e-5)
    assert metrics["mass/all"] == pytest.approx(np.average(found["mass/row"].mean((0, 1)), weights=first.sum(0)))
    assert found["maps/weights"].shape[1:] == (L, L)  # from the second window, which is a single document

    other = torch.randint(VOCABULARY, first.shape, generator=torch.Generator().manual_seed(1))
    replaced = {"tokens": torch.where(first, batch["tokens"], other), "targets": batch["targets"], "place": place}
    again = measure(made, [replaced]).arrays
    for array in found:
        np.testing.assert_allclose(again[array], found[array], rtol=1e-5, atol=1e-6, err_msg=array)

    whole = {"tokens": batch["tokens"][1:2], "targets": batch["targets"][1:2]}
    by_mask = measure(made, [whole | {"place": place[1:2]}]).arrays
    for array, values in measure(made, [whole]).arrays.items():
        np.testing.assert_array_equal(by_mask[array], values, err_msg=array)


def test_a_training_with_a_mask_learns_and_repeats_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{i} {"abcdefgh" * (i % 9)}"}}\n' for i in range(300)))
    data = Text(str(tmp_path / "texts.jsonl"), context_length=L, validation_windows=8, document_mask=True)
    lazy = ModelConfig(d_model=16, n_layers=1, n_heads=2, d_ff=32, attention=AttentionSpec(Elastic(), LearnedBias()))
    steps = TrainConfig(steps=12, batch_size=8, warmup_steps=2, val_every=3, checkpoint_every=3, log_every=2)
    cfg = RunConfig(data, lazy, steps)
    assert "place" in data.load().train[0]
    found = run(cfg, tmp_path / "one")
    assert found.metrics["loss/val"] < found.metrics["init/loss/val"]
    assert found.metrics == run(cfg, tmp_path / "two").metrics
    assert found.labels == {"backend": KERNEL}
    softmax = replace(cfg, model=replace(lazy, attention=AttentionSpec()))
    assert run(softmax, tmp_path / "softmax").labels == {"backend": KERNEL}  # sdpa does not support documents
