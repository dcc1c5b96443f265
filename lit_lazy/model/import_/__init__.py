"""Import of language models from their published files. Here, without torch: the kinds of sources, by their names."""

import re
from pathlib import Path

KINDS = "a folder with config.json and safetensors, a .gguf file, or a name on the Hub"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_name(given: Path) -> bool:
    """Whether a path that does not exist can be a name on the Hub."""
    return HUB_NAME.fullmatch(str(given)) is not None and given.suffix not in (".gguf", *PICKLES)
