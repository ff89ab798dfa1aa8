"""Options of ``twinshard plan`` besides those of a run."""

import re
from dataclasses import dataclass

from core_torch.config import Problem
from core_torch.config_base import at_least

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?)?B?")
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What is known of the cluster, and where to write."""

    memory: str = ""  # of a device, such as 80GB or 80GiB: does the run fit?
    tflops: float = 0.0  # 10^12 operations per second that a rank sustains; 0: no durations
    bandwidth: float = 0.0  # 10^9 bytes per second out of a rank to its shards; 0: no durations
    replica_bandwidth: float = 0.0  # the same to other replicas; 0: as bandwidth
    json: str = ""  # also write the plan to this file

    @property
    def memory_bytes(self) -> float | None:
        """Bytes of a device, if they are known."""
        found = _SIZE.fullmatch(self.memory)
        if found is None:
            return None
        return float(found[1]) * (_UNITS | _BINARY | {None: 1})[found[2]]

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = at_least(0, self, "tflops", "bandwidth", "replica_bandwidth")
        if self.memory and not self.memory_bytes:
            problems.append(Problem("memory", f"must be like 80GB or 80GiB, got {self.memory!r}"))
        if (self.tflops > 0) != (self.bandwidth > 0):
            message = f"durations need both, got {self.tflops:g} and {self.bandwidth:g}"
            problems.append(Problem("tflops and bandwidth", message))
        if self.replica_bandwidth and not self.bandwidth:
            problems.append(Problem("replica_bandwidth", "says nothing without bandwidth"))
        return problems
