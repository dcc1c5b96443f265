"""How figures show the parts that tell a table's rows apart: normalisers, mixers and positions."""

from typing import ClassVar

from lit_lazy.support.checked_fields import CheckedFields


class Drawn(CheckedFields):
    """A part whose class figures show by a colour and a name. Both are the class's own, not its subclasses'."""

    colour: ClassVar[str] = ""
    """Hexadecimal; figures choose one where it is empty. The project's are Okabe and Ito's, then Tol's muted ones, for
    positions his high-contrast ones: they are also distinguishable with common colour blindness."""
    spoken: ClassVar[str] = ""
    """How people write its name, where that is not the name of the class."""
