"""A source by its kind: folder, file, or name on the Hub."""

import re
from pathlib import Path

from lit_lazy.model.import_.published import PICKLES, PublishedModel, make_pickle_error

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def read_model(given: Path) -> PublishedModel:
    """The model in a folder, in a .gguf file, or of this name on the Hub. Raises a one-line ValueError."""
    from lit_lazy.model.import_.folder import download, read_folder

    if given.is_dir():
        return read_folder(given)
    if not given.exists() and HUB_NAME.fullmatch(str(given)) and given.suffix not in (".gguf", *PICKLES):
        return read_folder(download(str(given)))
    if given.suffix in PICKLES:
        raise make_pickle_error(given)
    if given.suffix != ".gguf":
        raise ValueError("must be a folder with config.json and safetensors, a .gguf file, or a name on the Hub")
    from lit_lazy.model.import_.gguf_file import read_gguf

    return read_gguf(given)
