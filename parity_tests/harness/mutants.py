"""Deliberate faults. A comparison that does not notice them proves nothing.

A mutant is one edit of one shipped function: the text to find, which must occur exactly once,
and what to put there. The edited source is compiled and takes the place of the function's
code object, so every module that imported the function by name, and every table that holds
it, runs the fault; nothing is looked up or patched. Arguments and defaults stay as they are.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType

from parity_tests.harness.engine_mutants import ENGINE_MUTANTS
from parity_tests.harness.mutant import Mutant

PENALTY, OUTER = "core_torch.sync.penalty", "core_torch.sync.outer"
ADAMW, SCHEDULES = "core_torch.adamw", "core_torch.schedules"
ATTENTION = "core_torch.models.attention"
LLAMA, FSDP2, TRAIN = "core_torch.models.llama", "core_torch.shard.fsdp2", "core_torch.train"
OPERATORS, LAYOUT, PARAMETRISE, SIMPLE = (
    f"core_torch.shard.{name}" for name in ("operators", "layout", "parametrise", "model")
)
JOINT, BUCKET = (f"core_torch.shard.passes.{name}" for name in ("joint", "bucket"))
ROUND, ROUNDS, TRIGGER = (f"core_torch.sync.{name}" for name in ("sync_round", "rounds", "trigger"))

MUTANTS: dict[str, Mutant] = {
    # outer step
    "the outer step climbs": Mutant(f"{OUTER}:nesterov_step", "anchor - lr", "anchor + lr"),
    "outer momentum dropped": Mutant(
        f"{OUTER}:nesterov_step", "momentum * velocity + pseudo_grad", "pseudo_grad"
    ),
    "Nesterov is heavy ball": Mutant(
        f"{OUTER}:nesterov_step", "(pseudo_grad + momentum * new_velocity)", "new_velocity"
    ),
    "a rollback moves the anchor": Mutant(
        f"{OUTER}:nesterov_step", "torch.where(accept, new_anchor, anchor)", "new_anchor"
    ),
    "a rollback moves the velocity": Mutant(
        f"{OUTER}:nesterov_step", "torch.where(accept, new_velocity, velocity)", "new_velocity"
    ),
    "nobody is healed": Mutant(
        f"{OUTER}:heal", "torch.where(is_bad, torch.zeros_like(moment), moment)", "moment"
    ),
    # penalty
    "finite is decided in the run's dtype": Mutant(
        f"{PENALTY}:finite_norms", "norm_R.to(torch.float32)", "norm_R"
    ),
    "small norms are flagged too": Mutant(
        f"{PENALTY}:judge", "z_R > z_threshold", "z_R.abs() > z_threshold"
    ),
    "cold statistics flag": Mutant(
        f"{PENALTY}:judge", "stats.count_R >= warmup_rounds", "stats.count_R >= 0"
    ),
    "no spike test before the statistics are warm": Mutant(
        f"{PENALTY}:judge", "norm_R.shape[-1] >= 3", "norm_R.shape[-1] >= 99"
    ),
    "re-armed one flag late": Mutant(
        f"{PENALTY}:judge", "stats.flags_R + 1 >= rearm_after", "stats.flags_R >= rearm_after"
    ),
    "the median is the lower middle": Mutant(
        f"{PENALTY}:median_over_replicas", "(middle_low + middle_high) / 2", "middle_low"
    ),
    "anomalies enter the mean": Mutant(
        f"{PENALTY}:update_stats", "torch.where(accepted_R, mean_R, stats.mean_R)", "mean_R"
    ),
    "anomalies enter the variance": Mutant(
        f"{PENALTY}:update_stats", "torch.where(accepted_R, var_R, stats.var_R)", "var_R"
    ),
    "statistics are not seeded": Mutant(
        f"{PENALTY}:update_stats", ".clamp(min=ema_alpha)", ".clamp(min=ema_alpha, max=ema_alpha)"
    ),
    "weights not renormalised after exclusion": Mutant(
        f"{PENALTY}:mixing_weights",
        "torch.where(is_anomaly_R, -torch.inf, -norm_R / scale)",
        "-norm_R / scale",
    ),
    "larger steps weigh more": Mutant(
        f"{PENALTY}:mixing_weights", "-norm_R / scale", "norm_R / scale"
    ),
    "the mean counts the excluded": Mutant(
        f"{PENALTY}:uniform_weights", "kept_R.sum(dim=-1, keepdim=True)", "kept_R.new_full((), 2.0)"
    ),
    "zero times NaN": Mutant(
        f"{PENALTY}:weigh",
        "torch.where(weight > 0, weight * pseudo_grad, 0.0)",
        "weight * pseudo_grad",
    ),
    "no clip": Mutant(
        f"{PENALTY}:clip_coefficient",
        "torch.clamp(max_norm / (norm + eps), max=1.0)",
        "torch.ones_like(norm)",
    ),
    "clip amplifies": Mutant(f"{PENALTY}:clip_coefficient", "max=1.0", "min=0.0"),
    "clip with eps subtracted": Mutant(f"{PENALTY}:clip_coefficient", "norm + eps", "norm - eps"),
    # optimizer
    "first moment not corrected": Mutant(
        f"{ADAMW}:adamw_update", "exp_avg / (1.0 - beta1**step)", "exp_avg"
    ),
    "second moment not corrected": Mutant(
        f"{ADAMW}:adamw_update", "(exp_avg_sq / (1.0 - beta2**step))", "exp_avg_sq"
    ),
    "the step counts from 0": Mutant(
        f"{ADAMW}:adamw_update", "1.0 - beta2**step", "1.0 - beta2 ** (step + 1)"
    ),
    "no weight decay": Mutant(
        f"{ADAMW}:adamw_update", "param * (1.0 - lr * weight_decay)", "param * 1.0"
    ),
    "decay not times the learning rate": Mutant(
        f"{ADAMW}:adamw_update", "1.0 - lr * weight_decay", "1.0 - weight_decay"
    ),
    "eps under the root": Mutant(
        f"{ADAMW}:adamw_update", "lr * mean / (root + eps)", "lr * mean / (root**2 + eps).sqrt()"
    ),
    # schedule
    "warm-up ignored": Mutant(f"{SCHEDULES}:learning_rate", "tokens < warmup_tokens", "tokens < 0"),
    "cosine to zero": Mutant(
        f"{SCHEDULES}:decay_factor", "final_ratio + (1.0 - final_ratio) * remaining", "remaining"
    ),
    # model
    "rotary pairs halves": Mutant(
        f"{LLAMA}:Rotary.forward", "(-1, 2)).unbind(dim=-1)", "(2, -1)).unbind(dim=-2)"
    ),
    "rotary frequencies in float32": Mutant(
        f"{LLAMA}:rope_frequencies", "dtype=torch.float64", "dtype=torch.float32"
    ),
    "rotary scaling ignored": Mutant(
        f"{LLAMA}:rope_frequencies", "scaling.factor == 1.0", "scaling.factor > 0.0"
    ),
    "RMSNorm without eps": Mutant(f"{LLAMA}:RMSNorm.forward", " + self.eps", ""),
    "RMSNorm's eps outside the mean": Mutant(
        f"{LLAMA}:RMSNorm.forward", "+ self.eps", "+ self.eps * x_BTD.shape[-1]"
    ),
    "attention sees the future": Mutant(
        f"{ATTENTION}:attend", "is_causal=mask_B1TT is None", "is_causal=False"
    ),
    "attention scale off by 1e-6": Mutant(
        f"{ATTENTION}:attend", "q_BTHE.transpose(1, 2)", "q_BTHE.transpose(1, 2) * 1.000001"
    ),
    "gate and value exchanged": Mutant(
        f"{LLAMA}:FeedForward.forward",
        "silu(self.w1(x_BTD)) * self.w3(x_BTD)",
        "silu(self.w3(x_BTD)) * self.w1(x_BTD)",
    ),
    # inner step
    "local gradients divided by N M": Mutant(f"{FSDP2}:replica_mean", "    flat.mul_", "flat.mul_"),
    "synchronous gradients summed": Mutant(f"{FSDP2}:replica_mean", "1.0 / axis.size", "1.0"),
    "local gradients averaged over replicas": Mutant(
        f"{TRAIN}:inner_step", "mean_over_replicas = synchronous", "mean_over_replicas = True"
    ),
    "micro-batches summed": Mutant(f"{TRAIN}:loss_of", " / train.accumulate", ""),
    "one micro-batch for all": Mutant(f"{TRAIN}:inner_step", "accumulate + k)", "accumulate)"),
    "gradient norm of one shard": Mutant(
        f"{TRAIN}:apply_gradients",
        'psum(mine, mesh.model, scope="metrics")',
        "mine",
    ),
    "gradient clip without 1e-6": Mutant(f"{TRAIN}:apply_gradients", "eps=1e-6", "eps=0.0"),
    "learning rate of the step before": Mutant(
        f"{TRAIN}:apply_gradients", "state.tokens + state.config.tokens_per_step", "state.tokens"
    ),
    "gains decay": Mutant(f"{TRAIN}:build_optimizer", ', "weight_decay": 0.0}', "}"),
    # SimpleFSDP
    "gradients of the shards summed": Mutant(
        f"{OPERATORS}:mean_shards", "1.0 / (plan.shard.size * plan.replica.size)", "1.0"
    ),
    "mean over the shards alone": Mutant(
        f"{OPERATORS}:mean_shards", "(plan.shard.size * plan.replica.size)", "plan.shard.size"
    ),
    "the plan of the model before": Mutant(
        f"{OPERATORS}:plan_of", "_PLANS[number]", "_PLANS[number - 1]"
    ),
    "padding kept, rows cut": Mutant(
        f"{LAYOUT}:unpack_gathered", "rows[: layout.shape[0]]", "rows[-layout.shape[0] :]"
    ),
    "chunks packed by place, not by rank": Mutant(
        f"{LAYOUT}:pack_gradients", "layout.rows(rank)", "layout.rows(row)"
    ),
    "rows of the other ranks not awaited": Mutant(
        "core_torch.collectives:PendingRows.wait",
        "list(self.received)",
        "list(torch.zeros_like(self.received))",
    ),
    "gathered again without its view": Mutant(
        f"{PARAMETRISE}:Regather.__call__",
        "full.as_strided(self.size, self.stride, self.offset)",
        "full.reshape(self.size)",
    ),
    "another parameter of that shape gathered again": Mutant(
        f"{PARAMETRISE}:Sharding.read",
        "_Source(param, self, key)",
        "_Source(_GATHERED.__dict__.setdefault(str(param.shape), param), self, key)",
    ),
    "kept for the backward in an eager model": Mutant(
        f"{PARAMETRISE}:resharding", "not plan.reshard_after_forward", "True"
    ),
    "one use of a tied weight dropped": Mutant(
        f"{JOINT}:merge_scatters",
        "torch.ops.aten.add.Tensor, (a, b)",
        "torch.ops.aten.mul.Tensor, (a, 1.0)",
    ),
    "kept for the backward in a graph": Mutant(
        f"{JOINT}:tag_gathers", "MUST_RECOMPUTE if again", "MUST_SAVE if again"
    ),
    "a collective for each parameter": Mutant(
        f"{BUCKET}:_groups", "home.get(parameter, parameter)", "parameter"
    ),
    "synchronous gradients summed under SimpleFSDP": Mutant(
        f"{SIMPLE}:Simple.finish_gradients", "1.0 / axis.size", "1.0"
    ),
    "local gradients averaged under SimpleFSDP": Mutant(
        f"{SIMPLE}:Simple.finish_gradients", "not self.mean_over_replicas or ", ""
    ),
    # rounds
    "pseudo-gradient of the wrong sign": Mutant(f"{ROUND}:pseudo_gradient", "a - x", "x - a"),
    "norms of one shard": Mutant(
        f"{ROUND}:gather_norms",
        'psum(torch.stack(squares), axes.model, scope="norms")',
        "torch.stack(squares)",
    ),
    "norm for the clip of one shard": Mutant(
        f"{ROUND}:finish",
        "psum(torch.stack(squares), axes.model, scope=unit.name)",
        "torch.stack(squares)",
    ),
    "plain mean in place of the penalty": Mutant(
        f"{ROUND}:_weights", "rules.penalty is not None and rules.penalty.weigh", "False"
    ),
    "a rollback takes an outer step": Mutant(
        f"{ROUND}:_weights", "~anomaly_UR.all(dim=-1)", "anomaly_UR.any(dim=-1) | True"
    ),
    "stale anchor": Mutant(f"{ROUND}:finish", "anchors.append(anchor)", "anchors.append(a)"),
    "stale velocity": Mutant(
        f"{ROUND}:finish", "velocities.append(velocity)", "velocities.append(b)"
    ),
    "parameters not replaced": Mutant(
        f"{ROUND}:finish", "x.copy_(mix(x, anchor, alpha=keep))", "x.copy_(x)"
    ),
    "clipped but not scaled": Mutant(f"{ROUND}:finish", "beta * d", "d"),
    "a forced round moves the statistics": Mutant(
        f"{ROUNDS}:Rounds.conclude", " and not meeting.forced", ""
    ),
    "a round one step early": Mutant(
        f"{TRIGGER}:StepTrigger.due", "since = step - self.warmup", "since = step - self.warmup + 1"
    ),
    "a round right after the warm-up": Mutant(
        f"{TRIGGER}:StepTrigger.due", "since <= 0", "since < 0"
    ),
    "warm-up one step longer": Mutant(
        f"{TRIGGER}:StepTrigger.is_synchronous",
        "completed < self.warmup",
        "completed <= self.warmup",
    ),
}


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Runs the block with the mutant ``name`` in place of the shipped function, in this process.

    Raises:
        KeyError: there is no such mutant.
        ValueError: the function no longer contains the text once.
    """
    mutant = (MUTANTS | ENGINE_MUTANTS)[name]
    function = find(mutant.target)
    shipped, function.__code__ = function.__code__, edited_code(function, mutant)
    try:
        yield
    finally:
        function.__code__ = shipped


def find(target: str) -> FunctionType:
    """The function ``module:qualname``, below any decorators that wrap it."""
    module, _, qualname = target.partition(":")
    found: object = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    function = inspect.unwrap(found)  # type: ignore[arg-type]
    assert isinstance(function, FunctionType)
    return function


def edited_code(function: FunctionType, mutant: Mutant) -> CodeType:
    """Code object of ``function`` after the mutant's edit.

    Raises:
        ValueError: the text to replace does not occur exactly once.
    """
    source = textwrap.dedent(inspect.getsource(function))
    if (count := source.count(mutant.before)) != 1:
        raise ValueError(f"{mutant.before!r} occurs {count} times in {mutant.target}, not once")
    module = compile(source.replace(mutant.before, mutant.after), f"<{mutant.target}>", "exec")
    codes = [c for c in module.co_consts if isinstance(c, CodeType)]
    return next(c for c in codes if c.co_name == function.__name__)
