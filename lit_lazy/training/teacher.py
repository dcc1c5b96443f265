"""The teacher of a distillation: the model of `init_from`, under its own attention."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lit_lazy.config.schema import TrainConfig
from lit_lazy.data import Batch
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import average_logits
from lit_lazy.optim.distillation import Distillation, Passes
from lit_lazy.support.checks import require


class Teacher:
    """A trained model that is only read. It is no part of a checkpoint, but built again where a run resumes."""

    def __init__(self, model: DecoderLM, term: Distillation) -> None:
        self.model, self.term = model.eval().requires_grad_(False), term

    def compute_term(
        self, student: DecoderLM, compute_hidden: Callable[[], Tensor], batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """The student's input of the head, by `compute_hidden`, and the term of its pass over `batch`."""
        with self._collect_mixed(student) as own:
            hidden = compute_hidden()
        with torch.no_grad(), self._collect_mixed(self.model) as taught:
            expected = self.model.compute_hidden(batch["tokens"], batch.get("place"))
        pairs = (hidden, student.head.weight), (expected, self.model.head.weight)
        passes = Passes([*zip(own, taught, strict=True)], partial(average_logits, *pairs, batch["targets"]))
        return hidden, self.term.compute(passes)

    @contextmanager
    def _collect_mixed(self, model: DecoderLM) -> Iterator[list[Tensor]]:
        """What each layer's mixer adds in a pass in the block, `[B, L, d_model]`, if the term compares it."""
        found: list[Tensor] = []
        mixers = model.mixers if self.term.reads_attention else []
        hooks = [mixer.register_forward_hook(lambda _, __, out: found.append(out[0])) for mixer in mixers]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()


def require_teacher(train: TrainConfig, teacher: DecoderLM, student: DecoderLM) -> None:
    """Raises a one-line ValueError if a training's term cannot compare the two models."""
    if not train.distillation.active:
        return
    name, fix = "train.distillation", "the model of init_from has {}; give a teacher of this model's sizes"
    layers = train.distillation.reads_attention
    for size, differs in {
        f"{len(teacher.head.weight)} words": len(teacher.head.weight) != len(student.head.weight),
        f"{teacher.cfg.n_layers} layers": layers and teacher.cfg.n_layers != student.cfg.n_layers,
        f"width {teacher.cfg.d_model}": layers and teacher.cfg.d_model != student.cfg.d_model,
    }.items():
        require(not differs, name, type(train.distillation).__name__, fix.format(size))
    teacher.check_length(student.context_length)
