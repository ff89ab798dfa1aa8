"""What a rank tells the parent: one JSON object a line, errors included.

Events are ``{"event": name, ...}``. "done" carries the rank's ``result``, "error" an error's
class and lines; all other names belong to the job that emits them.
"""

import json
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

from core_torch import errors
from core_torch.errors import TwinshardError

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


class RankFailed(TwinshardError):
    """A rank ended by an error that no user should meet: a fault of Twinshard."""


class EventWriter:
    """Writes events to a file descriptor; safe to call from several threads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        line = (json.dumps(event) + "\n").encode()
        with self._lock:
            while line:
                line = line[os.write(self._descriptor, line) :]


class EventLines:
    """Cuts bytes as they arrive from a pipe into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """Events that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


def error_event(error: BaseException) -> Event:
    """The event for an error that ends a rank."""
    if isinstance(error, TwinshardError):
        lines = {name: getattr(error, name) for name in ("what", "where", "likely", "next")}
        return {"event": "error", "class": type(error).__name__, **lines}
    what = "".join(traceback.format_exception_only(error)).strip()
    return {"event": "error", "class": "", "what": what}


def error_from(event: Event, rank: int) -> TwinshardError:
    """The error that ``error_event`` described, on the parent's side."""
    kind = getattr(errors, event["class"], None) if event["class"] else None
    if not (isinstance(kind, type) and issubclass(kind, TwinshardError)):
        return RankFailed(f"rank {rank} raised {event['what']}")
    lines = {name: event[name] for name in ("where", "likely", "next")}
    return kind(event["what"], **lines)
