"""Outer steps follow their rules, do nothing in a rollback, and heal what went non-finite."""

import pytest
import torch
from torch import Tensor

from core_torch.sync.outer import heal, mix, momentum_step, nesterov_step, staleness_gap

F64 = torch.float64
YES, NO = torch.tensor(True), torch.tensor(False)


@pytest.mark.parametrize(
    ("lr", "momentum", "golden"),
    [
        (0.7, 0.9, [-2.66, -6.454, -11.2686, -17.00174]),
        (0.8, 0.85, [-2.96, -7.076, -12.1746, -18.10841]),
    ],
)
def test_a_constant_pseudo_gradient_gives_the_golden_anchors(
    lr: float, momentum: float, golden: list[float]
) -> None:
    anchor, velocity = torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64)
    for expected in golden:
        two = torch.full((1,), 2.0, dtype=F64)
        anchor, velocity = nesterov_step(anchor, velocity, two, YES, lr=lr, momentum=momentum)
        assert anchor.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.8, 0.85), (1.0, 0.5)])
def test_it_is_the_rule_of_torch_sgd(lr: float, momentum: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(1000, generator=generator, dtype=dtype)
    velocity = torch.zeros_like(anchor)
    param = torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([param], lr=lr, momentum=momentum, nesterov=True)
    rounds = 8
    for _ in range(rounds):
        pseudo = torch.randn(1000, generator=generator, dtype=dtype)
        param.grad = pseudo.clone()
        sgd.step()
        anchor, velocity = nesterov_step(anchor, velocity, pseudo, YES, lr=lr, momentum=momentum)
    # The velocity's two operations are the same; the step's may be fused by SGD's add with a
    # factor, which then rounds once less. At most two half ulps of the largest value a round.
    assert torch.equal(velocity, sgd.state[param]["momentum_buffer"])
    ulp = torch.finfo(dtype).eps * anchor.abs().max()
    assert bool(((anchor - param).abs() <= rounds * ulp).all())


def test_learning_rate_one_without_momentum_puts_the_mean_of_the_replicas_in_place() -> None:
    anchor = torch.tensor([1.0, 2.0, -4.0], dtype=F64)
    mean = torch.tensor([0.5, 2.5, -8.0], dtype=F64)
    zero = torch.zeros(3, dtype=F64)
    after, _ = nesterov_step(anchor, zero, anchor - mean, YES, lr=1.0, momentum=0.0)
    assert torch.equal(after, mean)


def test_a_step_goes_from_the_anchor_towards_the_replica() -> None:
    anchor, local = torch.tensor([1.0]), torch.tensor([0.0])
    after, _ = nesterov_step(anchor, torch.zeros(1), anchor - local, YES, lr=0.1, momentum=0.0)
    assert local < after < anchor


@pytest.mark.parametrize("pseudo", [[1.0, 2.0], [float("nan"), float("inf")]])
def test_a_rollback_keeps_every_bit_of_anchor_and_velocity(pseudo: list[float]) -> None:
    anchor, velocity = torch.tensor([0.1, -0.0]), torch.tensor([0.3, -0.7])
    after = nesterov_step(anchor, velocity, torch.tensor(pseudo), NO, lr=0.8, momentum=0.85)
    for old, new in zip((anchor, velocity), after, strict=True):
        assert bits(old) == bits(new)


def test_a_step_leaves_its_arguments_alone() -> None:
    anchor, velocity, pseudo = torch.ones(3), torch.ones(3), torch.ones(3)
    nesterov_step(anchor, velocity, pseudo, YES, lr=0.8, momentum=0.85)
    assert all(torch.equal(x, torch.ones(3)) for x in (anchor, velocity, pseudo))


def test_a_healed_moment_and_step_count_start_from_zero_whatever_they_held() -> None:
    nan, inf = float("nan"), float("inf")
    assert heal(torch.tensor([nan, inf, -inf, 1.0]), YES).tolist() == [0.0] * 4
    step = heal(torch.tensor(7.0, dtype=F64), YES)
    assert step.item() == 0 and step.dtype == F64 and step.shape == ()


def test_a_sound_moment_keeps_every_bit() -> None:
    moment = torch.tensor([0.1, -0.0, 3e-40, 1e30])
    assert bits(heal(moment, NO)) == bits(moment)


def bits(x: Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


def momentum(
    anchor: Tensor, velocity: Tensor, pseudo: Tensor, *, gap: float = 1.0, accept: Tensor = YES
) -> tuple[Tensor, Tensor]:
    """A momentum step with lr 0.5, momentum 0.5 and clip 1."""
    of = torch.tensor(gap, dtype=anchor.dtype)
    return momentum_step(anchor, velocity, pseudo, accept, of, lr=0.5, momentum=0.5, clip=1.0)


def test_a_momentum_step_divides_by_the_gap_clips_each_element_and_goes_against_the_velocity() -> (
    None
):
    anchor, velocity = torch.zeros(4, dtype=F64), torch.tensor([0.0, 1.0, 1.0, -1.0], dtype=F64)
    pseudo = torch.tensor([0.5, -1.0, 4.0, -6.0], dtype=F64)
    after, moved = momentum(anchor, velocity, pseudo, gap=2.0)
    assert moved.tolist() == [0.25, 0.0, 1.0, -1.0]
    assert after.tolist() == [-0.125, 0.0, -0.5, 0.5]


def test_without_gap_and_clip_it_is_the_plain_momentum_of_torch_sgd() -> None:
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(1000, generator=generator, dtype=F64)
    velocity, param = torch.zeros_like(anchor), torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([param], lr=0.7, momentum=0.9)
    one, settings = torch.tensor(1.0, dtype=F64), dict(lr=0.7, momentum=0.9, clip=1e9)
    for _ in range(8):
        pseudo = torch.randn(1000, generator=generator, dtype=F64)
        param.grad = pseudo.clone()
        sgd.step()
        anchor, velocity = momentum_step(anchor, velocity, pseudo, YES, one, **settings)
    assert torch.equal(velocity, sgd.state[param]["momentum_buffer"])
    assert bool(((anchor - param).abs() <= 8 * 2.0**-52 * anchor.abs().max()).all())


@pytest.mark.parametrize("gap", [2.0, float("nan")])
def test_a_momentum_step_that_is_not_accepted_keeps_every_bit(gap: float) -> None:
    anchor, velocity = torch.tensor([0.1, -0.0]), torch.tensor([0.3, -7.0])
    pseudo = torch.tensor([float("nan"), 1.0])
    after = momentum(anchor, velocity, pseudo, gap=gap, accept=NO)
    for old, new in zip((anchor, velocity), after, strict=True):
        assert bits(old) == bits(new)


def test_the_gap_is_one_for_an_anchor_at_rest_and_grows_with_its_speed() -> None:
    def gap(velocity: float, progress: float) -> float:
        norms = torch.tensor(velocity, dtype=F64), torch.tensor(progress, dtype=F64)
        return staleness_gap(*norms, eps=1e-6).item()

    assert gap(0.0, 3.0) == 1.0 and gap(0.0, 0.0) == 1.0
    assert gap(4.0, 2.0 - 1e-6) == pytest.approx(3.0, rel=1e-15)
    assert gap(1.0, 0.0) == pytest.approx(1e6 + 1)


def test_mixing_is_exact_at_both_ends_and_in_between_a_weighted_mean() -> None:
    local, anchor = torch.tensor([float("nan"), 0.1, -0.0]), torch.tensor([0.7, 0.3, 5.0])
    assert bits(mix(local, anchor, alpha=0.0)) == bits(anchor)
    assert bits(mix(anchor, local, alpha=1.0)) == bits(anchor)
    assert mix(torch.tensor([4.0]), torch.tensor([8.0]), alpha=0.25).tolist() == [7.0]
