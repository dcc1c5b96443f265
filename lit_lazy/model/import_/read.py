"""A source by its kind: folder, file, or name on the Hub."""

from pathlib import Path

from lit_lazy.model.import_.kinds import KINDS, PICKLES, is_hub_name
from lit_lazy.model.import_.published import PublishedModel, make_pickle_error


def read_model(given: Path) -> PublishedModel:
    """The model in a folder, in a .gguf file, or of this name on the Hub. Raises a one-line ValueError."""
    from lit_lazy.model.import_.folder import download, read_folder

    if given.is_dir():
        return read_folder(given)
    if not given.exists() and is_hub_name(given):
        return read_folder(download(str(given)))
    if given.suffix in PICKLES:
        raise make_pickle_error(given)
    if given.suffix != ".gguf":
        raise ValueError(f"must be {KINDS}")
    from lit_lazy.model.import_.gguf_file import read_gguf

    return read_gguf(given)
