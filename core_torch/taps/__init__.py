"""Taps: where a trace (trace.py) reads a run. Nothing is tapped unless somebody asks.

tap      a run of the trainer, with its rounds
trace    anybody's module and torch optimizer
"""

from core_torch.taps.module import ModuleTaps, trace
from core_torch.taps.run import RunTaps, tap

__all__ = ["ModuleTaps", "RunTaps", "tap", "trace"]
