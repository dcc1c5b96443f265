"""Model, attention, loss, parameter groups and the step benchmark (tests/timings) need only torch; wheels, no clone."""

import re
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from torch_alone import ROOT, build_wheel, link_packages, run_alone

TRAINS = """
import importlib.util
names = ("numpy", "lightning", "torchmetrics", "mlflow", "optuna", "datasets", "triton")
assert not [name for name in names if importlib.util.find_spec(name)]

import torch
from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias
from lit_lazy.config import ModelConfig, TrainConfig
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.generation import generate
from lit_lazy.model.loss import token_nll
from lit_lazy.training.trained_parameters import build_parameter_groups

cfg = ModelConfig(d_model=16, n_heads=2, d_ff=32, attention=AttentionSpec(Elastic(), LearnedBias()))
model, train = DecoderLM(cfg, vocab_size=8, context_length=8, seed=0), TrainConfig(steps=60, warmup_steps=2)
optimiser = torch.optim.AdamW(build_parameter_groups(model, train), lr=1e-2)
ids = torch.arange(36).view(4, 9) % 8
losses = []
for step in range(60):
    loss = token_nll(model(ids[:, :-1]), ids[:, 1:]).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
assert generate(model, [[1, 2], [3]], 3) == [[3, 4, 5], [4, 5, 6]]
"""


def test_a_model_trains_where_nothing_else_is(torch_site: Path) -> None:
    run_alone(TRAINS, torch_site)


BESIDE = "runs", "kernels", "docs", "tests"
"""Large folders of the clone that are part of neither distribution."""
TRAIN = """
import sys
import lit_lazy
assert lit_lazy.__file__.startswith({site!r}), lit_lazy.__file__
from lit_lazy.command.main import main
sys.exit(main({argv!r}))
"""
MINE = """
from lit_lazy.attention import Elastic
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.backcopy import Backcopy

def config():
    data = Backcopy(context_length=16, train_sequences=64, validation_sequences=16)
    train = TrainConfig(steps=3, batch_size=8, warmup_steps=1)
    return RunConfig(data, ModelConfig(d_model=8, n_heads=1, d_ff=16), train)
"""


@pytest.mark.long
def test_both_wheels_hold_their_package_and_train(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    needed = [re.match(r"[\w.-]+", line)[0] for line in distribution("lit-lazy").requires if "extra ==" not in line]
    link_packages(site, set(), *(name for name in needed if name != "flash-lazy"))
    for name, source in (("lit_lazy", ROOT), ("flash_lazy", ROOT / "kernels")):
        (folder := tmp_path / name).mkdir()
        with ZipFile(build_wheel(source, folder, *BESIDE)) as wheel:
            # What a compiler adds is in tests/kernels/test_wheel.py.
            held = {name for name in wheel.namelist() if ".dist-info/" not in name and not name.endswith(".so")}
            wheel.extractall(site)
        package = source / name
        wanted = {
            path for pattern in ("*.py", "py.typed", "*.mplstyle", "*.html", "*.css") for path in package.rglob(pattern)
        }
        assert held == {str(path.relative_to(source)) for path in wanted}
    (tmp_path / "mine.py").write_text(MINE)
    argv = ["train", str(tmp_path / "mine.py"), "--runs", str(tmp_path / "runs")]
    run_alone(TRAIN.format(site=str(site), argv=argv), site)
    assert list((tmp_path / "runs").rglob("result.json"))
