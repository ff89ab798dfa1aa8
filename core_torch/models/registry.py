"""The architectures by name, and what each needs at the start of a run.

To add one: a ``Decoder`` in a file of its own, a row here, its name in ``ModelConfig.kind``, its
shapes in simulate/shapes.py, and its mirror in reference_jax.
"""

from collections.abc import Callable
from typing import NamedTuple

from core_torch.config import ModelConfig
from core_torch.models.decoder import Decoder
from core_torch.models.gpt2 import Gpt2
from core_torch.models.llama import Llama


class Architecture(NamedTuple):
    """One row."""

    build: Callable[[ModelConfig, int], Decoder]
    to_residual: tuple[str, ...]  # ends of the names of matrices that write to the stream


_WRITERS = ("attention.wo.weight", "feed_forward.w2.weight")
ARCHITECTURES = {
    "llama": Architecture(Llama, _WRITERS),
    "qwen3": Architecture(Llama, _WRITERS),
    "gpt2": Architecture(Gpt2, _WRITERS),
}
