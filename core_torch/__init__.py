"""Production torch core: sharded training with local SGD."""

__version__ = "0.1.0"
