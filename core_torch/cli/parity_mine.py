"""``twinshard parity mine``: a user's own torch model beside the reference."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from core_torch.cli.parity import check_outputs, prepare_jax, write_cells
from core_torch.cli.parity_options import ParityMineOptions
from core_torch.errors import ConfigError


def run(options: ParityMineOptions, words: list[str]) -> int:
    """Builds the model, runs both, prints what was found, and writes what the options ask for.

    Returns:
        0, or 1 where the model diverges from the reference.

    Raises:
        ConfigError: model and map do not fit, or JAX is needed and not there.
    """
    check_outputs(options)
    prepare_jax()
    from parity_tests.instrument.mine import Settings, examine
    from parity_tests.instrument.names import read_map
    from parity_tests.instrument.own_module import find
    from parity_tests.instrument.terminal import print_comparison

    told, build = read_map(options.map), find(options.model)
    names = ("dtype", "steps", "batch", "sequence", "seed", "keep_gains", "as_is")
    settings = Settings(**{name: getattr(options, name) for name in names})
    with _traces(options.out) as folder:
        with Console(stderr=True).status(f"running {options.model} and the reference"):
            short = options.model.rpartition(".")[2]
            found = examine(build, told, folder, settings, name=short)
        print_comparison(found.cell)
    console = Console()
    for note in found.notes:
        console.print(Text(f"Note: {note}"))
    lead = f"{options.model}, named by {options.map}, beside the reference"
    return write_cells([found.cell], options, title="Your model", lead=f"{lead}; {_run(options)}.")


def _run(options: ParityMineOptions) -> str:
    steps = "1 step" if options.steps == 1 else f"{options.steps} steps"
    return f"{steps} of AdamW, {options.batch} x {options.sequence} tokens each"


@contextmanager
def _traces(out: str) -> Iterator[Path]:
    """Where the traces go: a folder of the user's, or one that is thrown away."""
    if not out:
        with tempfile.TemporaryDirectory(prefix="twinshard-mine-") as folder:
            yield Path(folder)
        return
    if any((Path(out) / side / "meta.json").exists() for side in ("mine", "reference")):
        raise ConfigError(f"out: {out!r} holds traces already", next="another --out")
    yield Path(out)
    Console().print(f"traces  {out}", markup=False, highlight=False, soft_wrap=True)
