"""Everything private that Twinshard takes from PyTorch, in one place.

Checked on torch 2.13.0. ``core_torch/tests/test_compat.py`` fails when one of these moves.
"""

import contextlib
import importlib
from typing import Any

from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# Imported at their first use: a run without a compiler need not wait for one.
_LATE = {
    "BoxedBool": "torch._inductor.utils",
    "FakeStore": "torch.testing._internal.distributed.fake_pg",
    "aot_autograd": "torch._dynamo.backends.common",
    "compile_fx_inner": "torch._inductor.compile_fx",
    "min_cut_rematerialization_partition": "functorch.compile",
    "select_decomp_table": "torch._inductor.decomposition",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(name)
    return getattr(importlib.import_module(_LATE[name]), name)


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process."""
    counters = importlib.import_module("torch._dynamo.utils").counters
    return int(counters["stats"]["unique_graphs"])


def donated_inputs() -> list[int]:
    """Inputs of the backward graph being compiled that nobody needs afterwards.

    torch finds them, and refuses ``retain_graph`` for a backward that was compiled with some.
    """
    context = TracingContext.try_get()
    found = None if context is None else context.fw_metadata
    return list(found.bw_donated_idxs or []) if found is not None else []


def recompute_what_is_cheap() -> contextlib.AbstractContextManager[None]:
    """Partitioner settings: recompute all but products, attention and reductions.

    By default it saves what is used far apart, or hangs on a long chain, to save time on a
    GPU's kernels; memory is what sharded training is short of.
    """
    config = importlib.import_module("torch._functorch.config")
    return config.patch(
        ban_recompute_used_far_apart=False,
        ban_recompute_long_fusible_chains=False,
        ban_recompute_materialized_backward=False,
    )


__all__ = [
    "FakeTensorMode",
    "StridedShard",
    "TracingContext",
    "detect_fake_mode",
    "donated_inputs",
    "graphs_compiled",
    "recompute_what_is_cheap",
    "tracing",
]
