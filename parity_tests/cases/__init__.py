"""Functions that torch ranks run for the parity tests. Nothing here may import JAX."""
