"""Causal attention of several heads, for every architecture here.

Shape suffixes
    B  sequences    T  positions    H  query heads    K  key/value heads    E  width of a head
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def document_mask(documents_BT: Tensor) -> Tensor:
    """(B, 1, T, T) bool: query t sees key s if s is not later and in the same document."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return torch.tril(same_BTT)[:, None]


def attend(
    q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask_B1TT: Tensor | None = None
) -> Tensor:
    """(B, T, H * E) values, weighed by softmax(q k / sqrt(E)) over what each query sees.

    A key/value head serves H / K query heads. Without a mask a query sees its own position and
    all before it.
    """
    mixed_BHTE = F.scaled_dot_product_attention(
        q_BTHE.transpose(1, 2),
        k_BTKE.transpose(1, 2),
        v_BTKE.transpose(1, 2),
        attn_mask=mask_B1TT,
        is_causal=mask_B1TT is None,
        enable_gqa=q_BTHE.shape[2] != k_BTKE.shape[2],
    )
    return mixed_BHTE.transpose(1, 2).flatten(-2)


class Past:
    """Keys and values of the positions that one layer has seen, for generation.

    Args:
        context: the most positions that there can be.
    """

    def __init__(self, context: int) -> None:
        self.context, self.length = context, 0
        self._held: tuple[Tensor, Tensor] | None = None

    def extend(self, k_BTKE: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Adds positions. Returns all keys and values, and the mask of the new queries."""
        if self._held is None:
            b, _, *heads = k_BTKE.shape
            shape = (b, self.context, *heads)
            self._held = (k_BTKE.new_empty(shape), v_BTKE.new_empty(shape))
        first, self.length = self.length, self.length + k_BTKE.shape[1]
        for held, new in zip(self._held, (k_BTKE, v_BTKE), strict=True):
            held[:, first : self.length] = new
        k_BSKE, v_BSKE = (held[:, : self.length] for held in self._held)
        if first == 0:
            return k_BSKE, v_BSKE, None
        seen_TS = torch.ones(self.length - first, self.length, dtype=torch.bool)
        return k_BSKE, v_BSKE, seen_TS.tril(first)[None, None].to(k_BTKE.device)
