"""Runs of a tiny model by the core alone, and each rank's account of them as plain data.

The equalities compare runs on different meshes, so the data must not depend on the mesh: row r
of a replica (counted over its micro-batches and shards) is a function of r and of an identity
that the test chooses. Two replicas of one identity see the same data; exchanging identities
exchanges replicas. Token ``UNSEEN`` never occurs, so a fault in its embedding reaches neither
loss nor gradient: the replica looks healthy until a sync round.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core_torch.collectives import Ledger
from core_torch.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    SyncConfig,
    TrainConfig,
)
from core_torch.data.batches import Layout, batch_for
from core_torch.data.corpus import Corpus
from core_torch.data.token_file import TokenFile
from core_torch.data.tokenizer import ByteTokenizer
from core_torch.errors import TwinshardError
from core_torch.evaluation import evaluate
from core_torch.shard.access import local_shard
from core_torch.sync.saved import own_tensors
from core_torch.sync.trigger import Clock
from core_torch.train import TrainState, build, finish, train
from parity_tests.cases.part_mesh import mesh_over
from parity_tests.harness.torch_bridge import Shard, shard_of, shards_of, to_numpy

VOCABULARY, SEQUENCE, HELD_OUT = 61, 8, 5
UNSEEN = VOCABULARY - 1

TINY = RunConfig(
    model=ModelConfig(
        vocabulary=VOCABULARY,
        dim=16,
        layers=2,
        heads=4,
        kv_heads=2,
        hidden=27,  # uneven over 2 and 4 shards, as the vocabulary is
        context=SEQUENCE,
        init_std=0.2,
    ),
    data=DataConfig(sequence=SEQUENCE, batch=2),
    # With the usual eps of 1e-8 the first AdamW step turns the rounding of a gradient that small
    # into a visible movement; see tolerances.free_running_adamw.
    optim=OptimConfig(lr=1e-2, eps=1e-4, max_norm=1.0),
    schedule=ScheduleConfig(shape="constant"),
    sync=SyncConfig(method="edit", every=3, warmup=2, layerwise=False),
    train=TrainConfig(steps=14, dtype="float64", evaluate_sequences=HELD_OUT),
)

Account = dict[str, Any]  # plain data; see account_of
Changes = dict[str, Any]  # fields to replace, nested as the configuration is
Fault = tuple[int, int, str, float]  # after this step, on this replica, parameter, value


def configured(config: Any, changes: Changes) -> Any:
    """``config`` with ``changes`` in place; a dictionary changes fields of an inner config."""
    new = {
        name: configured(getattr(config, name), value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return replace(config, **new)


def corpus_for(config: RunConfig, identities: Sequence[int]) -> Corpus:
    """Training data in which replica n draws the rows of ``identities[n]``, and held-out data.

    batches.py deals draw ``r * N + n`` to row r of replica n and looks up its place in the
    epoch's order; here sequences are laid down so that each row finds its own. All begin with
    token 0, because the last target of a sequence is the first token of the one behind it.
    """
    count, replicas = config.train.steps * config.train.accumulate, len(identities)
    draws = count * config.mesh.shards * config.data.batch * replicas
    layout = Layout(draws, sequence=1, batch=draws, replicas=1, shards=1, seed=config.data.seed)
    place_of, _ = batch_for(np.arange(draws + 1), layout, step=0, replica=0, shard=0)
    ids = np.zeros(draws * SEQUENCE + 1, np.uint16)
    for draw, place in enumerate(place_of[:, 0]):
        row, replica = divmod(draw, replicas)
        ids[place * SEQUENCE :][:SEQUENCE] = sequence_of(identities[replica], row)
    held_out = np.zeros(HELD_OUT * SEQUENCE + 1, np.uint16)
    for i in range(HELD_OUT):
        held_out[i * SEQUENCE :][:SEQUENCE] = sequence_of(99, i)
    train_file, held_out_file = (TokenFile(Path(), VOCABULARY, x) for x in (ids, held_out))
    return Corpus(train_file, held_out_file, ByteTokenizer())


def sequence_of(identity: int, row: int) -> np.ndarray:
    """(SEQUENCE,) tokens, never ``UNSEEN``; each identity prefers other tokens."""
    draws = np.random.default_rng([identity, row]).geometric(0.04 + 0.05 * identity % 0.4, SEQUENCE)
    tokens = (draws + 7 * identity) % UNSEEN
    tokens[0] = 0
    return tokens


class StepClock:
    """A clock on which each step of a replica takes as long as the next, and nothing else does."""

    def __init__(self, step_ns: int) -> None:
        self.step_ns = step_ns
        self.state: TrainState | None = None  # as long as it is being built, no time passes

    def __call__(self) -> int:
        return 0 if self.state is None else self.state.step * self.step_ns


def begin(
    changes: Changes,
    identities: Sequence[int] | None = None,
    step_ns: Sequence[int] = (),
    clock: Clock | None = None,
) -> TrainState | None:
    """``TINY`` with ``changes``, built on its mesh; None on a rank outside it.

    The ledger starts empty and writes a trace. ``step_ns`` is what a step of each replica takes
    on a virtual clock; by default time stands still. ``clock`` is another one.
    """
    config = configured(TINY, changes)
    shape = config.mesh
    mesh = mesh_over(shape.replicas, shape.shards, shape.pp, shape.tp)
    if mesh is None:
        return None
    mesh.ledger.bytes.clear()
    mesh.ledger.calls.clear()
    mesh.ledger.trace = []
    virtual = StepClock(step_ns[mesh.replica.index] if step_ns else 0)
    corpus = corpus_for(config, identities or range(config.mesh.replicas))
    virtual.state = build(config, mesh, corpus, clock=clock or virtual)
    return virtual.state


def run(
    changes: Changes,
    identities: Sequence[int] | None = None,
    faults: Sequence[Fault] = (),
    observed: bool = False,
    step_ns: Sequence[int] = (),
) -> Account | None:
    """Trains to the end and finishes; None on a rank outside the mesh.

    Args:
        changes: to ``TINY``.
        identities: of the replicas' data; by default all different.
        faults: values to write into a parameter between two steps.
        observed: also look at the run after each step, as an interface would.
        step_ns: of each replica's virtual clock.
    """
    state = begin(changes, identities, step_ns)
    return None if state is None else account_of(state, faults, observed)


def account_of(state: TrainState, faults: Sequence[Fault] = (), observed: bool = False) -> Account:
    """Trains ``state`` to the end, or to an error of the library, and tells all that happened.

    Returns:
        Records, events, error, the state before the first step and after each, the trace, and
        what ``finish`` did.
    """
    told: Account = {"records": [], "events": [], "error": None, "history": [snapshot(state)]}
    try:
        for record in train(state):
            told["records"].append(record.as_line())
            told["events"] += [] if record.round is None else [asdict(record.round)]
            for fault in faults:
                inject(state, *fault)
            told["history"].append(snapshot(state))
            if observed:
                observe(state)
        closing = finish(state)
        told["forced"] = asdict(closing[-1]) if closing else None
        told["closing"] = [asdict(event) for event in closing]
        told["again"] = finish(state) == []
    except TwinshardError as error:
        told["error"] = type(error).__name__
    told["finished"] = snapshot(state)
    told["trace"] = [tuple(dispatch) for dispatch in state.mesh.ledger.trace or []]
    return told


@torch.no_grad()
def inject(state: TrainState, step: int, replica: int, name: str, value: float) -> None:
    """Writes ``value`` into the last element of a parameter, on the rank that holds it."""
    if state.step != step or state.mesh.replica.index != replica:
        return
    p = dict(state.model.named_parameters()).get(name)
    if p is None:  # on another stage of a pipeline
        return
    part = shard_of(p)
    if part["start"] + len(part["rows"]) == p.shape[0] and len(part["rows"]):
        local_shard(p).view(-1)[-1] = value


def observe(state: TrainState) -> None:
    """All that looks at a run without taking part: evaluation, anchor weights, state_dict."""
    first, again = evaluate(state), evaluate(state)
    assert first == again
    if state.sync is not None:
        with state.sync.anchor_weights(), state.sync.anchor_weights():
            state.model.state_dict()


def snapshot(state: TrainState) -> dict[str, Any]:
    """This rank's part of everything that a trajectory consists of."""
    named = dict(state.model.named_parameters())
    theta = shards_of(named)
    seen: dict[str, Any] = {"theta": theta}
    for key in ("exp_avg", "exp_avg_sq"):
        seen[key] = {
            name: like(theta[name], state.optimizer.state[p][key])
            for name, p in named.items()
            if key in state.optimizer.state[p]
        }
    seen["adam_step"] = {
        name: float(state.optimizer.state[p]["step"])
        for name, p in named.items()
        if "step" in state.optimizer.state[p]
    }
    seen["storage"] = {name: local_shard(p).data_ptr() for name, p in named.items()}
    seen["dispatches"] = len(state.mesh.ledger.trace or [])
    outer = None if state.sync is None else state.sync.state
    if state.sync is not None and outer is not None:
        with unseen(state.mesh.ledger):
            outer_states = [outer.store.get(u) for u in range(len(state.sync.units))]
            for u in range(len(outer_states)):
                outer.store.release(u)
        for key in ("anchor", "velocity"):
            seen[key] = {
                name: like(theta[name], x)
                for unit, of_unit in zip(state.sync.units, outer_states, strict=True)
                for name, x in zip(unit.names, getattr(of_unit, key), strict=True)
            }
        seen["residual"] = {
            name.partition("/")[2]: like(theta[name.partition("/")[2]], held.local)
            for name, held in own_tensors(state.sync).items()
        }
        seen["stats"] = {key: to_numpy(x) for key, x in outer.stats._asdict().items()}
        seen["rounds"] = outer.rounds
    return seen


@contextmanager
def unseen(ledger: Ledger) -> Iterator[None]:
    """Keeps what a test looks at out of the ledger: CO2* gathers its anchor to show it."""
    kept = ledger.bytes.copy(), ledger.calls.copy(), ledger.trace
    ledger.trace = None
    yield
    ledger.bytes, ledger.calls, ledger.trace = kept


def like(part: Shard, x: torch.Tensor) -> Shard:
    """This rank's part of ``x``, which is cut as ``part`` is."""
    return Shard(shape=part["shape"], start=part["start"], rows=to_numpy(x))
