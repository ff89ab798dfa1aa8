"""JAX as the parity tests need it; to be called before JAX makes its devices.

reference_jax/tests asks for the same settings, so that one pytest session can run both.
"""

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

import jax

DEVICES = 8
# Level 0 leaves out contraction to fused multiply-add, so elementwise operations round as
# torch's do, and compiles four times as fast.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
SETTINGS = {
    "jax_platforms": "cpu",
    "jax_num_cpu_devices": DEVICES,
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "highest",
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def prepare() -> None:
    """Forces 8 CPU devices, float64, full matmul precision, level 0 and a persistent cache.

    Raises:
        RuntimeError: JAX is already running with fewer devices.
    """
    present = os.environ.get("XLA_FLAGS", "")
    if "--xla_backend_optimization_level" not in present:
        os.environ["XLA_FLAGS"] = f"{present} {FLAGS}".strip()
    settings = SETTINGS | {"jax_compilation_cache_dir": str(cache_folder())}
    for name, value in settings.items():
        jax.config.update(name, value)


def cache_folder() -> Path:
    """Folder of compiled programs, one for each jaxlib and kind of CPU."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "twinshard" / f"jax-{version('jaxlib')}-{_cpu()}"


def _cpu() -> str:
    """Short name of this CPU's instruction set; compiled programs do not run on another."""
    features = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(errors="replace").splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:12]
