"""What `pip install` of both distributions gives where nothing of this clone is: it trains a file of one's own."""

import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from torch_alone import ROOT, alone, linked

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


def built(source: Path, folder: Path) -> Path:
    """A wheel of a copy, so that nothing of a former build gets in and none of this one is left."""
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "runs", "kernels", "docs", "tests")
    copied = shutil.copytree(source, folder / "source", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(copied)], check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.long
def test_both_wheels_hold_their_package_and_train(tmp_path: Path) -> None:
    requirements = [
        re.match(r"[\w.-]+", line)[0] for line in distribution("lit-lazy").requires if "extra ==" not in line
    ]
    site = tmp_path / "site"
    site.mkdir()
    linked(site, set(), *(name for name in requirements if name != "flash-lazy"))
    for name, source in (("lit_lazy", ROOT), ("flash_lazy", ROOT / "kernels")):
        (folder := tmp_path / name).mkdir()
        with ZipFile(built(source, folder)) as wheel:
            held = {entry for entry in wheel.namelist() if ".dist-info/" not in entry}
            wheel.extractall(site)
        package = source / name
        wanted = {path for pattern in ("*.py", "py.typed", "*.mplstyle") for path in package.rglob(pattern)}
        assert held == {str(path.relative_to(source)) for path in wanted}
    (tmp_path / "mine.py").write_text(MINE)
    argv = ["train", str(tmp_path / "mine.py"), "--runs", str(tmp_path / "runs")]
    alone(TRAIN.format(site=str(site), argv=argv), site)
    assert list((tmp_path / "runs").rglob("result.json"))
