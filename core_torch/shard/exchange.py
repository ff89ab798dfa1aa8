"""What a sync engine tells a compiled forward, so that the forward can carry a sync round.

Layer-wise, a round is not a pause between two steps: unit u is exchanged just before the
next forward needs it, while the units before it are computed. The forward knows when that is;
what an exchange *is*, only the engine knows. So the engine gives a few calls and some
numbers, and passes/exchange.py puts the calls where they belong.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from core_torch.errors import ConfigError
from core_torch.shard.program import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The calls of an engine, and what is known of its exchanges beforehand.

    A forward is one in which gradients are recorded; evaluation without gradients carries
    nothing and calls nothing. In each forward ``begin`` is called once, before anything else. If
    it is True, then units are started and finished **in their order**, each once, no more than
    ``limit`` started and not finished, as far as the forward reads parameters; then ``end``. All
    calls come with autograd switched off, and in the same order on every rank. If the forward
    raises, ``end`` is not called.
    """

    units: dict[str, list[str]]  # sync unit -> names of parameters, in order of the forward
    limit: int  # exchanges in flight
    begin: Callable[[], bool]  # whether this forward carries a round; all norms are there then
    start: Callable[[int], None]  # starts the exchange of a unit, by number
    finish: Callable[[int], None]  # on return the unit's parameters are new, in the same memory
    end: Callable[[], None]  # exchanges what the forward has not reached
    payload_bytes: Sequence[int]  # of each unit's exchange on this rank: see collectives.py
    ranks: int  # that exchange with each other: replicas
    op: Op = "all_reduce"

    def check(self, known: Collection[str], trained: Collection[str]) -> None:
        """Refuses units that do not fit the parameters.

        Args:
            known: names of all parameters.
            trained: those that change, and so must be in a unit.

        Raises:
            ConfigError: with everything that is wrong.
        """
        count = Counter(name for names in self.units.values() for name in names)
        problems = [f"{name} is in {n} units" for name, n in count.items() if n > 1]
        problems += [f"{name} is no parameter" for name in count if name not in known]
        problems += [f"{name} is in no unit" for name in trained if name not in count]
        if self.limit < 1:
            problems.append(f"a limit of {self.limit} exchanges lets none start")
        if len(self.payload_bytes) != len(self.units):
            problems.append(f"{len(self.payload_bytes)} payloads for {len(self.units)} units")
        if problems:
            raise ConfigError(
                f"exchanges that do not fit the model: {'; '.join(problems)}",
                next="units that hold each trained parameter of the model once",
            )
