"""What the benchmarks run: a training step, on one thread."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lit_lazy.config.schema import TrainConfig
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.training.trained_parameters import build_parameter_groups


def make_training_step(
    model: DecoderLM, compute_loss: Callable[[Tensor], Tensor], frozen: bool = False, fused: bool | None = None
) -> Callable[[Tensor], None]:
    """Loss of token ids, backward pass, clipping and AdamW. frozen: learning rate 0, so the weights stay the same."""
    train = TrainConfig()
    optimizer = torch.optim.AdamW(build_parameter_groups(model, train), betas=train.betas, fused=fused)
    for group in optimizer.param_groups if frozen else ():
        group["lr"] = 0.0

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        compute_loss(ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
        optimizer.step()

    return step


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Run torch on one thread in the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
