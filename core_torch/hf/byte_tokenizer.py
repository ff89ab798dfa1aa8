"""The byte tokenizer as a tokenizer.json, so that an exported model brings its own along."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from core_torch.data.tokenizer import END_OF_TEXT, ByteTokenizer

# Byte-level tokenizers write bytes as characters: printable ones as themselves, the rest as
# characters from 256 on, in order.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def byte_tokenizer_json() -> str:
    """A tokenizer without merges whose ids are those of ``ByteTokenizer``."""
    rest = [b for b in range(256) if b not in _PRINTABLE]
    letter = {b: chr(b) for b in _PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(rest)}
    inner = tokenizers.Tokenizer(models.BPE(vocab={letter[b]: b for b in range(256)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END_OF_TEXT])
    assert inner.token_to_id(END_OF_TEXT) == ByteTokenizer.end_of_text
    return inner.to_str(pretty=False)
