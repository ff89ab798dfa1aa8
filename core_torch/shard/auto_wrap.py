"""Automatic wrapping: which collectives to merge, as a small problem of numbers.

Needs, ordered by first use, are partitioned into runs, the buckets of one plan, which serves
gathers and scatters of both directions. Proposals come from the greedy rule of SimpleFSDP
(arXiv:2411.00284), from the units and from equal portions; ``estimate`` orders them by a
recursion over buckets. Who has the real graph scores them by its timeline and takes the
``best``.

Greedy, as published: append the next need to the open bucket while its gather, and the
scatter of the step before, stay hidden behind the compute of the step before, and memory
holds. Where communication dominates nothing is ever hidden and every need stays alone, the
worst plan there is; so a bucket must first reach the *knee*, the size from which latency is
a small share of its time.

Numbers only: the same inputs give the same plan on every rank.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from core_torch.shard.cost import Costs
from core_torch.shard.plan import Choice, Plan, best

MOST_FOR_EXHAUSTIVE = 8  # 128 plans
_KNEES = (0.2, 0.1, 0.05)  # shares of latency
_SLACKS = (0.0, 0.5)
_FEW = 64  # needs that a search may part one by one
_MOST_PORTIONS = 32
_SWEEPS = 4  # of the search over all places

_Cuts = tuple[int, ...]  # 0, where each further bucket begins, number of needs


class Need(NamedTuple):
    """One parameter that compute needs whole."""

    name: str
    unit: str  # that it belongs to by the manual plan
    payload_bytes: int  # of its gather: the whole parameter
    gradient_bytes: int  # of its scatter: the whole gradient; 0 if frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be wrapped. Per need, in order of first use.

    Raises:
        ValueError: no needs, or not one number for each.
    """

    needs: tuple[Need, ...]
    forward_seconds: tuple[float, ...]  # of compute from the use of this need to the next
    backward_seconds: tuple[float, ...]  # of compute that uses this need and makes its gradient
    forward_bytes: tuple[int, ...]  # live meanwhile besides parameters: activations
    backward_bytes: tuple[int, ...]  # the same, without gradients of parameters
    ranks: int

    def __post_init__(self) -> None:
        columns = (self.forward_seconds, self.backward_seconds)
        memory = (self.forward_bytes, self.backward_bytes)
        if any(len(column) != len(self.needs) for column in (*columns, *memory)):
            raise ValueError(f"{len(self.needs)} needs do not have one number each")
        if not self.needs:
            raise ValueError("nothing needs a collective")


class Estimate(NamedTuple):
    """Of one step under a plan."""

    seconds: float
    peak_bytes: int  # besides the parameters' own shards


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """A run of needs as one step of compute with its collectives."""

    gather_bytes: int
    scatter_bytes: int
    gather_seconds: float  # on the link
    scatter_seconds: float
    forward_seconds: float  # of compute
    backward_seconds: float
    forward_bytes: int
    backward_bytes: int


def _bucket(problem: Problem, costs: Costs, begin: int, end: int) -> _Bucket:
    """Needs ``begin`` up to ``end`` merged."""
    needs, ranks = problem.needs[begin:end], problem.ranks
    gather = sum(need.payload_bytes for need in needs)
    scatter = sum(need.gradient_bytes for need in needs)
    seconds = costs.link_seconds("reduce_scatter", scatter, ranks) if scatter else 0.0
    return _Bucket(
        gather_bytes=gather,
        scatter_bytes=scatter,
        gather_seconds=costs.link_seconds("all_gather", gather, ranks),
        scatter_seconds=seconds,
        forward_seconds=sum(problem.forward_seconds[begin:end]),
        backward_seconds=sum(problem.backward_seconds[begin:end]),
        forward_bytes=max(problem.forward_bytes[begin:end]),
        backward_bytes=max(problem.backward_bytes[begin:end]),
    )


def _direction_seconds(buckets: Sequence[_Bucket], *, backward: bool) -> float:
    """Seconds of one pass over ``buckets``, given in the order in which it meets them.

    The gather of the next bucket is issued before the wait for this one's; in the backward,
    the scatter of a bucket is issued after its compute and awaited after the next one's
    compute. That wait never blocks: a gather that was issued later has been awaited by then,
    and the link keeps order. Only the last one does.
    """
    now = 0.0  # when the compute stream is free
    gathered = [link := buckets[0].gather_seconds]  # when each gather is through
    for i, bucket in enumerate(buckets):
        if i + 1 < len(buckets):
            gathered.append(link := max(link, now) + buckets[i + 1].gather_seconds)
        now = max(now, gathered[i])
        now += bucket.backward_seconds if backward else bucket.forward_seconds
        if backward:
            link = max(link, now) + bucket.scatter_seconds
    return max(now, link)


def _peak_bytes(buckets: Sequence[_Bucket], ranks: int) -> int:
    """Most bytes that are live in either direction, as the schedule above holds them.

    A gather in flight has its packed shard and its buffer; what arrives is unpacked out of
    that. A scatter in flight has what it sends, own row included, and what it receives.
    ``buckets`` come in order of the forward.
    """

    def gathering(bucket: _Bucket) -> int:
        return bucket.gather_bytes + bucket.gather_bytes // ranks

    def scattering(bucket: _Bucket) -> int:
        return 2 * bucket.scatter_bytes - bucket.scatter_bytes // ranks

    last = len(buckets) - 1
    peak = done = 0  # done: bytes of sharded gradients
    for i, now in enumerate(buckets):
        arriving = gathering(buckets[i + 1]) if i < last else 0
        peak = max(peak, now.forward_bytes + gathering(now) + now.gather_bytes + arriving)
    for i, now in reversed(list(enumerate(buckets))):
        arriving = gathering(buckets[i - 1]) if i > 0 else 0
        leaving = scattering(buckets[i + 1]) if i < last else 0
        reduced = buckets[i + 1].scatter_bytes // ranks if i < last else 0
        own = max(
            gathering(now) + now.gather_bytes,  # unpacking
            now.gather_bytes + now.scatter_bytes,  # computing
            scattering(now) + now.scatter_bytes,  # packing
            scattering(now) + reduced,  # summing the one before
        )
        peak = max(peak, now.backward_bytes + own + arriving + leaving + done)
        done += reduced
    return peak


def _estimate(problem: Problem, costs: Costs, cuts: _Cuts) -> Estimate:
    """Time and memory of a partition."""
    buckets = [_bucket(problem, costs, a, b) for a, b in itertools.pairwise(cuts)]
    seconds = _direction_seconds(buckets, backward=False)
    seconds += _direction_seconds(buckets[::-1], backward=True)
    return Estimate(seconds, _peak_bytes(buckets, problem.ranks))


def estimate(problem: Problem, costs: Costs, plan: Plan) -> Estimate:
    """Time and memory of a step under ``plan``, by the recursion over buckets.

    Raises:
        ValueError: buckets that are not consecutive runs of the needs.
    """
    if [name for bucket in plan for name in bucket] != [need.name for need in problem.needs]:
        raise ValueError("a plan to estimate must list all needs in order of first use")
    return _estimate(problem, costs, (0, *itertools.accumulate(len(bucket) for bucket in plan)))


def _plan(problem: Problem, cuts: Sequence[int]) -> Plan:
    """Names of each run."""
    names = [need.name for need in problem.needs]
    return [names[a:b] for a, b in itertools.pairwise(cuts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Settings of the greedy walk."""

    latency_share: float = 0.1  # a bucket grows to the knee regardless; 1: as published
    slack: float = 0.0  # fraction by which communication may exceed the compute it hides behind
    largest_bytes: int | None = None  # payload up to which the costs are calibrated
    backward: bool = False  # walk from the last need to the first, by the backward's compute


def greedy(problem: Problem, costs: Costs, rule: Rule, *, memory_limit: int | None = None) -> Plan:
    """The published rule behind the knee, in one walk over the needs.

    ``memory_limit`` in bytes: no need is appended where that would exceed it.
    """
    return _plan(problem, _greedy(problem, costs, rule, memory_limit))


def _greedy(problem: Problem, costs: Costs, rule: Rule, memory_limit: int | None) -> _Cuts:
    """See ``greedy``."""
    count = len(problem.needs)

    def run(begin: int, end: int) -> _Bucket:
        """Needs of a stretch of the walk."""
        ends = (count - end, count - begin) if rule.backward else (begin, end)
        return _bucket(problem, costs, *ends)

    alone = [run(i, i + 1) for i in range(count)]
    closed: list[_Bucket] = []
    cuts, grown = [0], alone[0]
    for place in range(1, count):
        is_open, grown = grown, run(cuts[-1], place + 1)
        may_grow = _is_welcome(is_open, grown, closed[-1] if closed else None, costs, rule)
        if may_grow and memory_limit is not None:
            provisional = [*closed, grown, *alone[place + 1 :]][:: -1 if rule.backward else 1]
            may_grow = _peak_bytes(provisional, problem.ranks) <= memory_limit
        if not may_grow:
            closed.append(is_open)
            cuts.append(place)
            grown = alone[place]
    whole = (*cuts, count)
    return tuple(sorted(count - cut for cut in whole)) if rule.backward else whole


def _is_welcome(
    is_open: _Bucket, grown: _Bucket, previous: _Bucket | None, costs: Costs, rule: Rule
) -> bool:
    """Whether a bucket may become ``grown``, memory apart."""
    if rule.largest_bytes is not None and grown.gather_bytes > rule.largest_bytes:
        return False
    if costs.latency_seconds > rule.latency_share * is_open.gather_seconds:
        return True
    if previous is None:
        return False  # nothing to hide behind
    if rule.backward:
        busy = grown.gather_seconds + previous.scatter_seconds
        return busy <= previous.backward_seconds * (1 + rule.slack)
    return grown.gather_seconds <= previous.forward_seconds * (1 + rule.slack)


def exhaustive(problem: Problem, costs: Costs, *, memory_limit: int | None = None) -> Choice:
    """The best of all partitions by ``estimate``; to judge the others by.

    Raises:
        ValueError: more than ``MOST_FOR_EXHAUSTIVE`` needs.
    """
    count = len(problem.needs)
    if count > MOST_FOR_EXHAUSTIVE:
        raise ValueError(f"{count} needs have {2 ** (count - 1)} partitions, too many to try")
    inner = range(1, count)
    sets = itertools.chain.from_iterable(itertools.combinations(inner, k) for k in range(count))
    plans = [_plan(problem, (0, *chosen, count)) for chosen in sets]
    return best(plans, lambda plan: estimate(problem, costs, plan), memory_limit=memory_limit)


def candidates(
    problem: Problem,
    costs: Costs,
    *,
    memory_limit: int | None = None,
    largest_bytes: int | None = None,
) -> list[Plan]:
    """Plans worth scoring on the real graph, the most promising by ``estimate`` first.

    Among them, always: one bucket per unit (the manual plan), units merged and cut in half,
    equal portions, the greedy rule in both directions with several knees and slacks, and a
    local search from the best of these.

    Args:
        problem: what is to be wrapped.
        costs: of the link.
        memory_limit: bytes; plans that exceed it by ``estimate`` come last.
        largest_bytes: payload up to which the costs are calibrated; no greedy bucket beyond.
    """
    found = {*_by_units(problem), *_portions(problem)}
    settings = itertools.product(_KNEES, _SLACKS, (False, True))
    for share, slack, backward in settings:
        rule = Rule(
            latency_share=share, slack=slack, largest_bytes=largest_bytes, backward=backward
        )
        found.add(_greedy(problem, costs, rule, memory_limit))

    def order(cuts: _Cuts) -> tuple[int, float, int, int, _Cuts]:
        """Bytes beyond the limit first: a plan that does not fit is worth nothing."""
        seconds, peak = _estimate(problem, costs, cuts)
        over = 0 if memory_limit is None else max(0, peak - memory_limit)
        return over, seconds, peak, len(cuts), cuts

    start = min(found, key=order)
    found.add(_search(start, _places(problem), order))
    return [_plan(problem, cuts) for cuts in sorted(found, key=order)]


def _unit_cuts(problem: Problem) -> _Cuts:
    """Where units begin; a unit that is used in two places counts as two."""
    pairs = itertools.pairwise(problem.needs)
    starts = [i for i, (a, b) in enumerate(pairs, start=1) if a.unit != b.unit]
    return (0, *starts, len(problem.needs))


def _by_units(problem: Problem) -> Iterator[_Cuts]:
    """Units alone, merged by two to four, and in halves."""
    cuts = _unit_cuts(problem)
    for stride in range(1, 5):
        yield (*cuts[:-1:stride], cuts[-1])
    yield tuple(sorted({*cuts, *_middles(problem, cuts)}))


def _middles(problem: Problem, cuts: _Cuts) -> Iterator[int]:
    """Where each run of two needs or more splits into halves of about equal bytes."""
    for begin, end in itertools.pairwise(cuts):
        sums = list(itertools.accumulate(need.payload_bytes for need in problem.needs[begin:end]))
        if len(sums) > 1:
            yield begin + min(
                range(1, len(sums)), key=lambda i: (abs(2 * sums[i - 1] - sums[-1]), i)
            )


def _portions(problem: Problem) -> Iterator[_Cuts]:
    """One bucket, two, three, ... of about equal bytes, up to two for each unit."""
    sums = list(itertools.accumulate(need.payload_bytes for need in problem.needs))
    for count in range(1, min(2 * len(_unit_cuts(problem)), _MOST_PORTIONS + 1)):
        ends = {bisect_left(sums, sums[-1] * k / count) + 1 for k in range(1, count)}
        yield tuple(sorted({0, *(e for e in ends if e < len(sums)), len(sums)}))


def _places(problem: Problem) -> list[int]:
    """Where the search may cut: anywhere, in a large model between and inside of units."""
    if len(problem.needs) <= _FEW:
        return list(range(1, len(problem.needs)))
    cuts = _unit_cuts(problem)
    return sorted({*cuts[1:-1], *_middles(problem, cuts)})


def _search(cuts: _Cuts, places: Sequence[int], order: Callable[[_Cuts], Any]) -> _Cuts:
    """Adds, removes and shifts single cuts while that helps."""
    least = order(cuts)
    for _ in range(_SWEEPS):
        before = cuts
        for i, place in enumerate(places):
            toggled = [{place}, {place, places[i - 1]}] if i else [{place}]
            for change in toggled:
                trial = tuple(sorted(set(cuts) ^ change))
                if (value := order(trial)) < least:
                    cuts, least = trial, value
        if cuts == before:
            break
    return cuts
