"""SimpleFSDP on modules with odd parameters, and what an owner of a module may do with it."""

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from core_torch.models.build import draw
from parity_tests.cases import sharded_modules, sharded_owners, sharded_training
from parity_tests.checks.trajectories import same
from parity_tests.harness import tolerances
from parity_tests.harness.jax_bridge import assemble
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable

ODD = tolerances.model("float64", layers=2, width=sharded_modules.ODD_VOCABULARY)
FROZEN = ["frozen.weight", "frozen.bias"]


@pytest.fixture(scope="module")
def odd(pool: RankPool) -> Any:
    """Runs of the odd model, each made once: (shards, options) -> what the ranks told."""

    @functools.cache
    def run(shards: int, compiled: bool) -> list[Any]:
        return of_members(pool.run(sharded_modules.odd, shards, {} if compiled else None))

    return run


def of_members(ranks: list[Any]) -> list[Any]:
    """What the ranks of the mesh told; the others stand by."""
    return [rank for rank in ranks if rank is not None]


# --- parameters ---


@functools.cache
def odd_alone() -> Any:
    """One process with the rows of all ranks."""
    return sharded_modules.odd_account(sharded_modules.odd_model(), 0, 1)


@pytest.mark.parametrize(
    ("shards", "compiled"),
    [(2, False), (2, True), (4, False), pytest.param(4, True, marks=pytest.mark.only_full)],
)
def test_uneven_tiny_scalar_and_frozen_parameters_train_as_in_one_process(
    odd: Any, errors: ErrorTable, shards: int, compiled: bool
) -> None:
    ranks = odd(shards, compiled)
    truth = odd_alone()
    for what in ("grads", "params"):
        [mine] = assemble([rank[what] for rank in ranks], replicas=1)
        assert list(mine) == list(truth[what])
        for name, expected in truth[what].items():
            errors.check(f"odd {what}", mine[name], expected["rows"], ODD, where=name)
    for rank in ranks:
        assert rank["without"] == FROZEN
        assert rank["counter"] == truth["counter"] == 3  # a buffer that the forward changes
    if shards == 4:  # 65 rows of 257 and the rest; rows of the bias of one element
        assert [len(rank["params"]["embed.weight"]["rows"]) for rank in ranks] == [65, 65, 65, 62]
        assert [len(rank["params"]["gate.bias"]["rows"]) for rank in ranks] == [1, 0, 0, 0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "manual"])
def test_two_micro_batches_add_up_to_the_gradient_of_the_whole_batch(
    odd: Any, errors: ErrorTable, compiled: bool
) -> None:
    [mine] = assemble([rank["accumulated"] for rank in odd(2, compiled)], replicas=1)
    model = sharded_modules.odd_model()
    sharded_modules.odd_step(model, sharded_modules.odd_rows(0, 1))
    for name, expected in sharded_training.gradients_of(model):
        errors.check("accumulation", mine[name] / 2, expected.numpy(), ODD, where=name)


def test_a_frozen_parameter_is_gathered_and_never_scattered(odd: Any) -> None:
    scopes = Counter(map(tuple, odd(2, False)[0]["scopes"]))
    passes = 3
    assert scopes["all_gather", "frozen.weight"] == 2 * passes  # its input's gradient needs it
    assert scopes["all_gather", "frozen.bias"] == passes
    assert not any(op == "reduce_scatter" and name in FROZEN for op, name in scopes)


def test_a_compiled_graph_gathers_and_scatters_once_what_is_read_three_times(odd: Any) -> None:
    eager, compiled = (Counter(map(tuple, odd(2, how)[0]["scopes"])) for how in (False, True))
    passes = 3
    assert eager["reduce_scatter", "twice.weight"] == 3 * passes
    assert compiled["reduce_scatter", "twice"] == passes
    assert compiled["all_gather", "twice"] == passes  # both parameters, forward
    assert compiled["all_gather", "twice.weight"] == passes  # backward
    assert compiled["all_reduce", "scale"] == passes
    assert eager["all_reduce", "scale"] == 2 * passes


# --- eager mode ---


def test_the_backward_gathers_again_what_the_forward_has_freed(pool: RankPool) -> None:
    [again, _] = of_members(pool.run(sharded_modules.resharding, True))
    assert again["forward"] == {"all_gather": 21}
    assert again["backward"] == {"all_gather": 20, "reduce_scatter": 21}
    [kept, _] = of_members(pool.run(sharded_modules.resharding, False))
    assert kept["forward"] == {"all_gather": 21}
    assert kept["backward"] == {"reduce_scatter": 21}
    assert again["evaluation"] == kept["evaluation"] == {"all_gather": 21}


def test_gathered_parameters_are_freed_in_an_eager_forward(pool: RankPool) -> None:
    for reshard, alive in ((True, 0), (False, 20)):
        for rank in of_members(pool.run(sharded_modules.alive_after_forward, reshard)):
            assert rank == alive


def test_a_person_reads_full_weights_from_a_sharded_model(pool: RankPool) -> None:
    name = "layers.0.attention.wq.weight"
    full = sharded_training.alone({}, steps=0)["params"][name]
    for index, rank in enumerate(of_members(pool.run(sharded_modules.reading))):
        assert same(rank["read"], full)
        assert same(rank["held"], full[index * 8 : index * 8 + 8])
        assert rank["kind"] == "Tensor"
        assert rank["class"] == "ShardedBlock" and rank["is a block"]


@pytest.mark.parametrize(
    "options", [None, pytest.param({}, marks=pytest.mark.only_full)], ids=["eager", "manual"]
)
def test_evaluation_without_gradients_sees_the_same_model(
    pool: RankPool, options: dict[str, Any] | None
) -> None:
    for rank in of_members(pool.run(sharded_modules.evaluation, options)):
        assert rank["eval"] == rank["train"]
        assert not rank["requires_grad"]


def test_misuse_is_refused_with_the_reason(pool: RankPool) -> None:
    for rank in of_members(pool.run(sharded_owners.refusals)):
        for misuse, start, part in REFUSALS:
            assert rank[misuse].startswith(start) and part in rank[misuse], misuse
        assert len(rank) == len(REFUSALS)


REFUSALS = [
    ("pickle", "ConfigError", "cannot be pickled"),
    ("assign", "ConfigError", "norm.weight is sharded and cannot be replaced"),
    ("twice", "ConfigError", "sharded already"),
    ("lstm", "ConfigError", "keeps its weights in a list of its own"),
    ("mesh", "ConfigError", "needs a mesh of 2 dims, got 1"),
    ("step", "ParameterChanged", "was changed in place between its forward and its backward"),
    ("rows", "ParameterChanged", "was changed in place between its forward and its backward"),
]


# --- states, copies, optimizers ---


@pytest.mark.parametrize("tied", [False, True])
def test_a_state_dict_has_plain_names_and_loads_into_another_model(
    pool: RankPool, tied: bool
) -> None:
    plain = sharded_training.llama({"tied": tied})
    for rank in of_members(pool.run(sharded_owners.states, tied)):
        assert rank["keys"] == list(plain.state_dict())
        assert rank["named"] == [name for name, _ in plain.named_parameters()]
        assert rank["sharded"] and rank["problems"] == []
        assert rank["loaded"] == rank["loss"]


@pytest.mark.parametrize(
    "options",
    [None, pytest.param({}, marks=pytest.mark.only_full)],
    ids=["eager", "manual"],
)
def test_a_deep_copy_is_a_model_of_its_own_and_trains_the_same(
    pool: RankPool, options: dict[str, Any] | None
) -> None:
    for rank in of_members(pool.run(sharded_owners.copies, options)):
        assert rank["model"]["losses"] == rank["twin"]["losses"]
        assert same(rank["model"]["params"], rank["twin"]["params"])
        assert rank["model is tied"] and rank["twin is tied"]


def test_torchs_clipping_sees_the_norm_of_all_ranks(pool: RankPool, errors: ErrorTable) -> None:
    model = sharded_modules.odd_model()
    sharded_modules.odd_step(model, sharded_modules.odd_rows(0, 1))
    whole = {name: grad.numpy() for name, grad in sharded_training.gradients_of(model)}
    norm = np.sqrt(sum(np.square(grad).sum() for grad in whole.values()))
    ranks = pool.run(sharded_owners.clipped, float(norm / 10))
    [mine] = assemble([rank["grads"] for rank in ranks], replicas=1)
    for rank in ranks:
        np.testing.assert_allclose(rank["norm"], norm, rtol=1e-13)
    for name, grad in whole.items():  # torch adds 1e-6 to the norm that it divides by
        clipped = grad * (norm / 10 / (norm + 1e-6))
        errors.check("clipped gradient", mine[name], clipped, ODD, where=name)


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_torchs_optimizers_step_on_sharded_parameters_as_on_plain_rows(
    pool: RankPool, flag: str
) -> None:
    for rank in of_members(pool.run(sharded_owners.optimized, {flag: True})):
        assert rank["states"] == len(rank["plain"]) == 21
        assert same(rank["sharded"], rank["plain"])


def test_a_model_on_the_meta_device_gets_weights_that_do_not_depend_on_the_mesh(
    pool: RankPool,
) -> None:
    for shards in (2, 4):
        ranks = of_members(pool.run(sharded_owners.from_meta, shards))
        assert all(rank["was meta"] for rank in ranks)
        [mine] = assemble([rank["params"] for rank in ranks], replicas=1)
        for name, p in sharded_training.llama({}).named_parameters():
            expected = draw(name, p, seed=0).to(p.dtype).numpy()
            assert same(mine[name], expected), name
