"""Python's standard library in the tokens of a language model."""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lit_lazy.data.pipeline.documents import Files, Source
from lit_lazy.data.pipeline.tokeniser import TokenizerSpec
from lit_lazy.data.stdlib import find_sources, is_validation
from lit_lazy.data.text import Text
from lit_lazy.support.checked_fields import require


@dataclass(frozen=True)
class StdlibText(Text):
    """The files of `Stdlib`, split alike into training and validation, in the tokens of `tokenizer`.

    `--data.path` gives other text in its place.
    """

    @property
    def _spec(self) -> TokenizerSpec:
        # A docstring of turtle.py has `<filename>`, a control token of SmolLM2: published results read it as one.
        return replace(super()._spec, control=not (self.path or self.hub))

    def _sources(self) -> Sequence[Source]:
        if self.path or self.hub:
            return super()._sources()
        require(not self.validation, "data.validation", self.validation, "needs data.path; leave it out")
        files = find_sources(Path(sysconfig.get_path("stdlib")))
        parts = (
            tuple(file for path, file in files.items() if is_validation(path) is held_out) for held_out in (False, True)
        )
        return [Files("data.path", "the standard library", self.column, part) for part in parts]
