"""Checkpoints: written whole or not at all, loaded without running code, and judged before anything builds on them."""

import json
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.data import DataSource
from lit_lazy.data.base import Outline
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.checks import require_whole
from lit_lazy.support.disk import open_file, quarantine, write_atomically
from lit_lazy.support.errors import describe_exception
from lit_lazy.support.typecheck import MOST
from lit_lazy.training.module import LitLM
from lit_lazy.training.prepare import check_size, load_data
from lit_lazy.training.result import RESULT

MOST_NAMED = 8
"""Tensors, in a message."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """A checkpoint replaces the one before it only when it is on disk whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        del storage_options  # of remote file systems
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), lambda file: _save(checkpoint, file))

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Mapped from the file: what is copied from it to model and optimiser is in memory once."""
        del map_location, weights_only
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        # The end of torch's archive raises an error of its own where an interrupt has cut off a write before it.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of one of this project's checkpoints. Raises ValueError that says, in one line, why it is none."""
    try:
        with open_file(path) as file:
            # torch does not look at the checksums that it wrote.
            archive = zipfile.ZipFile(file)
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise zipfile.BadZipFile("it is compressed, which torch does not do")  # to any size
            if (part := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"bad checksum of {part}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of kinds of tensors that are refused below
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except (MemoryError, RecursionError) as error:
        raise ValueError(
            f"is no checkpoint, or one that does not fit into memory ({describe_exception(error)})"
        ) from None
    except pickle.UnpicklingError:
        raise ValueError("holds more than weights and numbers, so it is not loaded: it could run code") from None
    except Exception as error:  # a file that is no checkpoint raises almost anything
        raise ValueError(f"is no checkpoint, or damaged ({describe_exception(error)})") from None
    if not _is_ours(content):
        raise ValueError("was not made by this project")
    return content


def _is_ours(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and isinstance(state := content.get("state_dict"), dict)
        and all(isinstance(name, str) and _is_plain(value) for name, value in state.items())
        and type(step := content.get("global_step")) is int
        and 0 <= step <= MOST
        and isinstance(content.get("callbacks", {}), dict)
        and isinstance(settings := content.get("hyper_parameters"), dict)
        and settings.keys() == {"config", "vocab_size", "context_length"}
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor as this project writes it: dense, with storage, of real numbers."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_nested or value.is_quantized or value.is_complex())
    )


def load(path: Path) -> LitLM:
    """The trained model of a checkpoint. Raises ValueError, in one line, where there is none to be had."""
    checkpoint = f"checkpoint {str(path)!r}"
    try:
        content = read_checkpoint(path)
    except ValueError as error:
        raise ValueError(
            f"{checkpoint}: {error}; give a final.ckpt, which `lit-lazy train` leaves in its run folder"
        ) from None
    try:
        module = _build_module(content)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, RuntimeError) as error:
        raise ValueError(
            f"{checkpoint}: its config is not known here ({describe_exception(error)}); --import the file that defines "
            "a custom class, else train again"
        ) from None
    if misfit := _find_mismatch(content, module):
        raise ValueError(f"{checkpoint}: {misfit}; train again")
    module.load_state_dict(content["state_dict"])
    if bad := [name for name, value in content["state_dict"].items() if not value.isfinite().all()]:
        raise ValueError(f"{checkpoint}: the weights are not finite ({bad[0]}); train again")
    return module


def load_matching_weights(module: LitLM, path: Path) -> str:
    """Give a module the weights of a checkpoint that have the same name and shape; what became of which, in a line.

    Raises ValueError, in one line, where there is no such model, or none of its weights fits.
    """
    given, own = load(path).model.state_dict(), module.model.state_dict()
    taken = _select_matching(path, given, own)
    module.model.load_state_dict(own | taken)
    share = sum(value.numel() for value in taken.values()) / sum(value.numel() for value in own.values())
    new, left = sorted(own.keys() - taken.keys()), sorted(given.keys() - taken.keys())
    return (
        f"starts from {path}: {len(taken)} of {len(own)} tensors, {share:.1%} of the weights, are taken over; "
        f"new: {_format_names(new)}; left behind: {_format_names(left)}"
    )


def check_init_from(cfg: RunConfig, data: Outline) -> None:
    """Raise ValueError, in one line, where the weights that a run is to start with cannot be had."""
    if cfg.init_from is not None:
        with torch.device("meta"):
            own = DecoderLM(cfg.model, data.vocab_size, data.context_length, seed=None).state_dict()
        path = Path(cfg.init_from)
        _select_matching(path, load(path).model.state_dict(), own)


def _select_matching(
    path: Path, given: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint with the name and shape of one of a model's. Raises ValueError for none."""
    taken = {name: value for name, value in given.items() if name in own and own[name].shape == value.shape}
    if not taken:
        raise ValueError(
            f"init_from={str(path)!r}: none of its weights has the name and shape of one here; leave it out"
        )
    return taken


def _format_names(names: list[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    return f"{shown}, ... ({len(names)})" if len(names) > MOST_NAMED else shown or "none"


def _build_module(content: dict[str, Any]) -> LitLM:
    """The module that a checkpoint's settings describe, if its weights are of that size: else it may be of any."""
    settings, state = content["hyper_parameters"], content["state_dict"]
    cfg = from_dict(RunConfig, settings["config"])
    for name in ("vocab_size", "context_length"):
        require_whole(name, settings[name], 1)
    embedding = state.get("model.embedding.weight")
    wanted = (settings["vocab_size"], cfg.model.d_model)
    if embedding is None or embedding.shape != wanted:
        raise ValueError(f"the embedding is not of {list(wanted)}, as the settings say")
    if cfg.model.n_layers > len(state):
        raise ValueError(f"model.n_layers={cfg.model.n_layers}: there are weights of fewer")
    check_size(cfg.model, *wanted[:1], settings["context_length"])
    return LitLM(**settings)


def read_callback_state(path: Path, name: str) -> dict[str, Any]:
    """What a callback of a class of this name left in a checkpoint; empty where none did. Raises as `read` does."""
    state = read_checkpoint(path).get("callbacks", {}).get(name, {})
    if not isinstance(state, dict):
        raise ValueError(f"checkpoint {str(path)!r}: {name} in it is no state of ours; train again")
    return state


def find_resume_step(path: Path, cfg: RunConfig, module: LitLM) -> int:
    """The step from which a checkpoint resumes this config's module.

    0 where there is none, or one that is damaged or another model's: that one is quarantined, with a warning.
    """
    if not path.exists():
        return 0
    try:
        content = read_checkpoint(path)
    except ValueError as error:
        quarantine(path, str(error))
        return 0
    if not _is_same_config(content["hyper_parameters"]["config"], cfg):
        quarantine(path, "made by another config")
        return 0
    if misfit := _find_mismatch(content, module):
        quarantine(path, misfit)
        return 0
    return content["global_step"]


def _is_same_config(config: Any, cfg: RunConfig) -> bool:
    """Whether a checkpoint's plain config is this one; a field that it does not know yet is at its default."""
    try:
        # The weights that it started with are in the run's key, wherever they lie.
        return replace(from_dict(RunConfig, config), init_from=cfg.init_from) == cfg
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _find_mismatch(content: dict[str, Any], module: LitLM) -> str:
    """How the weights of a checkpoint differ from those of a module in name or shape; "" where they do not."""
    both = content["state_dict"], module.state_dict()
    found, wanted = ({name: _format_shape(value) for name, value in state.items()} for state in both)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            is_, should = (kinds.get(name, "missing") for kinds in (found, wanted))
            return f"the weights are another architecture's ({name} is {is_}, should be {should})"
    return ""


def _format_shape(value: torch.Tensor) -> str:
    """Its shape, and its type unless that is the usual one."""
    return f"{tuple(value.shape)}{'' if value.dtype == torch.float32 else f' of {value.dtype}'}"


def load_training_data(checkpoint: Path, module: LitLM) -> DataSource:
    """The data that a checkpoint's model was trained on.

    Raises ValueError, in one line, where they cannot be had or have changed since. The result beside the checkpoint
    tells of contents; where there is none, only another size is noticed.
    """
    source = load_data(module.cfg.data)
    for name in ("vocab_size", "context_length"):
        there, here = module.hparams[name], getattr(source, name)
        if there != here:
            raise ValueError(
                f"checkpoint {str(checkpoint)!r}: was trained on data of {name}={there}, which are {name}={here} here; "
                "give it those, or train again"
            )
    try:
        trained_on = json.loads((checkpoint.parent / RESULT).read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return source
    if trained_on != source.fingerprint:
        raise ValueError(
            f"checkpoint {str(checkpoint)!r}: its data ({source.name}) are not those of its training any more; give it "
            "those, or train again"
        )
    return source
