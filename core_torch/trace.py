"""The writer of traces: what a run computed, value by value, in a folder that can be compared.

    meta.json                    what ran: core, versions, method, mesh, dtypes, hashes
    events.<rank>.jsonl          one value a line, in program order
    marks.<rank>.jsonl           where each inner step ended, for a run that is resumed
    tensors.<rank>.safetensors   optional: this rank's part of every tensor, by ``seq``

A tensor is written as its sketch (sketch.py), each rank its own part. A line is on its way to
the disk when the call that wrote it returns, so what a crash leaves can be read. The format is
the subject of docs/parity.md.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

from safetensors.torch import load_file, save_file
from torch import Tensor

from core_torch.errors import TwinshardError
from core_torch.sketch import sketch

SCHEMA = "twinshard-trace/1"
# Two parts of one trace are of one run if these agree.
IDENTITY = ("schema", "core", "method", "mesh", "dtype", "compute", "model")


class TraceError(TwinshardError):
    """A folder that cannot take a trace, or not this one."""

    exit_code: ClassVar[int] = 2


class Key(NamedTuple):
    """What a value is. A round has a number; ``step`` is then the one after which it was measured.

    ``unit`` is None for what concerns the whole model, ``replica`` for what all have agreed on.
    """

    step: int
    phase: str
    unit: str | None
    name: str
    replica: int | None
    round: int | None = None


class Part(NamedTuple):
    """This rank's part of a tensor: places ``start`` and following of the whole one."""

    local: Tensor
    shape: tuple[int, ...]  # of the whole
    start: int = 0


class Tracer:
    """Writes the trace of one rank.

    Args:
        folder: of the trace; made if it is missing.
        rank: of this process.
        meta: what ran; rank 0 writes it. The schema is added.
        keep_tensors: also keep every tensor, written when the trace is closed.
        resume_at: of a resumed run, the inner step that it goes on from: what the folder holds
            of later steps is forgotten. None: the folder must hold no trace.

    Raises:
        TraceError: the folder holds a trace already, or one that cannot be continued.
    """

    def __init__(
        self,
        folder: Path | str,
        rank: int,
        meta: Mapping[str, Any],
        *,
        keep_tensors: bool = False,
        resume_at: int | None = None,
    ) -> None:
        self.folder, self.rank = Path(folder), rank
        self.seq = 0  # of the next line
        self._kept: dict[str, Tensor] | None = {} if keep_tensors else None
        self._events = self.folder / f"events.{rank}.jsonl"
        self._marks = self.folder / f"marks.{rank}.jsonl"
        self._tensors = self.folder / f"tensors.{rank}.safetensors"
        self.continues = resume_at is not None and self._events.exists()
        meta = {"schema": SCHEMA, **meta}
        if self.continues:
            assert resume_at is not None
            self._check_meta(meta)
            self._go_back(resume_at)
        else:
            self._check_empty()
            self.folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                _write(self.folder / "meta.json", json.dumps(plain(meta), indent=2) + "\n")
        self._lines = self._events.open("a", encoding="utf-8")
        self._ends = self._marks.open("a", encoding="utf-8")

    def tensor(self, key: Key, part: Part) -> None:
        """Writes this rank's part of a tensor; a part without elements too."""
        held = part.local.detach()
        if self._kept is not None:
            self._kept[str(self.seq)] = held.cpu().clone()
        shard = {"axis": 0, "start": part.start, "n": held.numel()}
        what = {"shape": list(part.shape), "dtype": dtype_name(held), "shard": shard}
        self._write(key._asdict() | what | sketch(held, part.start)._asdict())

    def value(self, key: Key, value: Mapping[str, Any]) -> None:
        """Writes a few plain numbers, true for the whole replica or for all of them."""
        self._write(key._asdict() | {"value": dict(value)})

    def collective(self, step: int, op: str, axis: str, size: int, unit: str) -> None:
        """Writes that this rank has dispatched a collective of ``size`` bytes."""
        line = {"step": step, "kind": "collective", "op": op, "axis": axis}
        self._write(line | {"bytes": size, "unit": unit})

    def mark(self, step: int) -> None:
        """Says that inner step ``step`` is over: a run can be resumed here."""
        self._ends.write(json.dumps({"step": step, "seq": self.seq}) + "\n")
        self._ends.flush()

    def close(self) -> None:
        """Closes the files; writes kept tensors. To be called once."""
        self._lines.close()
        self._ends.close()
        if self._kept is not None:
            unfinished = self._tensors.with_suffix(".unfinished")
            save_file(self._kept, unfinished)
            os.replace(unfinished, self._tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(plain({"seq": self.seq, **line}), allow_nan=False)
        self._lines.write(text + "\n")
        self._lines.flush()
        self.seq += 1

    def _check_empty(self) -> None:
        held = [p for p in (self._events, self.folder / "meta.json") if p.exists()]
        if self._events in held or (held and self.rank == 0):
            raise TraceError(
                "the folder holds a trace already",
                where=str(held[0]),
                next="another folder, or resume the run whose trace it is",
            )

    def _check_meta(self, meta: Mapping[str, Any]) -> None:
        """Refuses to go on with the trace of something else."""
        path = self.folder / "meta.json"
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TraceError(f"cannot read meta.json: {error}", where=str(path)) from error
        new = json.loads(json.dumps(plain(meta)))  # tuples are lists there
        for name in IDENTITY:
            if old.get(name) != new.get(name):
                raise TraceError(
                    f"{name}: the trace says {old.get(name)!r}, the run {new.get(name)!r}",
                    where=str(path),
                    likely="the folder holds the trace of another run",
                    next="another folder",
                )

    def _go_back(self, step: int) -> None:
        """Forgets everything after inner step ``step``, so that the next line goes on from it."""
        marks = _complete_lines(self._marks)
        kept = [line for line in marks if json.loads(line)["step"] <= step]
        last: dict[str, int] = json.loads(kept[-1]) if kept else {"step": -1, "seq": 0}
        lines = _complete_lines(self._events)
        if last["step"] != step or len(lines) < last["seq"]:
            raise TraceError(
                f"the trace has nothing that ends with inner step {step}",
                where=str(self._events),
                likely="that step was not traced",
                next="another folder for the rest of the run",
            )
        self.seq = last["seq"]
        _write(self._marks, "".join(kept))
        _write(self._events, "".join(lines[: self.seq]))
        if self._kept is not None and self._tensors.exists():
            held = load_file(self._tensors)
            self._kept |= {seq: x for seq, x in held.items() if int(seq) < self.seq}


def dtype_name(x: Tensor) -> str:
    """``float32`` for ``torch.float32``."""
    return str(x.dtype).removeprefix("torch.")


def plain(value: Any) -> Any:
    """``value`` as JSON holds it: floats that are not finite become text, tuples lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(x) for x in value]
    return value


def _complete_lines(path: Path) -> list[str]:
    """Lines with their ends, but for one that a crash has cut off."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return lines[:-1] if lines and not lines[-1].endswith("\n") else lines


def _write(path: Path, text: str) -> None:
    """All of ``text`` or nothing."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
