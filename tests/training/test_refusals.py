"""What a training cannot do is one line, by the command, before anything is created."""

import pytest
from mistakes import expect_refusal

from lit_lazy.training import execution_settings

SIZES = {"data.vocab_size": 16, "model.n_layers": 2, "model.n_heads": 2, "train.batch_size": 8}
TAU, DISTIL = "--model.attention.normaliser=Elastic", "--train.distillation=Logits"
REFUSED = [
    (
        [TAU, "--train.trainable=[*.tau,blocks.*.attention.normalizer.tau]", "--init-from"],
        "normalizer.tau': matches no parameter (did you mean blocks.*.attention.normaliser.tau?); there are blocks.*.",
    ),
    (
        [TAU, "--train.trainable=[*.q.weight]", "--init-from"],
        "leaves blocks.0.attention.normaliser.tau, blocks.1.attention.normaliser.tau at their first values; add",
    ),
    ([DISTIL], "train.distillation='Logits': needs a teacher: the model of init_from"),
    (["--train.distillation=AttentionOutputs", "--model.n_layers=1", "--init-from"], "has 2 layers; give a teacher"),
    ([DISTIL, "--data.vocab_size=20", "--init-from"], "has 17 words; give a teacher"),
    ([DISTIL, "--init-from", "--compile"], "'Logits': is untested with --compile and --strategy"),
    (["--devices=3"], "--devices=3: must divide train.batch_size=8"),
    (["--devices=2", "--micro-batch=8"], "--micro-batch=8: must divide the 4 of 8 sequences"),
    (["--devices=2", "--strategy=fsdp", "--train.optimiser=Muon"], "train.optimiser='Muon': "),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
@pytest.mark.usefixtures("place")
def test_a_training_that_cannot_be_is_one_line(given, message, trained, capsys, monkeypatch):
    """Of a training and of its dry run."""
    monkeypatch.setattr(execution_settings, "count_cores", lambda: 3)
    options = [f"{option}={trained}" if option == "--init-from" else option for option in given]
    sizes = [f"--{name}={size}" for name, size in SIZES.items() if f"--{name}=" not in " ".join(given)]
    for dry in ([], ["--dry-run"]):
        assert message in expect_refusal(["train", "backcopy_tiny", *sizes, *options, *dry], capsys)


@pytest.mark.parametrize(
    "command",
    [
        ["train", "backcopy_tiny"],
        ["train", "backcopy_tiny", "--dry-run"],
        ["ablate", "run", "table2", "--base", "backcopy_tiny", "--rows", "lazy"],
        ["ablate", "search", "lazy_search", "--base", "backcopy_tiny"],
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("place")
def test_weights_that_cannot_be_had_are_one_line(command, trained, tmp_path, capsys):
    (tmp_path / "text.ckpt").write_text("no weights\n")
    given = dict.fromkeys((f"{tmp_path}/none.ckpt", f"{tmp_path}/text.ckpt"), "give a final.ckpt")
    given[trained] = "none of its weights matches the model by part, name and shape; omit it"
    for path, fix in given.items():
        line = expect_refusal([*command, "--model.d_model=48", "--init-from", path], capsys)
        assert repr(path) in line
        assert fix in line
