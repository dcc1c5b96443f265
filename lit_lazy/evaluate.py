"""What a trained model measures on its own data's validation set: `lit-lazy evaluate`."""

import json
from pathlib import Path

import torch

from lit_lazy import checkpoints
from lit_lazy.config import RunConfig, cell_key
from lit_lazy.data import DataSource
from lit_lazy.model import training_device
from lit_lazy.run import RESULT, diagnosed, evaluate, sizes


def evaluate_checkpoint(path: Path, threads: int | None = None) -> dict[str, float]:
    """The metrics that the run itself ended with, measured again. Creates nothing.

    Raises ValueError, in one line, for what is no checkpoint, and where the data are no longer those of its training.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    module = checkpoints.load(path)
    source = module.cfg.data.load()
    here = {"vocab_size": source.vocab_size, "context_length": source.context_length}
    for name, value in here.items():
        if module.hparams[name] != value:
            raise ValueError(
                f"checkpoint {str(path)!r}: was trained on data of {name}={module.hparams[name]}, which are "
                f"{name}={value} here; evaluate it where its data are"
            )
    check_fingerprint(path, module.cfg, source)
    metrics = evaluate(module, source, training_device()) | sizes(module, source)
    diagnostics = diagnosed(module, source, maps=None)
    return metrics if diagnostics is None else metrics | diagnostics.scalars()


def check_fingerprint(checkpoint: Path, cfg: RunConfig, source: DataSource) -> None:
    """Raise ValueError, in one line, where the data have changed since the training that the checkpoint is of.

    The result beside it tells; where there is none, nothing does.
    """
    try:
        trained = json.loads((checkpoint.parent / RESULT).read_text())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if trained != cell_key(cfg, source.fingerprint):
        raise ValueError(
            f"checkpoint {str(checkpoint)!r}: its data ({source.name}) are not those of its training any more; give it "
            "those, or train again"
        )
