"""AdamW computes what torch's does, keeps its state per parameter, and can start anew."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from core_torch.adamw import AdamW, adamw_update

F64 = torch.float64
STEPS = 8
# Both sides do the same sums in another order (torch folds the bias corrections into the step
# size and the denominator, and interpolates the mean). Each step of each side rounds about ten
# times; an error of the moments decays, one of the parameter adds up: 20 eps a step at most,
# of the largest parameter.
TOLERANCE = 20 * STEPS * torch.finfo(F64).eps


def parameters(seed: int) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, 7), (7,), (3, 4)]
    return [Parameter(torch.randn(s, generator=generator, dtype=F64)) for s in shapes]


def set_grads(params: list[Parameter], *, step: int) -> None:
    """The same gradients for the same step, of sizes from 1e-6 to 1e3."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        scale = 10.0 ** (torch.rand(p.shape, generator=generator, dtype=F64) * 9 - 6)
        p.grad = (torch.randn(p.shape, generator=generator, dtype=F64) * scale).to(p.dtype)


def groups_of(params: list[Parameter]) -> list[dict[str, object]]:
    """Three groups that differ in every number."""
    return [
        {"params": [params[0]]},
        {"params": [params[1]], "weight_decay": 0.0, "betas": (0.8, 0.99)},
        {"params": [params[2]], "lr": 3e-2, "eps": 1e-3},
    ]


def test_it_is_the_adamw_of_torch_in_float64_with_groups_and_a_changing_learning_rate() -> None:
    ours, theirs = parameters(0), parameters(0)
    numbers = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    mine = AdamW(groups_of(ours), **numbers)  # type: ignore[arg-type]
    torchs = torch.optim.AdamW(groups_of(theirs), **numbers)  # type: ignore[arg-type]
    for step in range(STEPS):
        for optimizer, params in ((mine, ours), (torchs, theirs)):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            set_grads(params, step=step)
            optimizer.step()
        for x, y in zip(ours, theirs, strict=True):
            assert distance(x, y) <= TOLERANCE
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert distance(mine.state[x][key], torchs.state[y][key]) <= TOLERANCE


def test_the_first_step_moves_each_element_by_the_learning_rate_against_its_gradient() -> None:
    grad = torch.tensor([1e-3, -5.0, 2.0], dtype=F64)
    zero = torch.zeros(3, dtype=F64)
    param, *_, step = adamw_update(
        zero, grad, zero, zero, torch.zeros((), dtype=F64), **numbers(weight_decay=0.0, eps=1e-300)
    )
    torch.testing.assert_close(param, -0.5 * grad.sign(), rtol=1e-15, atol=0.0)
    assert step.item() == 1


def test_decay_shrinks_by_the_learning_rate_and_does_not_enter_the_moments() -> None:
    param, zero = torch.tensor([8.0], dtype=F64), torch.zeros(1, dtype=F64)
    after, exp_avg, exp_avg_sq, _ = adamw_update(
        param, zero, zero, zero, torch.zeros((), dtype=F64), **numbers(weight_decay=0.25)
    )
    assert after.item() == 8.0 * (1 - 0.5 * 0.25)
    assert exp_avg.item() == 0 and exp_avg_sq.item() == 0


def test_the_update_leaves_its_arguments_alone() -> None:
    param, grad, exp_avg, exp_avg_sq = held = [torch.ones(3, dtype=F64) for _ in range(4)]
    step = torch.ones((), dtype=F64)
    adamw_update(param, grad, exp_avg, exp_avg_sq, step, **numbers())
    assert all(bool((x == 1).all()) for x in (*held, step))


def test_state_has_the_keys_of_torch_and_exists_before_the_first_step() -> None:
    params = parameters(1)
    optimizer, torchs = AdamW(params, lr=1e-2), torch.optim.AdamW(params, lr=1e-2)
    optimizer.init_state()
    set_grads(params, step=0)
    torchs.step()
    for p in params:
        assert optimizer.state[p].keys() == torchs.state[p].keys()
        assert all(bool((v == 0).all()) for v in optimizer.state[p].values())
        assert optimizer.state[p]["step"].shape == () and optimizer.state[p]["step"].dtype == F64


def test_a_parameter_without_gradient_stays_where_it_is() -> None:
    params = parameters(2)
    before = params[1].detach().clone()
    set_grads(params, step=0)
    params[1].grad = None
    AdamW(params, lr=1e-2).step()
    assert torch.equal(params[1], before)


def test_saved_state_continues_bit_for_bit() -> None:
    params = parameters(3)
    optimizer = AdamW(groups_of(params), lr=1e-2)
    run(optimizer, params, range(3))
    others = [Parameter(p.detach().clone()) for p in params]
    resumed = AdamW(groups_of(others), lr=99.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, range(3, 6))
    run(resumed, others, range(3, 6))
    assert all(torch.equal(x, y) for x, y in zip(params, others, strict=True))


def test_each_parameter_counts_its_own_steps_so_one_can_start_anew() -> None:
    params, fresh = parameters(4), parameters(4)
    optimizer = AdamW(params, lr=1e-2)
    run(optimizer, params, range(3))
    for value in optimizer.state[params[0]].values():
        value.zero_()
    fresh[0].data.copy_(params[0].detach())
    run(optimizer, params, range(5, 6))
    run(AdamW(fresh, lr=1e-2), fresh, range(5, 6))
    assert torch.equal(params[0], fresh[0])
    assert [optimizer.state[p]["step"].item() for p in params] == [1, 4, 4]


def test_parameters_keep_their_storage() -> None:
    params = parameters(5)
    places = [p.data_ptr() for p in params]
    run(AdamW(params, lr=1e-2), params, range(2))
    assert [p.data_ptr() for p in params] == places


def test_a_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    param = Parameter(torch.tensor([3.0], dtype=F64))
    optimizer = AdamW([param], lr=1e-2)

    def closure() -> float:
        loss = (param**2).sum()
        torch.autograd.backward(loss)
        return float(loss.detach())

    assert optimizer.step(closure) == 9.0
    assert param.item() < 3.0 and optimizer.step() is None


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_state_has_the_dtype_of_the_parameter(dtype: torch.dtype) -> None:
    param = Parameter(torch.ones(2, dtype=dtype))
    param.grad = torch.ones(2, dtype=dtype)
    optimizer = AdamW([param], lr=1e-2)
    optimizer.step()
    assert {v.dtype for v in optimizer.state[param].values()} == {dtype} == {param.dtype}


def run(optimizer: AdamW, params: list[Parameter], steps: range) -> None:
    for step in steps:
        set_grads(params, step=step)
        optimizer.step()


def numbers(*, weight_decay: float = 0.1, eps: float = 1e-8) -> dict[str, float]:
    return dict(lr=0.5, beta1=0.9, beta2=0.95, eps=eps, weight_decay=weight_decay)


def distance(x: Tensor, y: Tensor) -> float:
    """Largest difference, as a share of the largest value of ``y``."""
    largest = y.detach().abs().max().item()
    return (x.detach() - y.detach()).abs().max().item() / largest


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_fused_kernel_differs_by_rounding_and_keeps_the_same_state(dtype: torch.dtype) -> None:
    plain, fused = (
        [Parameter(p.detach().to(dtype)) for p in (*parameters(0), Parameter(torch.empty(0, 4)))]
        for _ in range(2)
    )
    numbers = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizers = [AdamW(plain, **numbers), AdamW(fused, **numbers, fused=True)]  # type: ignore[arg-type]
    for optimizer, params in zip(optimizers, (plain, fused), strict=True):
        optimizer.init_state()
        for step in range(STEPS):
            set_grads(params, step=step)
            if step == 3:  # a replica that is healed counts anew, a parameter for itself
                for value in optimizer.state[params[1]].values():
                    value.zero_()
            optimizer.step()
    for x, y in zip(plain, fused, strict=True):
        mine, theirs = (o.state[p] for o, p in zip(optimizers, (x, y), strict=True))
        assert list(theirs) == ["step", "exp_avg", "exp_avg_sq"]
        assert theirs["step"] == mine["step"] and theirs["step"].dtype == dtype
        allowed = TOLERANCE * torch.finfo(dtype).eps / torch.finfo(F64).eps
        if x.numel():  # some shards hold no row
            assert distance(mine["exp_avg"], theirs["exp_avg"]) <= allowed
            assert distance(mine["exp_avg_sq"], theirs["exp_avg_sq"]) <= allowed
            assert distance(x, y) <= allowed
