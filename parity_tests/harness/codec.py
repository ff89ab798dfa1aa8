"""Plain data to bytes and back, for messages between the pool and its ranks.

Knows None, bool, int, float, str, list, tuple, dict and NumPy arrays, exactly these types and
bit for bit; anything else is refused by name. No pickle, so a message can start nothing.

Layout: 8 bytes length of the head, the head (JSON), the arrays' bytes one after another.
"""

import json
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)  # NumPy has no name for it by itself
DTYPES = {
    name: np.dtype(name)
    for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64".split()
} | {"bfloat16": BFLOAT16}
LENGTH_BYTES = 8


def encode(value: Any) -> bytes:
    """Bytes of ``value``.

    Raises:
        TypeError: it holds something that is not plain data; the message says where.
    """
    arrays: list[bytes] = []
    head = json.dumps(_tree(value, "value", arrays)).encode()
    return b"".join([len(head).to_bytes(LENGTH_BYTES, "big"), head, *arrays])


def decode(data: bytes) -> Any:
    """The value that ``encode`` was given; arrays are fresh and writable."""
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
    value, end = _value(json.loads(data[LENGTH_BYTES:start]), data, start)
    if end != len(data):
        raise ValueError(f"message of {len(data)} bytes, of which {end} are accounted for")
    return value


def _tree(value: Any, where: str, arrays: list[bytes]) -> Any:
    """JSON form: scalars as they are, everything else as a list that starts with its kind."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        items = [_tree(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]
        return [type(value).__name__, *items]
    if type(value) is dict:
        pairs = [
            [_tree(k, f"key of {where}", arrays), _tree(v, f"{where}[{k!r}]", arrays)]
            for k, v in value.items()
        ]
        return ["dict", *pairs]
    if type(value) is np.ndarray and value.dtype.name in DTYPES:
        arrays.append(value.tobytes())
        return ["array", value.dtype.name, list(value.shape)]
    detail = f" of dtype {value.dtype}" if hasattr(value, "dtype") else ""
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}{detail}; ranks exchange "
        "None, bool, int, float, str, list, tuple, dict and NumPy arrays"
    )


def _value(tree: Any, data: bytes, at: int) -> tuple[Any, int]:
    """The value of a JSON form whose arrays start at byte ``at``, and where they end."""
    if not isinstance(tree, list):
        return tree, at
    kind, *items = tree
    if kind == "array":
        dtype, shape = DTYPES[items[0]], tuple(items[1])
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(data, dtype, count, at).reshape(shape).copy()
        return array, at + array.nbytes
    if kind == "dict":
        pairs = []
        for key_tree, value_tree in items:
            key, at = _value(key_tree, data, at)
            value, at = _value(value_tree, data, at)
            pairs.append((key, value))
        return dict(pairs), at
    values = []
    for item in items:
        value, at = _value(item, data, at)
        values.append(value)
    return (values if kind == "list" else tuple(values)), at
