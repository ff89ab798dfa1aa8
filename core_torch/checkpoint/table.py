"""Which rows of which tensor lie in which file: the table inside state.json.

Files of one folder (``tensors`` or one replica's) cut each tensor along dimension 0. Nothing
says how evenly, so any number of ranks may take the rows up again. A file names what its rank
holds: of a pipeline, the tensors of its stages.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # tables are read without torch too
    from core_torch.checkpoint.state import Shard

DTYPES = {  # torch's name -> code in the file's header
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}


class Piece(NamedTuple):
    """One file's rows of one tensor."""

    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    rows: int  # 0 for a tensor without dimensions

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what the file holds."""
        return (self.rows, *self.shape[1:]) if self.shape else ()

    @property
    def numbers(self) -> int:
        """Numbers in the whole tensor."""
        return math.prod(self.shape)

    @property
    def code(self) -> str:
        """Its dtype in the file's header."""
        return DTYPES[self.dtype]


Table = dict[str, dict[str, Piece]]  # file -> tensor -> rows


def shared_file(shard: int) -> str:
    """File of shard ``shard`` of what all replicas share."""
    return f"tensors/shard-{shard:04d}.safetensors"


def own_file(replica: int, shard: int) -> str:
    """File of shard ``shard`` of replica ``replica``."""
    return f"replica-{replica:04d}/shard-{shard:04d}.safetensors"


def folders(replicas: int, shards: int) -> list[list[str]]:
    """All files of a checkpoint with tensors, one list for each folder."""
    own = [[own_file(n, m) for m in range(shards)] for n in range(replicas)]
    return [[shared_file(m) for m in range(shards)], *own]


def pieces_of(shards: "dict[str, Shard]") -> dict[str, Piece]:
    """What a file with these shards holds.

    Raises:
        ValueError: a dtype or a shape that no checkpoint can hold.
    """
    pieces = {}
    for name, shard in shards.items():
        dtype = str(shard.local.dtype).removeprefix("torch.")
        piece = Piece(dtype, tuple(shard.shape), shard.start, shard.rows)
        if dtype not in DTYPES or tuple(shard.local.shape) != piece.local_shape:
            held = f"{dtype} {list(shard.local.shape)}"
            raise ValueError(f"{name}: {held} cannot be rows of {list(shard.shape)}")
        pieces[name] = piece
    return pieces


def to_json(table: Table) -> dict[str, Any]:
    """The table as JSON holds it."""
    return {f: {name: p._asdict() for name, p in pieces.items()} for f, pieces in table.items()}


def from_json(raw: Any) -> Table:
    """Inverse of ``to_json``.

    Raises:
        ValueError: it is no such table.
    """
    try:
        return {
            f: {name: _piece(**piece) for name, piece in pieces.items()}
            for f, pieces in raw.items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(f"no table of tensors: {error}") from error


def _piece(dtype: str, shape: list[int], start: int, rows: int) -> Piece:
    counts = [*shape, start, rows]
    if dtype not in DTYPES or any(type(c) is not int or c < 0 for c in counts):
        raise ValueError(f"{dtype} {counts} does not describe rows of a tensor")
    return Piece(dtype, tuple(shape), start, rows)


def check_table(table: Table, replicas: int, shards: int) -> None:
    """Returns if in each folder the files together hold every row of every tensor once.

    Raises:
        ValueError: a file, tensor or row is missing, there twice, or of another kind.
    """
    if min(replicas, shards) < 1 or len(table) != (replicas + 1) * shards:
        raise ValueError(f"{len(table)} files do not fit {replicas} replicas x {shards} shards")
    expected = folders(replicas, shards)
    names = {name for files in expected for name in files}
    if table.keys() != names:
        raise ValueError(f"files {sorted(table.keys() ^ names)[:4]} are missing or unexpected")
    for files in expected:
        for name in sorted({name for f in files for name in table[f]}):
            _check_pieces(name, [table[f][name] for f in files if name in table[f]])


def _check_pieces(name: str, pieces: list[Piece]) -> None:
    dtype, shape = pieces[0].dtype, pieces[0].shape
    if any((p.dtype, p.shape) != (dtype, shape) for p in pieces):
        raise ValueError(f"{name} has another dtype or shape in another shard")
    if not shape:
        if any(p.start or p.rows for p in pieces):
            raise ValueError(f"{name} has no dimension, so no rows")
        return
    end = 0
    for start, rows in sorted((p.start, p.rows) for p in pieces if p.rows):
        if start != end:
            raise ValueError(f"{name}: row {end} is followed by row {start} of another shard")
        end += rows
    if end != shape[0]:
        raise ValueError(f"{name}: {end} of {shape[0]} rows are there")
