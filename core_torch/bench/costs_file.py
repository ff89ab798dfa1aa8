"""Costs of one run in a file, for the estimates of another and for automatic plans."""

import json
from pathlib import Path
from typing import Any

from core_torch.bench.link import Network
from core_torch.errors import ConfigError
from core_torch.shard.cost import Costs, read_costs, save

Row = dict[str, Any]


def write_run_costs(path: Path, row: Row, network: Network | None) -> None:
    """Keeps a run's costs, with the link that they were measured on."""
    numbers = {k: float(v) for k, v in row["costs"].items()}
    save(path, "costs", Costs(**numbers))  # type: ignore[arg-type]
    link = None if network is None else {"rate": network.rate, "delay": network.delay}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"network": link}, indent=1))


def read_run_costs(path: Path, network: Network | None) -> Row | None:
    """Costs of another run, with the link exchanged for this one; None if there is no file.

    Raises:
        ConfigError: a file that holds none, or a link whose nominal rate is not known.
    """
    if not path.exists():
        return None
    found = read_costs(path)
    link = json.loads(path.read_text()).get("network")
    if (link is None) != (network is None):
        raise ConfigError(
            "costs: were measured on loopback and an emulated link is wanted, or the reverse",
            next="--costs of a run with --network RATE,DELAY",
        )
    rate, latency = found.link_bytes_per_second, found.latency_seconds
    if network is not None:
        rate *= network.rate / link["rate"]
        latency = max(0.0, latency + 2 * (network.delay - link["delay"]))
    return {
        "flops_per_second": str(found.flops_per_second),  # JSON has no infinity
        "bytes_per_second": str(found.bytes_per_second),
        "seconds_per_operator": found.seconds_per_operator,
        "latency_seconds": latency,
        "link_bytes_per_second": str(rate),
        "compute_slowdown": found.compute_slowdown,
    }
