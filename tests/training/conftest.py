"""A trained model from which trainings start."""

import pytest
from test_run import config

from lit_lazy.attention import AttentionSpec, Softmax
from lit_lazy.training.result import FINAL_CHECKPOINT
from lit_lazy.training.run import run


@pytest.fixture(scope="package")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A final.ckpt of softmax attention, without tau and table."""
    folder = tmp_path_factory.mktemp("trained")
    run(config(AttentionSpec(Softmax()), steps=12, lr=1e-2), folder, keep_checkpoint=True)
    return str(folder / FINAL_CHECKPOINT)
