"""Proof that core_torch and reference_jax compute the same; the only place that imports both.

``harness`` runs torch ranks next to JAX and measures differences, ``cases`` holds what the
ranks run (and therefore imports no JAX), ``test_*.py`` compare.
"""
