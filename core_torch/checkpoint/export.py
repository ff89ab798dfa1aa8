"""The exported model: the anchor, whole, as one safetensors file under canonical names."""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from core_torch.checkpoint.load import Reader
from core_torch.checkpoint.sound import find
from core_torch.checkpoint.state import Layout
from core_torch.config import RunConfig
from core_torch.errors import CheckpointCorrupt, CheckpointMismatch
from core_torch.evaluation import anchor
from core_torch.models import Model, build_model
from core_torch.parallel.pieces import gather_stages, gather_whole
from core_torch.shard.access import local_shard
from core_torch.train import DTYPES, TrainState

FILE = "model.safetensors"


@torch.no_grad()
def export_model(state: TrainState, folder: Path) -> Path:
    """Writes what all replicas agreed on last; all ranks take part.

    Those of replica 0 gather it. The others are needed where the anchor is cut over replicas.

    Returns:
        Path of the file, which only the first rank writes.
    """
    whole = {}
    with anchor(state):
        mine = state.model.named_parameters() if state.mesh.replica.index == 0 else ()
        for name, p in mine:
            full = gather_whole(local_shard(p), p, state.mesh, scope="export")
            whole[name] = full.cpu().contiguous()
    whole = gather_stages(whole, state.mesh)
    if state.mesh.is_lead:
        temporary = folder / f".{FILE}.tmp"
        save_file(whole, temporary)
        os.replace(temporary, folder / FILE)
    return folder / FILE


def load_model(folder: Path, config: RunConfig, vocabulary: int) -> Model:
    """The exported model of a run in one process; of an unfinished run, its last commit.

    Raises:
        CheckpointError: neither is there, or it is not sound or not of this configuration.
    """
    model = empty_model(config, vocabulary)
    path = folder / FILE
    if path.exists():
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    else:
        reader = Reader(find(folder), Layout(0, 0, 1, 1))
        shared = reader.shared()
        kind, held = ("anchor/", shared) if shared else ("param/", reader.own(0))
        tensors = {
            name.removeprefix(kind): shard.local
            for name, shard in held.items()
            if name.startswith(kind)
        }
    _fill(model, tensors, path)
    return model


def empty_model(config: RunConfig, vocabulary: int) -> Model:
    """A model of the run's shape, with its initial weights."""
    size = config.model.vocabulary or vocabulary
    return build_model(config.model, size, seed=config.train.seed, dtype=DTYPES[config.train.dtype])


@torch.no_grad()
def _fill(model: Model, tensors: dict[str, torch.Tensor], path: Path) -> None:
    params = dict(model.named_parameters())
    wrong = sorted(params.keys() ^ tensors.keys())
    wrong += [n for n in params.keys() & tensors.keys() if params[n].shape != tensors[n].shape]
    if wrong:
        raise CheckpointMismatch(
            f"{wrong[0]} does not fit the configuration ({len(wrong)} such tensors)",
            where=str(path),
            likely="the file or config.toml comes from another run",
        )
    for name, p in params.items():
        p.copy_(tensors[name])
