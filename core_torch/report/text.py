"""Text that is safe to print and to embed, and numbers that a reader can take in.

Generated text and names from files may hold terminal escapes, control codes or bidirectional
overrides; ``sanitise`` removes them. Formatting here is shared by the terminal table, the
figures and the page, so the same number looks the same everywhere. Standard library only.
"""

import math
import re
import unicodedata

from core_torch.config import MeshConfig

MISSING = "–"

METHOD_TITLES = {
    "synchronous": "synchronous",
    "post_local_sgd": "Post Local SGD",
    "diloco": "DiLoCo",
    "streaming_diloco": "Streaming DiLoCo",
    "co2": "CO2",
    "co2_star": "CO2*",
    "edit": "EDiT",
    "aedit": "A-EDiT",
}

# Bodies of string sequences stop at the next escape, so the scan stays linear in the text.
_ESCAPES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, ...
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor moves
    r"|\x1b[ -/]*[0-Z\\^-~]"  # the other escapes
)


def sanitise(text: str) -> str:
    """Strips terminal escapes, control codes and invisible format characters from ``text``.

    Newlines and tabs stay; every kind of line break becomes a newline; a lone surrogate, which
    no file can hold, becomes U+FFFD.
    """
    kept = []
    for character in _ESCAPES.sub("", text).replace("\r\n", "\n"):
        category = unicodedata.category(character)
        if character in "\n\t":
            kept.append(character)
        elif character in "\r\x0b\x0c\x85\u2028\u2029":
            kept.append("\n")
        elif category == "Cs":
            kept.append("\ufffd")
        elif category not in ("Cc", "Cf"):
            kept.append(character)
    return "".join(kept)


def one_line(text: object, limit: int = 60) -> str:
    """``text`` without control codes or line breaks, at most ``limit`` characters."""
    line = " ".join(sanitise(str(text)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def method_title(method: object) -> str:
    """Name of a method as papers write it; an unknown one as it is, on one line."""
    return METHOD_TITLES.get(str(method), one_line(method))


def _scaled(value: float, units: tuple[str, ...]) -> str:
    """Three significant digits and a decimal prefix: 1234567 -> ``1.23 M``."""
    index = 0
    while abs(value) >= 999.5 and index < len(units) - 1:
        value, index = value / 1000, index + 1
    if index == 0:
        return f"{value:.0f} {units[0]}".strip()
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f} {units[index]}"


def human_bytes(count: float | None) -> str:
    """Bytes with a decimal prefix (1 MB = 10^6 B)."""
    return MISSING if count is None else _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def human_count(count: float | None) -> str:
    """A count with a decimal prefix, such as ``1.64 M``."""
    return MISSING if count is None else _scaled(count, ("", "k", "M", "G", "T"))


def tick(text: str) -> str:
    """A scaled number without trailing zeros: ``1.20 M`` -> ``1.2 M``."""
    return re.sub(r"(?:\.0+|(\.\d*?)0+)(?= )", r"\1", text)


def fixed(value: float | None, decimals: int) -> str:
    """``value`` with grouped thousands; ``–`` for none, ``nan`` and ``inf`` spelt out."""
    if value is None:
        return MISSING
    return f"{value:,.{decimals}f}" if math.isfinite(value) else str(float(value))


def model_title(kind: object, layers: object, dim: object) -> str:
    """An architecture and its size, of whatever config.toml says."""
    name = {"llama": "Llama", "qwen3": "Qwen 3", "gpt2": "GPT-2"}.get(str(kind))
    if name is None:
        return "a module of one's own"
    plural = "layer" if layers == 1 else "layers"
    return f"{name} with {layers} {plural} of width {dim}"


def mesh_title(mesh: MeshConfig) -> str:
    """How the ranks are arranged, for example "2 replicas x 4 shards x 2 slices"."""
    parts = [counted(mesh.replicas, "replica"), counted(mesh.shards, "shard")]
    if mesh.pp > 1:
        parts.append(counted(mesh.pp, "stage"))
    if mesh.tp > 1:
        parts.append(counted(mesh.tp, "slice"))
    return " x ".join(parts)


def counted(count: int, noun: str) -> str:
    """``1 round``, ``2 rounds``, ``no rounds``, ``3 anomalies``, ``2 losses``."""
    plural = re.sub(r"y$", "ie", re.sub(r"(ss)$", r"\1e", noun)) + "s"
    return f"{f'{count:,}' if count else 'no'} {noun if count == 1 else plural}"
