"""One torch rank: joins its peers once, then runs the functions that the pool sends.

Started by ``pool.py`` as ``python -m parity_tests.harness.rank_main SOCKET RANK WORLD STORE``.
A request is (function as "module:qualname", arguments, mutant name or None), an answer
(result or None, traceback or None). Ends when the pool closes the socket or, even inside a
collective that never returns, when the parent process ends: stdin reports end of file then.
"""

import contextlib
import faulthandler
import importlib
import importlib.abc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401  seconds, not to be spent within a case's deadline

from parity_tests.harness import codec, mutants, rank_mesh
from parity_tests.harness.messages import receive, send

COLLECTIVE_SECONDS = 600.0  # longer than any deadline of the pool, which reports better


class _NoJax(importlib.abc.MetaPathFinder):
    """Refuses JAX in a rank: the core must not need it, and four copies of it cost a gigabyte."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.partition(".")[0] in ("jax", "jaxlib", "flax"):
            raise ImportError(f"a rank imports {fullname}: what ranks run must not need JAX")


def find_function(name: str) -> Callable[..., Any]:
    """The module-level function called ``module:qualname``."""
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def answer(request: bytes) -> bytes:
    """Runs one request from a known state and encodes its result or its traceback."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    rank_mesh.forget_traffic()
    torch.compiler.reset()  # torch compiles no more than eight models from one line of code
    try:
        name, args, mutant = codec.decode(request)
        function = find_function(name)
        with mutants.applied(mutant) if mutant else contextlib.nullcontext():
            return codec.encode((function(*args), None))
    except Exception:
        return codec.encode((None, traceback.format_exc()))


def _die_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main(descriptor: int, rank: int, world: int, store: str) -> None:
    """Serves requests until the pool closes the socket."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the pool asks where a rank hangs
    sys.meta_path.insert(0, _NoJax())
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    with socket.socket(fileno=descriptor) as pool:
        send(pool, codec.encode((rank, None)))
        while (request := receive(pool)) is not None:
            send(pool, answer(request))
    os._exit(0)  # peers end at the same time; leaving a process group in order could wait for them


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
