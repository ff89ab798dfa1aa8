"""What the trainer knows of a model, and the frame that all architectures here share.

Shape suffixes
    B  sequences    T  positions    D  width    V  vocabulary
"""

from collections.abc import Iterable, Sequence

import torch.nn as nn
from torch import Tensor

from core_torch.config import ModelConfig
from core_torch.models.attention import Past, document_mask
from core_torch.models.loss import Head

Units = dict[str, tuple[str, ...]]  # unit -> modules whose parameters it holds, in order of use


class Model(nn.Module):
    """Token ids in, logits out; ``forward`` takes what that of ``Decoder`` takes."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = vocabulary

    @property
    def units(self) -> Units:
        """What is unsharded and synchronised as one, in the order of the forward."""
        raise NotImplementedError

    @property
    def blocks(self) -> tuple[type[nn.Module], ...]:
        """Classes of the modules whose activations may be computed again."""
        raise NotImplementedError


class Layer(nn.Module):
    """Attention, then feed-forward, each on a normed residual stream."""

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        attention_norm: nn.Module,
        ffn_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm  # in this order parameters are named
        self.attention = attention
        self.ffn_norm = ffn_norm
        self.feed_forward = feed_forward

    def forward(
        self, x_BTD: Tensor, mask: Tensor | None = None, past: Past | None = None
    ) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), mask, past)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Decoder(Model):
    """Embedding, blocks, norm and head.

    Args:
        config: its sizes.
        vocabulary: token ids.
        blocks: the layers; each takes (B, T, D) and a mask of ``attend`` or None.
        norm: before the head.
    """

    def __init__(
        self, config: ModelConfig, vocabulary: int, blocks: Iterable[nn.Module], norm: nn.Module
    ) -> None:
        super().__init__(config, vocabulary)
        self.tok_embeddings = nn.Embedding(vocabulary, config.dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.output = Head(config.dim, vocabulary, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight

    @property
    def units(self) -> Units:
        """Embedding, each block, then final norm with head.

        A tied head belongs to the embedding's unit, and the final norm with it, so that the
        unit is gathered once and a sync round reaches it before its first use.
        """
        blocks: Units = {f"layers.{i}": (f"layers.{i}",) for i in range(len(self.layers))}
        if self.config.tied:
            return {"embedding": (*self.tables, "norm", "output"), **blocks}
        return {"embedding": self.tables, **blocks, "head": ("norm", "output")}

    @property
    def tables(self) -> tuple[str, ...]:
        """Modules that ``embed`` uses."""
        return ("tok_embeddings",)

    @property
    def blocks(self) -> tuple[type[nn.Module], ...]:
        """The class of the layers."""
        return tuple({type(layer) for layer in self.layers})

    def embed(self, tokens_BT: Tensor, first: int = 0) -> Tensor:
        """(B, T, D) what enters the first block; ``first`` is the position of the first token."""
        x_BTD: Tensor = self.tok_embeddings(tokens_BT)
        return x_BTD

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        documents_BT: Tensor | None = None,
        past: Sequence[Past] | None = None,
    ) -> Tensor:
        """(B, T, V) logits of the next token at each position, or what ``Head`` makes of them.

        Args:
            tokens_BT: (B, T) int64 ids.
            targets_BT: for the summed loss instead of logits, see ``Head``.
            documents_BT: (B, T) int64 number of each token's document in its row, which
                attention does not leave. None: a row is one document.
            past: of each layer, to which this call adds its positions; see ``generate``.
        """
        mask = None if documents_BT is None else document_mask(documents_BT)
        if past is None:
            x_BTD = self.embed(tokens_BT)
            for layer in self.layers:
                x_BTD = layer(x_BTD, mask)
        else:
            x_BTD = self.embed(tokens_BT, past[0].length)
            for layer, seen in zip(self.layers, past, strict=True):
                x_BTD = layer(x_BTD, mask, seen)
        logits_BTV: Tensor = self.output(self.norm(x_BTD), targets_BT)
        return logits_BTV
