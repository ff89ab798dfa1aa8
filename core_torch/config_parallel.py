"""What must divide what where a replica is cut over the axis tp. Standard library only."""

from core_torch.config_base import Problem
from core_torch.config_model import ModelConfig


def tensor_parallel_problems(
    tp: int, model: ModelConfig, sequence: int, wire: str
) -> list[Problem]:
    """Problems of ``mesh.tp`` with the model, the data and what rounds send.

    The vocabulary need not divide: the last ranks hold fewer rows of embedding and head.
    """
    if tp <= 1:
        return []
    if model.kind == "own":
        return [Problem("mesh.tp", f"{tp} ranks cannot cut model.build {model.build}")]
    cut = {
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        "model.hidden": model.hidden,
        "data.sequence": sequence,
    }
    problems = [
        Problem(path, f"mesh.tp {tp} does not divide {size}")
        for path, size in cut.items()
        if size >= 1 and size % tp
    ]
    if wire == "int8":  # a block of a scale holds gains and slices, and these differ over tp
        message = "int8 would round the copies of a gain on ranks of mesh.tp apart; bf16 does not"
        problems.append(Problem("sync.wire", message))
    return problems
