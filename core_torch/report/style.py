"""How figures look: colours that colour-blind readers can tell apart, on paper and in the dark.

Colours follow Okabe and Ito's palette, lightened for the dark theme; lines of different runs also
differ in dash, so that a figure survives a black-and-white print. matplotlib is imported
where it is used: the command line starts without it.
"""

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH_INCHES = 6.6
DOTS_PER_INCH = 170
TITLE_COLUMNS = 58
FOOTNOTE_COLUMNS = 92


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """Colours of one appearance."""

    name: str
    paper: str
    ink: str
    muted: str
    grid: str
    methods: dict[str, str]
    replicas: tuple[str, ...]
    clipped: tuple[str, str]  # colours of a clip factor of 0 and of 1


LIGHT = Theme(
    name="light",
    paper="#ffffff",
    ink="#1c1f23",
    muted="#5f6670",
    grid="#e3e6ea",
    methods={
        "synchronous": "#1c1f23",
        "post_local_sgd": "#009e73",
        "diloco": "#0072b2",
        "streaming_diloco": "#56b4e9",
        "co2": "#cc79a7",
        "co2_star": "#6b4fa0",
        "edit": "#d55e00",
        "aedit": "#b58900",
    },
    replicas=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#6b4fa0"),
    clipped=("#08457e", "#f1f4f8"),
)
DARK = Theme(
    name="dark",
    paper="#15181c",
    ink="#e8eaed",
    muted="#a3abb5",
    grid="#2c3138",
    methods={
        "synchronous": "#e8eaed",
        "post_local_sgd": "#2fc49a",
        "diloco": "#56b4e9",
        "streaming_diloco": "#a8dcff",
        "co2": "#e59cc4",
        "co2_star": "#c3a6ff",
        "edit": "#ff8c42",
        "aedit": "#e6c229",
    },
    replicas=("#56b4e9", "#ff8c42", "#2fc49a", "#e59cc4", "#e6c229", "#7f9cf5", "#c3a6ff"),
    clipped=("#8fd0ff", "#1e2328"),
)

DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))


def method_line(theme: Theme, method: str, repeat: int) -> dict[str, Any]:
    """Colour and dash of the ``repeat``-th run of a method; synchronous is the dashed reference."""
    shift = 1 if method == "synchronous" else 0
    colour = theme.methods.get(method, theme.muted)
    return {"color": colour, "linestyle": DASHES[(repeat + shift) % len(DASHES)]}


def replica_line(theme: Theme, replica: int) -> dict[str, Any]:
    """Colour and dash of a replica; colours repeat with another dash."""
    cycle, index = divmod(replica, len(theme.replicas))
    return {"color": theme.replicas[index], "linestyle": DASHES[cycle % len(DASHES)]}


def _settings(theme: Theme) -> Any:
    ink, muted = theme.ink, theme.muted
    return {
        "font.family": "DejaVu Sans",
        "font.size": 11.5,
        "axes.titlesize": 12.5,
        "axes.labelsize": 11.5,
        "legend.fontsize": 10.5,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": muted,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "lines.linewidth": 2.0,
        "lines.solid_capstyle": "round",
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "twinshard",  # names inside a file depend on nothing else
        "text.parse_math": False,  # names from files are never formulas
    }


@contextmanager
def drawing(theme: Theme) -> Iterator[None]:
    """The theme's settings; everything in a figure is made and saved inside."""
    import matplotlib

    with matplotlib.rc_context(_settings(theme)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(height_inches: float, title: str, footnote: str, theme: Theme) -> "Figure":
    """A figure with its finding above and its conditions below, both wrapped; no global state."""
    from matplotlib.figure import Figure

    notes = textwrap.wrap(footnote, FOOTNOTE_COLUMNS)
    heads = textwrap.wrap(title, TITLE_COLUMNS)
    below, above = 0.1 + 0.165 * len(notes), 0.12 + 0.22 * len(heads)
    height = height_inches + below + above
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0.0, below / height, 1.0, 1.0 - (below + above) / height))  # type: ignore[call-arg]
    figure.text(0.015, 1 - 0.08 / height, "\n".join(heads), va="top", size=12.5, weight="bold")
    figure.text(0.015, 0.08 / height, "\n".join(notes), va="bottom", size=8.8, color=theme.muted)
    return figure


def label_decades(axis: "Axis", ratio: float) -> None:
    """Labels powers of ten of a logarithmic axis, and three times those where they are few."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if ratio < 3000 else (1.0,)))
    axis.set_minor_formatter(NullFormatter())


def save(figure: "Figure", path: Path) -> None:
    """Writes a PNG or SVG without a trace of time or tool, so equal runs give equal files."""
    unknown = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata=unknown)
