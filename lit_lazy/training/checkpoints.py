"""Checkpoints: written atomically, loaded without running code, and validated before use."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_lazy.config.checkpoint_file import FORMAT, read_checkpoint
from lit_lazy.config.overrides import apply_overrides
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.config.serialisation import UnknownClassError, from_dict, replace_at, to_dict
from lit_lazy.config.user_classes import has_user_classes, iter_user_classes
from lit_lazy.data import DataConfig, DataSource
from lit_lazy.data.source_interface import Outline, load_data
from lit_lazy.model.decoder import DecoderLM, build_empty
from lit_lazy.model.generation import Prompts
from lit_lazy.support.checked_fields import PositiveInt, check_value, list_changes, require
from lit_lazy.support.disk import quarantine, write_atomically
from lit_lazy.support.error_messages import describe_exception, naming_user_errors, short_repr
from lit_lazy.training.check_before_run import check_size
from lit_lazy.training.module import SOURCES, LitLM, Teacher, hash_sources, require_teacher
from lit_lazy.training.rehearsal import LAYERS, VOCABULARY, WIDTH, rehearse
from lit_lazy.training.run_folder import RunResult
from lit_lazy.training.trained_parameters import format_names, freeze_others, require_loaded

log = logging.getLogger("lit_lazy.training.checkpoints")
TOKENIZER = "tokenizer.json"
"""File beside an imported model's checkpoint."""
UNCHECKED = "unchecked"
"""Mark, among a checkpoint's sources, of an imported model that was not compared with its source."""
MOST_NAMED = 8
"""Tensor names in a message, at most."""
LOGITS = "logits"
"""Beside the names of tensors."""
SIZES = ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "tie_embeddings", "mixer")
"""Fields of the model that a trained model keeps: its weights would not be used, or not as they were trained."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes by atomic rename, so the previous checkpoint remains until the new one is complete."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        del storage_options  # for remote file systems
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), lambda file: _save(checkpoint, file))

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load by memory map, so that tensors copied to model and optimiser are in memory only once."""
        del map_location, weights_only
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(checkpoint | {"format": FORMAT}, file)
    except RuntimeError as error:
        # After an interrupted write, closing torch's archive raises another error, which hides the interrupt.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


def write_untrained(
    path: Path,
    cfg: RunConfig,
    vocab_size: int,
    context_length: int,
    weights: Mapping[str, torch.Tensor],
    unchecked: bool = False,
) -> None:
    """Write a checkpoint of a model that was not trained here, atomically. weights: state dict of its decoder.

    unchecked: whether it was not compared with its source; `load` then says so. The tokeniser's file must be there
    already.
    """
    settings = to_dict(cfg)
    _find_tokenizer(settings["data"], path.parent)
    content = {
        SOURCES: hash_sources(from_dict(RunConfig, settings)) | ({UNCHECKED: True} if unchecked else {}),
        "state_dict": {f"model.{name}": weights[name] for name in sorted(weights)},
        "global_step": 0,
        "hyper_parameters": {"config": to_dict(cfg), "vocab_size": vocab_size, "context_length": context_length},
    }
    write_atomically(path, lambda file: _save(content, file))


def load(path: Path) -> LitLM:
    """Trained model of a checkpoint. Raises a one-line ValueError if it cannot be loaded."""
    checkpoint = f"checkpoint {str(path)!r}"
    try:
        content = read_checkpoint(path)
    except ValueError as error:
        fix = "give a final.ckpt, which `lit-lazy train` writes to its run folder"
        raise ValueError(f"{checkpoint}: {error}; {fix}") from None
    try:
        _find_tokenizer(content["hyper_parameters"]["config"]["data"], path.parent)
        module = _build_module(content)
    except UnknownClassError as error:
        fix = "add --import FILE, the file that defines it (in Python: imports=)"
        raise ValueError(f"{checkpoint}: {error.needs}; {fix}") from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, RuntimeError) as error:
        raise ValueError(f"{checkpoint}: its config is unknown ({describe_exception(error)}); train again") from None
    if mismatch := _find_mismatch(content, module):
        raise ValueError(f"{checkpoint}: {mismatch}; train again")
    module.load_state_dict(content["state_dict"])
    if bad := [name for name, value in content["state_dict"].items() if not value.isfinite().all()]:
        raise ValueError(f"{checkpoint}: the weights are not finite ({bad[0]}); train again")
    module.sources = content.get(SOURCES, {})
    if module.sources.get(UNCHECKED):
        log.warning("%s: was imported with --unchecked: its logits were not compared with its source's", checkpoint)
    for name, digest in iter_user_classes(module.cfg.model):
        former = module.sources.get("code", {}).get(name, digest)
        if len(former) != len(digest):
            log.warning("%s: an earlier version hashed the code of %s, so it may have changed since", checkpoint, name)
        elif former != digest:
            log.warning("%s: a file that defines %s has changed since its training; this is new code", checkpoint, name)
    return module


def load_prompts(checkpoint: Path, trained: LitLM, data: DataConfig) -> Prompts:
    """Prompts for a trained model. Raises a one-line ValueError if it was trained with another tokeniser."""
    require_same_tokenizer(checkpoint, trained, data)
    return Prompts(data, trained.hparams["vocab_size"])


def require_same_tokenizer(checkpoint: Path, trained: LitLM, data: DataConfig) -> None:
    """Raise a one-line ValueError if data have another tokeniser's file than the model was trained with."""
    known, found = trained.sources.get("tokenizer"), data.hash_tokenizer()
    if None not in (known, found) and known != found:
        file = getattr(data, "tokenizer", type(data).__name__)
        problem = f"the tokenizer {str(file)!r} has another content than that of its training"
        raise ValueError(f"checkpoint {str(checkpoint)!r}: {problem}; restore it, or name data with that one")


def change_settings(cfg: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The config of a trained model with other settings of its model or data, given as `--dotted.path=value`."""
    changed, paths = apply_overrides(cfg, overrides)
    require_changeable(paths)
    return changed


def require_changeable(paths: Iterable[str]) -> None:
    """Raises a one-line ValueError for a dotted path that is not below `model` or `data`."""
    if others := [path for path in paths if path.partition(".")[0] not in ("model", "data")]:
        raise ValueError(f"{others[0]}: has no effect on a trained model; set only fields of model and data")


def change_model(module: LitLM, cfg: RunConfig) -> LitLM:
    """The module with the model of another config, on its own weights where name, shape and class of the part match.

    These are shared.

    All other parameters, such as a new tau or bias, have their initial values; a warning names them. Raises a one-line
    ValueError if one of SIZES or a first value (`CheckedFields.first_values`) differs, if a setting would have no
    effect (`_require_effect`), if a trained parameter would change its shape, and for positions whose weights were not
    trained.
    """
    for name in SIZES:
        trained, given = getattr(module.cfg.model, name), getattr(cfg.model, name)
        fix = f"the trained weights are for {short_repr(trained)}; leave it, or train a new model"
        require(given == trained, f"model.{name}", given, fix)
    for path, name, before, _ in list_changes(module.cfg.model, cfg.model, "model"):
        if name in before.first_values:
            raise ValueError(f"{path}: has no effect on a trained model, whose own values stay; leave it as it was")
    if has_user_classes(cfg.model):
        rehearse(cfg, module.hparams["context_length"], documents=False, trains=False)
    changed = LitLM.create(cfg, module.hparams["vocab_size"], module.hparams["context_length"])
    source = module.model.state_dict()
    target = dict(chain(changed.model.named_parameters(), changed.model.named_buffers()))
    common = _iter_common(module.cfg.model, source, cfg.model, target)
    matching = {name for name in common if source[name].shape == target[name].shape}
    parameters = dict(changed.model.named_parameters()).keys()
    for name in sorted((common & parameters) - matching):
        problem = f"is trained with the shape {list(source[name].shape)}, not {list(target[name].shape)}"
        raise ValueError(f"{name}: {problem}; leave the setting that changes it, or train anew")
    positions = {f"position.{name}" for name, _ in changed.model.position.named_parameters()}
    fix = "has weights, which were not trained; leave it, or train a new model"
    require(positions <= matching, "model.position", cfg.model.position, fix)
    _require_effect(module.model, cfg, module.model.context_length, matching, "the trained model")
    for name in matching:
        target[name].data = source[name]
    if new := sorted(parameters - matching):
        names = format_names(new, MOST_NAMED)
        log.warning("untrained, at their initial values: %s; `init_from` starts a training of them", names)
    return changed


def _iter_common(before: ModelConfig, source: Iterable[str], after: ModelConfig, target: Iterable[str]) -> set[str]:
    """Names of tensors that two models have, without those that mean something else in the other.

    Those are parts of another class, heads of another width, and an embedding that is also the head.
    """
    changes = list_changes(before, after, "model")
    replaced = [path for path, name, old, new in changes if type(getattr(old, name)) is not type(getattr(new, name))]
    parts = [f"{path.removeprefix('model')}." for path in replaced]  # such as `.attention.gate.`
    parts += [".attention."] * (before.head_width != after.head_width)
    parts += [".head."] * (after.tie_embeddings and not before.tie_embeddings)
    return {name for name in {*source} & {*target} if not any(part in f".{name}" for part in parts)}


def _require_effect(
    trained: DecoderLM, cfg: RunConfig, context_length: int, loaded: Iterable[str], source: str
) -> None:
    """Raises a one-line ValueError for a setting that sets only first values of tensors, all replaced by loaded ones.

    trained: the model of `source`, whose tensors of the names `loaded` replace those of `cfg.model`. Schedules then set
    theirs. Small models are compared.
    """

    @torch.no_grad()
    def draw(
        model: ModelConfig, tensors: Mapping[str, torch.Tensor], length: int = context_length
    ) -> dict[str, torch.Tensor]:
        """The tensors of a small model that begins to train, and its logits."""
        small = replace(model, n_layers=min(model.n_layers, LAYERS), d_ff=WIDTH)
        decoder = DecoderLM(small, VOCABULARY, length, cfg.seed)
        decoder.load_state_dict(tensors, strict=False)
        for attention in decoder.attentions:
            attention.normaliser.at_progress(0.0)
        logits = decoder.eval()(torch.arange(min(length, VOCABULARY))[None])
        return decoder.state_dict() | ({LOGITS: logits} if tensors else {})

    def differ(found: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
        return any(name not in other or not torch.equal(x, other[name]) for name, x in found.items())

    changes = list_changes(trained.cfg, cfg.model, "model")
    fields = [
        (path, getattr(old, name), getattr(new, name)) for path, name, old, new in changes if name != "tie_embeddings"
    ]
    if not fields:
        return
    new, drawn = draw(cfg.model, {}), draw(trained.cfg, {}, trained.context_length)
    kept = {name: x for name, x in drawn.items() if name in loaded and name in new and x.shape == new[name].shape}
    begun = draw(cfg.model, kept)
    for path, old, given in fields:
        former = other = None
        with suppress(ValueError), naming_user_errors(path):  # other settings may need this one: then it has an effect
            changed = replace_at(cfg.model, {path.removeprefix("model."): old})
            former, other = draw(changed, {}), draw(changed, kept)
        idle = former and other and differ(new, former) and not differ(begun, other)
        fix = f"has no effect, as its parameters are loaded from {source}, where it was {old!r}; give that"
        require(not idle, path, given, f"{fix}, or register a constant buffer of your class with persistent=False")


def _find_tokenizer(data: dict[str, Any], folder: Path) -> None:
    """Point the data's settings to the tokeniser beside an imported model's checkpoint, wherever that was moved."""
    beside = folder / TOKENIZER
    if data.get("tokenizer") == TOKENIZER and beside.is_file():
        data["tokenizer"] = str(beside)


def load_matching_weights(module: LitLM, path: Path) -> str:
    """Load the weights of a checkpoint that match a module's (`_load_matching`). Returns a one-line summary.

    With distillation the checkpoint's model becomes the module's teacher.

    Raises a one-line ValueError if the checkpoint cannot be loaded, none of its weights matches, one that is not
    trained is missing, or an initial value would have no effect, as its parameters are loaded.
    """
    target = module.model.state_dict()
    trained, matching = _load_matching(path, module.cfg, module.model, module.frozen)
    module.model.load_state_dict(target | matching)
    if module.cfg.train.distillation.active:
        module.teacher = Teacher(trained, module.cfg.train.distillation)
    share = sum(value.numel() for value in matching.values()) / sum(value.numel() for value in target.values())
    new, unused = (sorted(names - matching.keys()) for names in (target.keys(), trained.state_dict().keys()))
    return (
        f"starts from {path}: {len(matching)} of {len(target)} tensors, {share:.1%} of the weights, are loaded; "
        f"new: {format_names(new, MOST_NAMED)}; unused: {format_names(unused, MOST_NAMED)}"
    )


def check_matching_weights(path: Path, cfg: RunConfig, data: Outline) -> None:
    """Raises a one-line ValueError as `load_matching_weights` does."""
    target = build_empty(cfg.model, data.vocab_size, data.context_length)
    _load_matching(path, cfg, target, freeze_others(target, cfg.train.trainable))


def _load_matching(
    path: Path, cfg: RunConfig, model: DecoderLM, frozen: set[str]
) -> tuple[DecoderLM, dict[str, torch.Tensor]]:
    """The model of a checkpoint, and those of its weights that match one of `model`, of `cfg`.

    Their names, shapes and the classes of the parts that have them are equal.
    """
    loaded = load(path)
    source, target = loaded.model.state_dict(), model.state_dict()
    common = _iter_common(loaded.cfg.model, source, cfg.model, target)
    matching = {name: value for name, value in source.items() if name in common and target[name].shape == value.shape}
    if not matching:
        raise ValueError(
            f"init_from={str(path)!r}: none of its weights matches the model by part, name and shape; omit it"
        )
    _require_effect(loaded.model, cfg, model.context_length, matching, repr(str(path)))
    require_loaded(cfg.train.trainable, frozen, matching)
    require_teacher(cfg.train, loaded.model, model)
    return loaded.model, matching


def _build_module(content: dict[str, Any]) -> LitLM:
    """The module that a checkpoint's settings describe. Compares sizes first, as corrupt settings may be huge."""
    settings, state = content["hyper_parameters"], content["state_dict"]
    cfg = from_dict(RunConfig, settings["config"])
    for name in ("vocab_size", "context_length"):
        check_value(name, settings[name], PositiveInt)
    embedding = state.get("model.embedding.weight")
    shape = (settings["vocab_size"], cfg.model.d_model)
    if embedding is None or embedding.shape != shape:
        raise ValueError(f"the embedding must have shape {list(shape)} by the settings")
    if cfg.model.n_layers > len(state):
        raise ValueError(f"model.n_layers={cfg.model.n_layers}: it has weights of fewer layers")
    check_size(cfg.model, settings["vocab_size"], settings["context_length"], state=0)
    return LitLM(**settings)


def read_callback_state(path: Path, name: str) -> dict[str, Any]:
    """State of the callback with this state key in a checkpoint, or {}. Raises ValueError like `read_checkpoint`."""
    state = read_checkpoint(path).get("callbacks", {}).get(name, {})
    if not isinstance(state, dict):
        raise ValueError(f"checkpoint {str(path)!r}: its state of {name} was not made by this project; train again")
    return state


def find_resume_step(path: Path, cfg: RunConfig, module: LitLM) -> int:
    """The step from which a checkpoint resumes this config's module.

    0 if the checkpoint does not exist or is quarantined, with a warning, because it is damaged or of another model.
    """
    if not path.exists():
        return 0
    made_by: RunConfig | None = None
    try:
        content = read_checkpoint(path)
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            made_by = from_dict(RunConfig, content["hyper_parameters"]["config"])
        # The run's key holds the initial weights' content, so their path may differ.
        if made_by is None or replace(made_by, init_from=cfg.init_from) != cfg:
            raise ValueError("made by another config")
        if mismatch := _find_mismatch(content, module):
            raise ValueError(mismatch)
    except ValueError as error:
        quarantine(path, str(error))
        return 0
    return content["global_step"]


def _find_mismatch(content: dict[str, Any], module: LitLM) -> str:
    """The first difference between a checkpoint's and a module's weights in name, shape or dtype, or ""."""

    def describe(value: torch.Tensor | None) -> str:
        kind = "" if value is None or value.dtype == torch.float32 else f" of {value.dtype}"
        return "missing" if value is None else f"{tuple(value.shape)}{kind}"

    found, expected = content["state_dict"], module.state_dict()
    for name in sorted(found.keys() | expected.keys()):
        actual, wanted = (describe(state.get(name)) for state in (found, expected))
        if actual != wanted:
            return f"the weights are another architecture's ({name} is {actual}, should be {wanted})"
    return ""


def load_data_for(checkpoint: Path, trained: LitLM, data: DataConfig, option: str = "data") -> DataSource:
    """Data to measure a checkpoint's model on: those of its training, verified, or others with its vocabulary.

    option: what names the others, for messages. Raises a one-line ValueError if they cannot be loaded or do not fit.
    Changed content of its own is noticed only with the result in the checkpoint's folder; without one, another size is.
    """
    require_same_tokenizer(checkpoint, trained, data)
    source, known = load_data(data), trained.hparams["vocab_size"]
    if data != trained.cfg.data:
        problem = f"the model has a vocabulary of {known} tokens, these data have {source.vocab_size}"
        if source.vocab_size != known:
            raise ValueError(f"{option}: {problem}; name data with the same vocabulary")
        return source
    result, problem = RunResult.peek(checkpoint.parent), ""
    if result is not None and result.fingerprint != source.fingerprint:
        problem = f"its data ({source.name}) has changed since its training"
    for name in ("vocab_size", "context_length"):
        if (now := getattr(source, name)) != (before := trained.hparams[name]):
            problem = f"was trained on data with {name}={before}, which now has {name}={now}"
    if problem:
        raise ValueError(f"checkpoint {str(checkpoint)!r}: {problem}; restore the data, or train again")
    return source
