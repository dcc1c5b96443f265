"""Checkpoints of untrained models, which are fast to make."""

from pathlib import Path

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.training.checkpoints import AtomicCheckpointIO
from lit_lazy.training.module import LitLM


def save(path: Path, cfg: RunConfig, vocab_size: int = 17, context_length: int = 16) -> str:
    module = LitLM.create(cfg, vocab_size, context_length)
    settings = {"config": to_dict(cfg), "vocab_size": vocab_size, "context_length": context_length}
    content = {"state_dict": module.state_dict(), "hyper_parameters": settings, "global_step": 1}
    AtomicCheckpointIO().save_checkpoint(content, path)
    return str(path)
