"""Records of training runs and what is made of them: lines, tables, figures, one HTML page.

Standard library, rich and matplotlib only (the latter inside the functions that draw), so that
the command line stays light.
"""

from core_torch.report.records import RecordWriter, Run, load_run, write_json
from core_torch.report.repeats import has_repeats, repeated_table
from core_torch.report.summary import perplexity, summarise, summary_of
from core_torch.report.table import comparison_rows, comparison_table
from core_torch.report.text import human_bytes, human_count, sanitise
from core_torch.report.write import write_report

__all__ = [
    "RecordWriter",
    "Run",
    "comparison_rows",
    "comparison_table",
    "has_repeats",
    "human_bytes",
    "human_count",
    "load_run",
    "perplexity",
    "repeated_table",
    "sanitise",
    "summarise",
    "summary_of",
    "write_json",
    "write_report",
]
