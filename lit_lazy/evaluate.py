"""What a trained model measures on its own data's validation set: `lit-lazy evaluate`."""

import json
from pathlib import Path

import torch

from lit_lazy import checkpoints
from lit_lazy.config import cell_key
from lit_lazy.data import DataSource
from lit_lazy.lightning_module import LitLM
from lit_lazy.model import training_device
from lit_lazy.run import RESULT, diagnosed, evaluate, sizes


def evaluate_checkpoint(path: Path, threads: int | None = None) -> dict[str, float]:
    """The metrics that the run itself ended with, measured again. Creates nothing.

    Raises ValueError, in one line, for what is no checkpoint, and where the data are no longer those of its training.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    module = checkpoints.load(path)
    source = data_of_training(path, module)
    metrics = evaluate(module, source, training_device()) | sizes(module, source)
    diagnostics = diagnosed(module, source)
    return metrics if diagnostics is None else metrics | diagnostics.scalars()


def data_of_training(checkpoint: Path, module: LitLM) -> DataSource:
    """The data that a checkpoint's model was trained on.

    Raises ValueError, in one line, where they cannot be had or have changed since. The result beside the checkpoint
    tells of contents; where there is none, only another size is noticed.
    """
    source = module.cfg.data.load()
    for name in ("vocab_size", "context_length"):
        there, here = module.hparams[name], getattr(source, name)
        if there != here:
            raise ValueError(
                f"checkpoint {str(checkpoint)!r}: was trained on data of {name}={there}, which are {name}={here} here; "
                "give it those, or train again"
            )
    try:
        key = json.loads((checkpoint.parent / RESULT).read_text())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return source
    if key != cell_key(module.cfg, source.fingerprint):
        raise ValueError(
            f"checkpoint {str(checkpoint)!r}: its data ({source.name}) are not those of its training any more; give it "
            "those, or train again"
        )
    return source
