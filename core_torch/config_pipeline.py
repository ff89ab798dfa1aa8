"""How a model is cut into stages of a pipeline, and what must fit. Standard library only."""

from typing import Literal

from core_torch.config_base import Problem
from core_torch.config_model import ModelConfig

Schedule = Literal["1f1b", "interleaved"]


def blocks_of(stage: int, *, stages: int, layers: int) -> range:
    """The blocks of a stage: as many as of any other, or one more on the first ones."""
    each, more = divmod(layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def bubble_share(ranks: int, *, stages: int, parts: int) -> float:
    """Share of an inner step in which a rank of the pipeline waits, if all stages are equal.

    (ranks - 1) / (w + ranks - 1), w the micro-batches times the stages of a rank.

    Args:
        ranks: of pp.
        stages: of all ranks.
        parts: micro-batches of an inner step.
    """
    work = parts * stages // ranks
    return (ranks - 1) / (work + ranks - 1)


def forwards_ahead(rank: int, *, ranks: int, stages: int, parts: int) -> int:
    """Forwards of a rank, over all of its stages, whose backward is still to come; at most.

    Args:
        rank: of pp, from 0.
        ranks: of pp.
        stages: of all ranks; as many as ranks: 1F1B.
        parts: micro-batches of an inner step.
    """
    if stages == ranks:
        return min(parts, ranks - rank)
    each = stages // ranks
    return min(parts * each, (each - 1) * ranks + 2 * (ranks - rank - 1) + 1)


def pipeline_problems(
    ranks: int, stages: int, schedule: Schedule, parts: int, model: ModelConfig
) -> list[Problem]:
    """Problems of ``mesh.pp`` with the schedule, the micro-batches and the model.

    Args:
        ranks: of pp.
        stages: of all ranks.
        schedule: order of work.
        parts: micro-batches of an inner step.
        model: to be cut.
    """
    if ranks <= 1:
        is_idle = schedule == "interleaved"
        return [Problem("shard.pipeline", "interleaved is for mesh.pp above 1")] if is_idle else []
    if model.kind == "own":
        return [Problem("mesh.pp", f"{ranks} stages cannot be made of model.build {model.build}")]
    found, rounds = list[Problem](), max(1, parts // ranks)
    if stages > model.layers:
        message = f"{model.layers} blocks do not fill {stages} stages of a pipeline"
        found.append(Problem("model.layers", message))
    if schedule == "1f1b" and parts < ranks:
        message = f"mesh.pp {ranks} needs as many micro-batches, got {parts}"
        found.append(Problem("train.accumulate", message))
    if schedule == "interleaved" and parts % rounds:
        message = f"{parts} micro-batches do not make {rounds} equal rounds of mesh.pp {ranks}"
        found.append(Problem("train.accumulate", message))
    if model.tied:
        message = f"embedding and head share a weight, but mesh.pp {ranks} parts them"
        found.append(Problem("model.tied", message))
    return found
