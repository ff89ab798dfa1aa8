"""A copy of a rank's state in host memory, which training cannot change any more."""

import torch
from torch import Tensor

from core_torch.checkpoint.state import SavedState, Shard


class Staging:
    """Host memory for copies of one run's state; each copy overwrites the one before."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, state: SavedState) -> SavedState:
        """``state`` in host memory, contiguous; complete when this returns."""
        tensors = [s.local for s in (*state.shared.values(), *state.own.values())]
        staged = SavedState(
            {k: self._copy(f"shared/{k}", shard) for k, shard in state.shared.items()},
            {k: self._copy(f"own/{k}", shard) for k, shard in state.own.items()},
            state.scalars,
        )
        for device in {x.device for x in tensors if x.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return staged

    def _copy(self, name: str, shard: Shard) -> Shard:
        like, buffer = shard.local, self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (like.shape, like.dtype):
            pinned = like.device.type == "cuda"  # else the copy would be made in two steps
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
            self._buffers[name] = buffer
        buffer.copy_(like, non_blocking=True)
        return shard._replace(local=buffer)
