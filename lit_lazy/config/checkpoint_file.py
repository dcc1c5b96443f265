"""The file of a checkpoint: read without running code, and validated."""

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from lit_lazy.support.checked_fields import MOST
from lit_lazy.support.disk import open_file
from lit_lazy.support.error_messages import describe_exception, is_larger_than
from lit_lazy.support.stored_records import require_known_format

FORMAT = 1
"""Format of a checkpoint; raised when its content is laid out otherwise."""
MOST_ITEMS = 10**7
"""Numbers, characters and other items of a checkpoint beside the elements of its weights."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Content of one of this project's checkpoints.

    Raises a one-line ValueError if the file is not one, NewerFormatError if a newer version wrote it.
    """
    try:
        with open_file(path) as file:
            # torch does not verify the checksums that it wrote.
            archive = zipfile.ZipFile(file)
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise zipfile.BadZipFile("it is compressed, which torch does not do")  # could expand to any size
            if (part := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"bad checksum of {part}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about kinds of tensors that are refused below
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except pickle.UnpicklingError:
        raise ValueError("holds more than weights and numbers, so it is not loaded: it could run code") from None
    except Exception as error:  # other files raise almost anything
        raise ValueError(f"is no checkpoint, or damaged ({describe_exception(error)})") from None
    if is_larger_than(content, MOST_ITEMS):
        raise ValueError("is no checkpoint: by references to itself it stands for more than the file holds")
    if isinstance(content, dict):
        require_known_format(f"checkpoint {str(path)!r}", content, FORMAT)
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
        and isinstance(sources := content.get("sources", {}), dict)
        and isinstance(sources.get("code", {}), dict)
        and isinstance(settings := content.get("hyper_parameters"), dict)
        and settings.keys() == {"config", "vocab_size", "context_length"}
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor as this project writes it: dense, on the CPU, of real numbers."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_nested or value.is_quantized or value.is_complex())
        and value.nbytes <= value.untyped_storage().nbytes()
    )
