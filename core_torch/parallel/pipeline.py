"""Pipeline parallel: the units of a model are cut into stages, which the ranks of pp hold.

    sharded = pipelined(model, mesh, config, compute_dtype=None)   # instead of shard_model
    total = sharded.step(batches, loss)                            # all micro-batches of a step

The first stage holds the embedding, the last one norm and head, and blocks are spread evenly.
Parameters keep the names that they have in the whole model. Interleaved, rank p holds the
stages p, p + pp, p + 2 pp, ...; each is sharded by itself, as a whole model would be.

Schedules and stages are torch's own (``torch.distributed.pipelining``), told the shapes of all
messages, so that nothing but tensors is sent. docs/parallel.md tells the whole.

Shape suffixes
    B  sequences    T  positions    D  width    V  vocabulary
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from core_torch.collectives import Axis
from core_torch.config import RunConfig
from core_torch.config_pipeline import blocks_of
from core_torch.errors import ConfigError
from core_torch.mesh import Mesh
from core_torch.models.attention import document_mask
from core_torch.models.decoder import Decoder, Model, Units
from core_torch.shard.base import Sharded
from core_torch.shard.model import shard_model
from core_torch.shard.wrap import plan_units, unit_parameters

Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and targets of a micro-batch
Batch = Sequence[Tensor | None]  # inputs, targets, numbers of documents or None


class Part(Model):
    """Some units of a decoder under their names in it; the modules are shared with it."""

    def __init__(self, model: Decoder, names: Sequence[str]) -> None:
        super().__init__(model.config, model.vocabulary)
        self._kind, self._held = type(model), {name: model.units[name] for name in names}
        for path in (path for paths in self._held.values() for path in paths):
            around, _, key = path.rpartition(".")
            if not around:
                self.add_module(key, model.get_submodule(path))
                continue
            if not hasattr(self, around):
                self.add_module(around, nn.ModuleDict())
            self.get_submodule(around).add_module(key, model.get_submodule(path))
        self._blocks = model.blocks

    @property
    def units(self) -> Units:
        """Those of the decoder that are here."""
        return self._held

    @property
    def blocks(self) -> tuple[type[nn.Module], ...]:
        """Those of the decoder."""
        return self._blocks


class Stage(Part):
    """Units that follow each other, as one step of the forward."""

    def forward(self, x: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """(B, T, V) logits on the last stage, else (B, T, D) what the next one is given.

        Args:
            x: (B, T) int64 ids on the first stage, else (B, T, D).
            documents_BT: as ``Decoder.forward`` takes it.
        """
        mask = None if documents_BT is None else document_mask(documents_BT)
        if "embedding" in self._held:
            x = self._kind.embed(self, x)  # type: ignore[arg-type]  # it has what ``embed`` reads
        for layer in self.layers.values():  # type: ignore[operator]
            x = layer(x, mask)
        return self.output(self.norm(x)) if "head" in self._held else x  # type: ignore[operator]


class CountedStage(PipelineStage):
    """A stage that enters in the ledger what it sends to its neighbours."""

    axis: Axis

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Activations of a micro-batch, to the next stage."""
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id), "activations")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Their gradients, to the stage before."""
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id), "gradients")

    def _counted(self, ops: list[dist.P2POp], scope: str) -> list[dist.P2POp]:
        for op in ops:
            self.axis.ledger.enter(self.axis.name, "send", op.tensor, scope)
        return ops


@dataclass(slots=True)
class Pipelined(Sharded):
    """This rank's stages, each sharded by itself. ``module`` holds all of their parameters."""

    module: Part
    parts: Sequence[Sharded] = ()  # by stage
    places: Sequence[int] = ()  # theirs in the pipeline
    stages: int = 1  # of all ranks
    schedule: Any = None  # torch's
    axis: Axis | None = None
    message: Tensor | None = None  # (B, T, D) on the meta device: what goes to the next stage
    _loss: Loss | None = None  # of the step that is running

    def free(self) -> None:
        """See ``Sharded``."""
        for part in self.parts:
            part.free()

    def finish_gradients(self) -> None:
        """See ``Sharded``. Under FSDP2 the schedule has reduced gradients at its end."""
        for part in self.parts:
            part.finish_gradients()

    def step(self, batches: Sequence[Batch], loss: Loss) -> Tensor:
        """Forwards and backwards of all micro-batches of an inner step.

        Args:
            batches: in order; equal on all ranks of pp.
            loss: share of a micro-batch in the loss of the step.

        Returns:
            () float64 sum of the losses; 0 on ranks without the last stage.
        """
        for part in self.parts:
            part.mean_over_replicas = self.mean_over_replicas
        inputs, targets, *rest = (_joined(column) for column in zip(*batches, strict=True))
        documents = rest[0] if rest else None
        assert inputs is not None
        losses: list[Tensor] = []
        self._loss = loss
        self.schedule.step(
            *((inputs,) if self.is_first else ()),
            target=targets,
            losses=losses,
            return_outputs=False,
            **({} if documents is None else {"documents_BT": documents}),
        )
        total = torch.zeros((), device=inputs.device, dtype=torch.float64)
        for part_loss in losses:
            total += part_loss.detach()
        return total

    def loss_of(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """() what ``step`` was given says; the schedule calls it on the last stage."""
        assert self._loss is not None
        return self._loss(logits_BTV, targets_BT)

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage."""
        return 0 in self.places

    @torch.no_grad()
    def logits(self, inputs_BT: Tensor, **known: Tensor) -> Tensor | None:
        """See ``Sharded``: one forward through all stages, one after the other."""
        axis, message = self.axis, self.message
        assert axis is not None and axis.group is not None and message is not None
        x: Tensor | None = None
        for place, part in zip(self.places, self.parts, strict=True):
            if place:
                x = torch.empty_like(message, device=inputs_BT.device)
                dist.recv(x, group=axis.group, group_src=(place - 1) % axis.size)
            x = part.module(inputs_BT if place == 0 else x, **known)
            if place + 1 < self.stages:
                axis.ledger.enter(axis.name, "send", x, "evaluation")
                dist.send(x.contiguous(), group=axis.group, group_dst=(place + 1) % axis.size)
                x = None
        return x


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    held = [x for x in parts if x is not None]
    return torch.cat(held) if held else None


def pipelined(
    model: Model, mesh: Mesh, config: RunConfig, *, compute_dtype: torch.dtype | None
) -> Pipelined:
    """Cuts ``model`` into stages and shards those of this rank.

    Args:
        model: whole, full weights on the CPU; what other ranks hold of it is let go.
        mesh: with an axis pp.
        config: of the run; the schedule takes the micro-batches of an inner step.
        compute_dtype: as for ``shard_model``.

    Raises:
        ConfigError: a model whose stages are not known.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"a {type(model).__name__} cannot be cut into stages",
            likely="it is no Decoder of core_torch.models, so its forward is not known in parts",
            next="--mesh.pp 1",
        )
    count, axis, stored = config.stages, mesh.pp, next(model.parameters()).dtype
    places = list(range(axis.index, count, axis.size))
    held = [_units_at(model, place, count) for place in places]
    groups = unit_parameters(model, plan_units(model))
    mine = {name for names in held for name in names}
    units = {name: names if name in mine else [] for name, names in groups.items()}
    parts = [
        shard_model(Stage(model, names), mesh, config.shard, compute_dtype=compute_dtype)
        for names in held
    ]
    data, width = config.data, config.model.dim
    shape = (data.batch, data.sequence // mesh.tp.size, width)
    message = torch.empty(shape, dtype=compute_dtype or stored, device="meta")
    whole = Part(model, [name for names in held for name in names])
    found = Pipelined(
        whole,
        units,
        elsewhere=tuple(n for unit in groups if unit not in mine for n in groups[unit]),
        parts=parts,
        places=places,
        stages=count,
        axis=axis,
        message=message,
    )
    found.schedule = _schedule(found, mesh, config)
    return found


def _units_at(model: Model, place: int, stages: int) -> list[str]:
    names = list(model.units)
    blocks = blocks_of(place, stages=stages, layers=len(names) - 2)
    inner = [names[1 + i] for i in blocks]
    return names[:1] * (place == 0) + inner + names[-1:] * (place == stages - 1)


def _schedule(sharded: Pipelined, mesh: Mesh, config: RunConfig) -> Any:
    """torch's, with the shapes of all messages."""
    message = sharded.message
    assert message is not None
    inner, data = message.clone().requires_grad_(), config.data
    ids = torch.empty((data.batch, data.sequence), dtype=torch.int64, device="meta")
    logits = message.new_empty((*ids.shape, sharded.module.vocabulary))
    stages = []
    for place, part in zip(sharded.places, sharded.parts, strict=True):
        is_first, is_last = place == 0, place == sharded.stages - 1
        stage = CountedStage(
            part.module,
            place,
            sharded.stages,
            mesh.device,
            input_args=ids if is_first else inner,
            output_args=logits if is_last else inner,
            input_grads=None if is_first else message,
            output_grads=None if is_last else message,
            group=mesh.pp.group,
        )
        stage.axis = mesh.pp
        stages.append(stage)
    count = config.train.accumulate
    if config.shard.pipeline == "1f1b":
        return Schedule1F1B(stages[0], count, loss_fn=sharded.loss_of, scale_grads=False)
    return ScheduleInterleaved1F1B(stages, count, loss_fn=sharded.loss_of, scale_grads=False)  # type: ignore[arg-type]
