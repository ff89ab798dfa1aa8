"""What ranks do on rows of several documents, and the same numbers document by document."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from core_torch.config import RunConfig
from core_torch.data.corpus import Corpus
from core_torch.data.reading import read_batch, read_held_out
from core_torch.data.token_file import TokenFile
from core_torch.data.tokenizer import ByteTokenizer
from core_torch.evaluation import evaluate
from core_torch.models import Model, build_model
from core_torch.train import inner_step
from parity_tests.cases.equalities import SEQUENCE, TINY, VOCABULARY, Changes, begin, configured

END = 7
Numbers = tuple[float, float, float]  # held-out loss, loss and gradient norm of the first step


class ShortAlphabet(ByteTokenizer):
    """With an end of text that the tiny model knows."""

    end_of_text = END


def documents() -> Corpus:
    """Documents of three tokens on average."""
    rng = np.random.default_rng(4)
    ids = rng.integers(0, VOCABULARY, 40 * SEQUENCE + 1).astype(np.uint16)
    ids[rng.random(len(ids)) < 0.3] = END
    train, held_out = (TokenFile(Path(), VOCABULARY, x) for x in (ids[:-80], ids[-81:]))
    return Corpus(train, held_out, ShortAlphabet())


def step(changes: Changes) -> Numbers | None:
    """As the trainer does it; None on a rank outside the mesh."""
    state = begin(changes)
    if state is None:
        return None
    state.corpus = documents()
    return (evaluate(state), *inner_step(state, synchronous=True))


def alone(changes: Changes) -> Numbers:
    """Each document by itself through the whole model, in one process."""
    config: RunConfig = configured(TINY, changes)
    mesh, data, corpus = config.mesh, config.data, documents()
    model = build_model(config.model, VOCABULARY, seed=config.train.seed, dtype=torch.float64)
    with torch.no_grad():
        held_out = read_held_out(corpus, data, config.train.evaluate_sequences)
        validation = by_document(model, held_out.inputs, held_out.targets)
    sides = [
        read_batch(
            corpus,
            data,
            replicas=mesh.replicas,
            shards=mesh.shards,
            step=k,
            replica=n,
            shard=m,
        )[:2]
        for n in range(mesh.replicas)
        for m in range(mesh.shards)
        for k in range(config.train.accumulate)
    ]
    inputs, targets = (np.concatenate(side) for side in zip(*sides, strict=True))
    loss = by_document(model, inputs, targets)
    torch.autograd.backward(loss)
    grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return validation.item(), loss.item(), torch.stack(grads).norm().item()


def by_document(model: Model, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
    """() mean loss over the targets of all documents; of a document's last token there is none."""
    losses: list[Any] = []
    for x, y in zip(inputs, targets, strict=True):
        cuts = [0, *(np.flatnonzero(x == END) + 1), len(x)]
        for first, last in zip(cuts, cuts[1:], strict=False):
            document, following = (torch.from_numpy(a[first:last]) for a in (x, y))
            if first == last:
                continue
            logits = model(document[None])[0]
            counts = document != END
            losses.append(F.cross_entropy(logits[counts], following[counts], reduction="none"))
    return torch.cat(losses).mean()
