"""Trainings that are asked more than once: a finished run, and a model from which others start."""

import pytest
import torch
from test_run import config

from lit_lazy.attention import AttentionSpec, Softmax
from lit_lazy.training.callbacks_and_loggers import MetricFile
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import FINAL_CHECKPOINT


@pytest.fixture(scope="package")
def finished(tmp_path_factory):
    """The folder of an undisturbed run of `config()`, with its curves; not to be changed."""
    torch.set_num_threads(1)  # as in every test
    folder = tmp_path_factory.mktemp("finished")
    run(config(), folder, logger=MetricFile(folder), keep_checkpoint=True)
    return folder


@pytest.fixture(scope="package")
def trained(tmp_path_factory):
    """A final.ckpt of softmax attention, without tau and table."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trained")
    run(config(AttentionSpec(Softmax()), steps=12, lr=1e-2), folder, keep_checkpoint=True)
    return str(folder / FINAL_CHECKPOINT)
