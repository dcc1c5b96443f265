"""Runs on data where only some targets count: only these enter training, validation, metrics and arrays."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lit_lazy.attention import Elastic
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import load_experiment
from lit_lazy.data import IGNORED, TokenDataset
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.measure.diagnostics import evaluation_mode
from lit_lazy.measure.evaluation import evaluate
from lit_lazy.measure.lengths import Lengths, compute_length_metrics, loss_by_position
from lit_lazy.model.loss import mean_nll, token_nll
from lit_lazy.support.names_to_paths import find
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile, read_lines
from lit_lazy.training.checkpoints import load
from lit_lazy.training.execution_settings import Execution
from lit_lazy.training.module import LitLM
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import DIAGNOSTICS, FINAL_CHECKPOINT

MQAR = {
    "data.vocab_size": 20,
    "data.context_length": 16,
    "data.pairs": 3,
    "data.train_sequences": 64,
    "data.validation_sequences": 24,
    "model.d_model": 16,
    "train.steps": 6,
    "train.batch_size": 8,
    "train.val_every": 3,
}


class TestMean:
    def test_is_that_of_the_targets_that_count(self):
        draw = torch.Generator().manual_seed(0)
        logits = torch.randn(3, 5, 7, generator=draw, requires_grad=True)
        targets = torch.randint(7, (3, 5), generator=draw)
        targets[:, 1:4] = IGNORED
        nll = token_nll(logits, targets)
        counted = targets != IGNORED
        loss = mean_nll(nll, targets)
        assert loss.item() == pytest.approx(token_nll(logits[counted][None], targets[counted][None]).mean().item())
        loss.backward()
        assert (logits.grad[~counted] == 0).all()
        assert (logits.grad[counted] != 0).all()

    def test_has_the_bits_of_a_plain_mean_where_all_count(self):
        """Including gradients, so that runs of earlier versions are reproduced."""
        for shape in ((32, 64), (7, 255), (3, 17)):
            nll = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            found = []
            for mean in (torch.mean, lambda x: mean_nll(x, torch.zeros(x.shape, dtype=torch.long))):
                leaf = nll.clone().requires_grad_()
                loss = mean(leaf)
                (loss / 3).backward()
                found.append((loss.detach(), leaf.grad))
            assert torch.equal(found[0][0], found[1][0])
            assert torch.equal(found[0][1], found[1][1])


def test_where_nothing_is_predicted_no_loss_and_no_accuracy_counts():
    """Whatever a source's groups and oracle hold there; in the curve as at the end."""
    cfg = load_experiment(find("experiments", "recall_tiny"))
    source = cfg.data.load()
    module, held = LitLM.create(cfg, source.vocab_size, source.context_length), source.validation
    before = held.targets == IGNORED
    rows = {"present": held.positions["present"] | before, "absent": before}
    loose = TokenDataset(held.sequences, rows | {"oracle_nll": 1.0 * before}, held.targets)
    found, expected = (evaluate(module.model, replace(source, validation=x), "fp32", 5) for x in (loose, held))
    for name in ("loss/excess", "loss/excess_present", "accuracy/present"):
        assert found[name] == expected[name]
    assert not found.keys() & {"loss/excess_absent", "accuracy/absent"}
    curve = module.update_validation(loose.__getitems__([*range(len(loose))]))
    assert curve["val/excess"].compute().item() == pytest.approx(expected["loss/excess"], rel=1e-5)


@pytest.mark.parametrize("name", ["recall_tiny", "distractors_tiny", "mqar"])
def test_a_run_measures_the_targets_that_count(name, tmp_path):
    """With full batches and micro-batches, against explicit sums over the final model's logits."""
    changes = {"model.attention.normaliser": Elastic(tau_init=0.5)} | (MQAR if name == "mqar" else {})
    cfg = replace_at(load_experiment(find("experiments", name)), changes)
    found = run(cfg, tmp_path, logger=MetricFile(tmp_path), keep_checkpoint=True)
    source, model = cfg.data.load(), load(tmp_path / FINAL_CHECKPOINT).model
    batch = source.validation.__getitems__(list(range(len(source.validation))))
    with torch.no_grad():
        logits = model(batch["tokens"])
    counted = batch["targets"] != IGNORED
    nll = -logits.double().log_softmax(-1).gather(-1, batch["targets"].clamp(min=0)[..., None])[..., 0]
    expected = nll[counted].mean().item()
    metrics = found.metrics
    assert metrics["loss/val"] == metrics["loss/excess"] == pytest.approx(expected, rel=1e-5)
    curve = [line.metrics["val/loss"] for line in read_lines(tmp_path / METRICS) if "val/loss" in line.metrics]
    assert curve[-1] == pytest.approx(expected, rel=1e-5)
    for group in source.row_groups:
        right = (logits.argmax(-1) == batch["targets"])[batch[group]].double().mean().item()
        assert metrics[f"accuracy/{group}"] == pytest.approx(right)
        assert metrics[f"loss/excess_{group}"] == pytest.approx(nll[batch[group]].mean().item(), rel=1e-5)
    if name == "recall_tiny":
        difference = metrics["mass/present"] - metrics["mass/absent"]
        assert metrics["mass/present_minus_absent"] == difference != 0

    arrays = Diagnostics.load(tmp_path / DIAGNOSTICS).arrays
    by_position = arrays["loss/by_position"]
    assert np.array_equal(np.isnan(by_position), (~counted).all(0).numpy())
    there = counted.any(0)
    sums = (nll * counted).sum(0)[there] / counted.sum(0)[there]
    np.testing.assert_allclose(by_position[there.numpy()], sums.numpy(), rtol=1e-5)
    decoded = loss_by_position(model, batch)
    np.testing.assert_allclose(decoded.numpy(), by_position, rtol=1e-4)
    lengths = compute_length_metrics(arrays | {"length/n": np.ones(1, np.int64)})
    assert np.log(lengths["length/perplexity"]) == pytest.approx(expected, rel=1e-5)
    assert Diagnostics(arrays).metrics()["loss/sample"] == pytest.approx(expected, rel=1e-5)
    if name == "mqar":  # in whose sequences early positions have more targets than late ones
        assert Lengths((1,)).measure(model, cfg.data)["length_1x/loss"] == pytest.approx(expected, rel=1e-4)
    seen = torch.ones_like(counted).index_fill_(1, torch.arange(4), value=False)
    with torch.no_grad(), evaluation_mode(model):
        rise = token_nll(model(batch["tokens"], key_mask=seen), batch["targets"]).double() - nll
    late = counted.index_fill(1, torch.arange(8), value=False)
    assert metrics["sink/eviction"] == pytest.approx(rise[late].mean().item(), rel=1e-4, abs=1e-6)

    parts = run(cfg, tmp_path / "parts", execution=Execution(micro_batch=2))
    assert parts.metrics["loss/val"] == pytest.approx(metrics["loss/val"], rel=1e-4)
