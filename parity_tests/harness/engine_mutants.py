"""Deliberate faults of the engine of local SGD; see mutants.py for what a mutant is.

They are met by tests on ranks that are threads, in this process, so each costs milliseconds;
a few can be seen in the next forward of a real model or by the reference only.
"""

from parity_tests.harness.mutant import Mutant

SYNC = "core_torch.sync"
ENGINE, ROUNDS = f"{SYNC}.engine:LocalSGD", f"{SYNC}.rounds:Rounds"
ROUND, OUTER, SAVED = f"{SYNC}.sync_round", f"{SYNC}.outer", f"{SYNC}.saved"

ENGINE_MUTANTS: dict[str, Mutant] = {
    # fewer bits
    "the residual is never sent": Mutant(
        f"{SYNC}.coded:start_coded", "total = flat + residual", "total = flat + 0.0 * residual"
    ),
    "what nobody used counts as sent": Mutant(
        f"{SYNC}.wire:residual", "torch.where(weight > 0, total - decoded, old)", "total - decoded"
    ),
    "codes are added without weights": Mutant(
        f"{SYNC}.coded:PendingCoded.wait", "weigh(sent, weight)", "sent / len(self.weight_R)"
    ),
    # late exchanges
    "no staleness gap": Mutant(
        f"{ROUND}:finish", "staleness_gap(norms[1], progress, eps=1e-6)", "gap"
    ),
    "the gap of the meeting before": Mutant(
        f"{ROUNDS}._finish", "(newest or meeting).measured", "meeting.measured"
    ),
    "the first progress of CO2 enters twice": Mutant(
        f"{ROUNDS}.perform", "self._return_to_anchor(state)", "self.members(0)"
    ),
    "the fragment after the one that is due": Mutant(
        f"{SYNC}.trigger:StepTrigger.due", "// (self.every // self.groups) %", "// self.every %"
    ),
    "a delay one step longer": Mutant(
        f"{ROUNDS}.finish_late",
        "+ self.rules.delay_steps <= step",
        "+ self.rules.delay_steps < step",
    ),
    "mixed the other way round": Mutant(
        f"{OUTER}:mix",
        "alpha * local + (1.0 - alpha) * anchor",
        "alpha * anchor + (1.0 - alpha) * local",
    ),
    "the closing round mixes": Mutant(
        f"{ROUNDS}._finish", "0.0 if meeting.forced else rules.mix", "rules.mix"
    ),
    # by the clock
    "replicas without a step count": Mutant(f"{ROUND}:decide", "steps_R == 0", "steps_R < 0"),
    "norms of the absent enter the median": Mutant(
        f"{ROUND}:decide", "torch.where(is_absent_R, torch.inf, norm_UR)", "norm_UR"
    ),
    "time is not restarted": Mutant(
        f"{ENGINE}._restart_clock", "self.trigger.restart()", "self.trigger.is_over()"
    ),
    "every shard asks its own clock": Mutant(
        f"{ENGINE}._group_due", "is_due and self.axes.model.index == 0", "is_due"
    ),
    "tokens of one replica times all": Mutant(
        f"{SYNC}.votes:Votes.count", "sum(tokens)", "len(tokens) * self.local_tokens"
    ),
    "who waits would have to commit": Mutant(
        f"{SYNC}.votes:Votes.count", "any(checkpoint) and all(stepping)", "any(checkpoint)"
    ),
    "the first to stop stops all": Mutant(f"{SYNC}.votes:Votes.count", "all(stop)", "any(stop)"),
    "no round is empty": Mutant(
        f"{ROUNDS}.measure", "sum(meeting.steps) < fewest", "sum(meeting.steps) < 0"
    ),
    "weights without steps": Mutant(f"{ROUND}:_weights", "rules.step_weight > 0", "False"),
    # in the forward
    "an evaluation carries the round": Mutant(
        f"{SYNC}.forward_sync:hook_forward", "child.training and torch.is_grad_enabled()", "True"
    ),
    "gathered ahead before the round": Mutant(
        f"{SYNC}.forward_sync:hook_forward", "min(u + lookahead, last)", "u"
    ),
    "a round that is due is forgotten at the end": Mutant(
        f"{ENGINE}.settle", "if state.is_due:", "if not state.rounds:"
    ),
    # stores and checkpoints
    "the host's memory is given away": Mutant(
        f"{SYNC}.store:OnHost.prefetch", "[x.clone() for x in part]", "[x for x in part]"
    ),
    "what is in flight is not saved": Mutant(
        f"{SAVED}:shared_tensors", 'found |= _by_parameter("in_flight"', '_by_parameter("in_flight"'
    ),
    "what is owed is not saved": Mutant(
        f"{SAVED}:own_tensors", "if left is not None", "if left is False"
    ),
    "elapsed time is not saved": Mutant(
        f"{SAVED}:counters", '"elapsed_ns": elapsed', '"elapsed_ns": 0'
    ),
    "a round that is due is not saved": Mutant(
        f"{SAVED}:counters", "state is not None and state.is_due", "False"
    ),
}
