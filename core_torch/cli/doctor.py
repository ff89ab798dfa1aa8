"""``twinshard doctor``: is this machine fit, and do its collectives tell the truth?"""

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from core_torch.cli.launch import launch
from core_torch.cli.options import DoctorOptions
from core_torch.errors import EXIT_OK, ConfigError, TwinshardError
from core_torch.report.records import write_json
from core_torch.report.text import human_bytes

PACKAGES = ("torch", "jax", "flax", "numpy", "safetensors", "tokenizers", "tyro", "rich")
RED = ("wrong", "failed")
_WORST_FIRST = ("wrong", "failed", "warning", "not offered", "ok")
_STYLES = {"ok": "green", "wrong": "bold red", "failed": "bold red", "warning": "yellow"}
_SILENCE_SECONDS = 120.0

Check = dict[str, Any]


def run(options: DoctorOptions, words: list[str]) -> int:
    """Examines the machine, prints two tables, and returns 1 if anything is red.

    Raises:
        ConfigError: the file of ``--json`` cannot be written.
    """
    result = examine(options.ranks)
    console = Console()
    console.print(facts_table(result["facts"]))
    console.print(checks_table(result["checks"]))
    if options.json:
        try:
            write_json(Path(options.json), result)
        except OSError as error:
            raise ConfigError(f"json: cannot write {options.json!r}: {error.strerror}") from None
    red = [check["name"] for check in result["checks"] if check["state"] in RED]
    console.print(f"red: {', '.join(red)}" if red else "no check is red", highlight=False)
    return 1 if red else EXIT_OK


def examine(ranks: int) -> dict[str, Any]:
    """Facts about this machine, and checks that ``ranks`` processes made together."""
    versions = installed_versions()
    checks = [
        failed(f"package {name}", "is not installed")
        for name, version in versions.items()
        if version is None
    ]
    facts: dict[str, Any] = {"versions": versions, "machine": machine()}
    seen: list[Check] = []
    try:
        facts["ranks"] = {"ranks": ranks} | launch(
            {"kind": "doctor"}, ranks, seen.append, silence_seconds=_SILENCE_SECONDS
        )
    except TwinshardError as error:
        if error.exit_code not in (1, 6):  # it was not the machine's fault
            raise
        checks.append(failed("ranks work together", str(error)))
    checks += merged(seen)
    is_ok = not any(check["state"] in RED for check in checks)
    return {"ok": is_ok, "facts": facts, "checks": checks}


def installed_versions() -> dict[str, str | None]:
    """Version of each package that Twinshard stands on; None where it is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def failed(name: str, detail: str) -> Check:
    """A check that failed before any rank could make it."""
    return {"name": name, "state": "failed", "detail": detail, "used": True}


def machine() -> dict[str, Any]:
    """System, processors, free memory and disk; bytes, None where unknown."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.platform(),
        "cpus": usable,
        "omp_threads": os.environ.get("OMP_NUM_THREADS", "1 (set for ranks)"),
        "memory_free_bytes": free_memory(),
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
    }


def free_memory() -> int | None:
    """Bytes that new processes can have, as far as the system tells."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def merged(seen: list[Check]) -> list[Check]:
    """One check per name out of those of all ranks: the worst, and whose it is."""
    by_name: dict[str, list[Check]] = {}
    for event in seen:
        by_name.setdefault(event["name"], []).append(event)
    checks = []
    for name, same in by_name.items():
        worst = min(same, key=lambda event: _WORST_FIRST.index(event["state"]))
        detail = worst["detail"]
        if worst["state"] in RED:
            detail = f"rank {worst['rank']}: {detail}"
        entry = {"name": name, "state": worst["state"], "detail": detail, "used": worst["used"]}
        checks.append(entry)
    return checks


def facts_table(facts: dict[str, Any]) -> Table:
    """Versions and the machine, one a line."""
    table = Table("this machine", "", show_edge=False)
    for section in facts.values():
        for name, value in section.items():
            if name.endswith("_bytes"):
                name, value = name.removesuffix("_bytes"), human_bytes(value)
            shown = "missing" if value is None else str(value)
            table.add_row(Text(name.replace("_", " ")), Text(shown))
    return table


def checks_table(checks: list[Check]) -> Table:
    """The truth table: what was checked, and whether it held."""
    table = Table("check", "state", "detail", show_edge=False)
    for check in checks:
        state = Text(check["state"], style=_STYLES.get(check["state"], "dim"))
        table.add_row(Text(check["name"]), state, Text(check["detail"]))
    return table
