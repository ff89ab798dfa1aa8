"""What a deliberate fault is; see mutants.py."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One edit of one function."""

    target: str  # module:qualname
    before: str
    after: str
