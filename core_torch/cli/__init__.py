"""The command ``twinshard``: the one place that composes everything.

The process that a user starts imports neither torch nor jax, so that help and mistakes in the
configuration answer at once. Ranks are other processes, see ``launch`` and ``worker``.
"""

import os
import sys
from collections.abc import Sequence

from core_torch.errors import EXIT_INTERRUPTED, ConfigError, Preempted, TwinshardError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; errors become four lines, never a traceback.

    Args:
        argv: words after ``twinshard``; None takes those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["_rank"]:  # started by launch, not by people
        from core_torch.cli.worker import main_of_rank

        return main_of_rank(words[1:])
    from core_torch.cli.commands import run_command

    try:
        code = run_command(words)
        sys.stdout.flush()
        return code
    except TwinshardError as error:
        if not (isinstance(error, ConfigError | Preempted) and _is_follower()):
            print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `twinshard ... | head`: nobody reads on, so there is nothing to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _is_follower() -> bool:
    """Whether torchrun started this process and another one tells what all of them know."""
    from core_torch.cli.worker import torchrun_place

    place = torchrun_place()
    return place is not None and place.rank > 0
