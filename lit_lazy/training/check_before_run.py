"""Checks of a run before anything is created."""

from contextlib import suppress

import torch

from lit_lazy.attention import Attention
from lit_lazy.config.key import hash_model
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.config.serialisation import require_restorable
from lit_lazy.config.user_classes import has_user_classes
from lit_lazy.data import DataConfig, DataSource
from lit_lazy.data.source_interface import Outline, load_data
from lit_lazy.model.decoder import DecoderLM, build_empty
from lit_lazy.model.loss import LOGITS_AT_ONCE
from lit_lazy.support.checked_fields import require
from lit_lazy.support.error_messages import naming, naming_user_errors
from lit_lazy.support.machine import require_memory
from lit_lazy.training.execution_settings import Execution, find_missing_gpu, select_training_device
from lit_lazy.training.trained_parameters import freeze_others, require_loaded

BYTES_PER_NUMBER = 4
"""Weights, gradients and moments are float32."""
BYTES_PER_LAYER = 2**15
"""Size of a layer's module objects, without parameters."""


def check_model(cfg: ModelConfig, context_length: int, documents: bool = False, elsewhere: bool = False) -> None:
    """Raises ValueError if a part of the model does not support this context length, or this machine its backend.

    documents: whether attention is restricted to documents. elsewhere: whether the run may be on another machine.
    """
    # The first layer is built here even if the run is elsewhere.
    require_memory({"model.d_model": cfg.d_model}, BYTES_PER_NUMBER * 2 * cfg.d_model * _projection_width(cfg))
    with naming_user_errors("model"):
        mixer = _build_attention(cfg, context_length) if cfg.mixer.attends else cfg.build_mixer(0, context_length)
        cfg.position.build(cfg.d_model, mixer.rotary_dim, context_length)
    if elsewhere:
        return
    with naming(f"model.backend={cfg.backend!r}"):
        if missing := find_missing_gpu(cfg.backend):
            raise ValueError(missing)
        mixer.to(select_training_device()).backend_name(documents)


def _build_attention(cfg: ModelConfig, context_length: int) -> Attention:
    """That of the first layer; the others' normalisers are built too."""
    shape = cfg.layer_shape(0, context_length)
    attention = Attention(cfg.attention, shape, cfg.backend)
    attention.normaliser.probe(shape.n_heads, shape.head_dim, shape.d_model, torch.device("cpu"))
    for layer in range(1, cfg.n_layers):
        cfg.attention.normaliser.build(cfg.layer_shape(layer, context_length))
    attention.compute_bias(context_length)
    attention.bias.probe(context_length)
    return attention


def check_size(
    cfg: ModelConfig,
    vocab_size: int,
    context_length: int,
    sequences: int = 1,
    checkpointed: bool = True,
    state: int = 3,
) -> None:
    """Raises ValueError if a model, trained with `sequences` at a time, does not fit into this machine.

    Uses a lower bound: parameters with gradients and moments, logits, and the activations that a layer saves for its
    backward pass (only its input if activations are checkpointed).
    state: numbers per weight besides the weight itself: its gradient and the optimiser's moments; 0 without training.
    """
    per_parameter = BYTES_PER_NUMBER * (1 + state)
    layer = 2 * cfg.d_model * _projection_width(cfg) + 3 * cfg.d_model * cfg.d_ff
    embeddings = vocab_size * cfg.d_model * (1 if cfg.tie_embeddings else 2)
    tokens = sequences * context_length
    saved = min(tokens * vocab_size, LOGITS_AT_ONCE)
    saved += tokens * cfg.n_layers * (cfg.d_model if checkpointed else 2 * cfg.d_model + 2 * cfg.d_ff)
    sizes = {f"model.{name}": getattr(cfg, name) for name in ("d_model", "n_layers", "d_ff")}
    sizes |= {"sequences at a time": sequences, "vocabulary": vocab_size, "data.context_length": context_length}
    needed = per_parameter * (embeddings + cfg.n_layers * layer) + BYTES_PER_LAYER * cfg.n_layers + 2 * saved
    require_memory(sizes, needed)
    parts = 0  # parameters of mixer and position without the projections, which are counted already
    with suppress(Exception), torch.device("meta"):  # an error here is reported when the part is built
        mixer = cfg.build_mixer(0, context_length)
        position = cfg.position.build(cfg.d_model, mixer.rotary_dim, context_length)
        counted = 2 * cfg.d_model * _projection_width(cfg)
        parts = sum(parameter.numel() for part in (mixer, position) for parameter in part.parameters()) - counted
    part = "model.attention" if cfg.mixer.attends else "model.mixer"
    require_memory(sizes | {part: parts}, needed + per_parameter * cfg.n_layers * parts)


def _projection_width(cfg: ModelConfig) -> int:
    """Width of the projections of queries and keys together, and of values and outputs together."""
    return (cfg.n_heads + cfg.kv_heads) * cfg.head_width


def prepare(cfg: RunConfig, execution: Execution | None = None) -> DataSource:
    """Load a run's data and check that data, model and training fit each other, before anything is created.

    execution: on this machine; None if unknown. Raises a one-line ValueError that names the option.
    """
    source = load_data(cfg.data)
    _check_run(cfg, source.outline, execution)
    return source


def prepare_outline(cfg: RunConfig, execution: Execution | None = None, elsewhere: bool = False) -> Outline:
    """`prepare` without loading data that may still have to be built, and without the checks that need that data.

    elsewhere: the run may be on another machine; neither this one's memory and backends nor a missing tokenizer count.
    """
    data = load_outline(cfg.data, elsewhere)
    _check_run(cfg, data, execution, elsewhere)
    return data


def _check_run(cfg: RunConfig, data: Outline, execution: Execution | None, elsewhere: bool = False) -> None:
    fits = data.sequences is None or cfg.train.batch_size <= data.sequences
    require(fits, "train.batch_size", cfg.train.batch_size, f"must not exceed the {data.sequences} training sequences")
    state = 0 if cfg.train.trainable else 1 + cfg.train.optimiser.moments(matrix=True)
    if execution is None and not elsewhere:
        check_size(cfg.model, data.vocab_size, data.context_length, state=state)
    if execution is not None:
        execution.check(cfg.train)
        execution.accumulation_steps(cfg.train.batch_size)
        at_a_time = execution.evaluation_batch_size(cfg.train.batch_size), execution.checkpoint_activations
        check_size(cfg.model, data.vocab_size, data.context_length, *at_a_time, state=state)
    check_model(cfg.model, data.context_length, data.document_mask, elsewhere)
    if has_user_classes(cfg):
        require_restorable(cfg, RunConfig)
    if has_user_classes(cfg.model, cfg.train):
        from lit_lazy.training.rehearsal import rehearse  # late: it imports Lightning

        rehearse(cfg, data.context_length, data.document_mask)
    fix = f"model.mixer={type(cfg.model.mixer).__name__} carries its state across documents; leave it False"
    require(cfg.model.mixer.attends or not data.document_mask, "data.document_mask", data.document_mask, fix)
    if cfg.init_from is not None:
        hash_model(cfg.init_from)
    teacher = "needs a teacher: the model of init_from, which is not given"
    taught = cfg.init_from is not None or not cfg.train.distillation.active
    require(taught, "train.distillation", type(cfg.train.distillation).__name__, teacher)
    if patterns := cfg.train.trainable:
        frozen = freeze_others(build_empty(cfg.model, data.vocab_size, data.context_length), patterns)
        require_loaded(patterns, frozen, () if cfg.init_from is None else frozen)
    if cfg.evaluations and data.sequences is not None:
        check_evaluations(cfg, build_empty(cfg.model, data.vocab_size, data.context_length))


def check_evaluations(cfg: RunConfig, model: DecoderLM) -> None:
    """Raises a one-line ValueError if an evaluation does not support the model or its data."""
    for evaluation in cfg.evaluations:
        with naming(f"evaluations: {type(evaluation).__name__}"), naming_user_errors("check()"):
            evaluation.check(model, cfg.data)


def outline_loads(config: DataConfig) -> bool:
    """Whether a data config loads its sequences for their outline."""
    return type(config).outline is DataConfig.outline


def load_outline(config: DataConfig, elsewhere: bool = False) -> Outline:
    """Outline of a data config's sequences. Raises a one-line ValueError if that fails or loads what is wrong.

    elsewhere: as in `prepare_outline`.
    """
    if outline_loads(config):
        return load_data(config).outline
    with naming_user_errors(f"data={type(config).__name__}"):
        return config.outline_elsewhere() if elsewhere else config.outline()


COMPARED_SEQUENCES = 64
"""First sequences by which training and validation are compared."""


def validates_on_training(source: DataSource) -> bool:
    """Whether the validation begins with the sequences that the training data begin with."""
    count = min(COMPARED_SEQUENCES, len(source.train), len(source.validation))
    first, other = (part.sequences[:count].long() for part in (source.train, source.validation))
    return torch.equal(first, other)
