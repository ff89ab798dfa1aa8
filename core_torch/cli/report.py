"""``twinshard report``: compares runs in a table here and on a page with their curves."""

from pathlib import Path

from rich.console import Console

from core_torch.cli.options import ReportOptions
from core_torch.errors import EXIT_OK, DataError
from core_torch.report import (
    comparison_table,
    has_repeats,
    load_run,
    repeated_table,
    write_report,
)


def run(options: ReportOptions, words: list[str]) -> int:
    """Writes the report and says where it is.

    Args:
        options: where to write.
        words: run folders.

    Raises:
        DataError: a folder that is no run, or the report cannot be written.
    """
    folders = [Path(word) for word in words]
    runs = [load_run(folder) for folder in folders]
    out = Path(options.out) if options.out else folders[0]
    try:
        page = write_report(folders, out)
    except OSError as error:
        raise DataError(
            f"the report cannot be written: {error.strerror}",
            where=str(error.filename or out),
            next="twinshard report RUN --out FOLDER",
        ) from error
    console = Console()
    console.print(comparison_table(runs))
    if has_repeats(runs):
        console.print(repeated_table(runs))
    console.print(f"\nreport  {page}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK
