"""Eight JAX devices on the CPU, float64, and programs that compile fast.

The settings are those of parity_tests/harness/jax_setup.py, so that one session can run both.
"""

import os

import jax

FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
if "--xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()

SETTINGS = {
    "jax_platforms": "cpu",
    "jax_num_cpu_devices": 8,
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "highest",
}
for name, value in SETTINGS.items():
    jax.config.update(name, value)
