"""What a trained model measures on its own data's validation set: `lit-lazy evaluate`."""

from pathlib import Path

import torch

from lit_lazy import checkpoints
from lit_lazy.model import training_device
from lit_lazy.run import evaluate, sizes


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
    return evaluate(module, source, training_device()) | sizes(module, source)
