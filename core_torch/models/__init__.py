"""Decoder-only transformers, their initial weights, and sampling text from them."""

from core_torch.models.build import build_model
from core_torch.models.decoder import Model
from core_torch.models.generate import generate
from core_torch.models.llama import Llama
from core_torch.models.loss import token_loss

__all__ = ["Llama", "Model", "build_model", "generate", "token_loss"]
