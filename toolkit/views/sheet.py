"""What every figure shares: style, title and subtitle, the bucket axis, and how a figure becomes a PNG.

No pyplot and no global state: the style holds only while a figure is built or rendered.
"""

from __future__ import annotations

import io
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

from toolkit.errors import one_line
from toolkit.runs.record import RunRecord
from toolkit.views.frames import clean_text, provenance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BUCKET_LABEL = "bucket (num_tokens, in tokens; one step per bucket, not to scale)"

# Okabe-Ito: told apart under the common kinds of colour blindness. No series relies on it alone.
BLACK, GREY, PALE = "#000000", "#595959", "#BBBBBB"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

WIDTH_IN = 10.0
FONT_PT = 12
SMALL_PT = 11
_SUBTITLE_CHARACTERS = 104
_WORDS_CHARACTERS = 92
_POINTS_PER_DIGIT = 8.4
_LARGEST_DRAWN = 1e15
_STYLE: dict[str, Any] = {
    "font.size": FONT_PT,
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so that a figure looks the same everywhere
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": FONT_PT,
    "hatch.linewidth": 0.7,
    "legend.fontsize": SMALL_PT,
    "legend.frameon": False,
    "text.parse_math": False,  # a model may be called $HOME/m
}


_STYLE_LOCK = threading.RLock()


@contextmanager
def sheet_style() -> Iterator[None]:
    """Our style on top of Matplotlib's own, whatever style the user has set; theirs comes back afterwards.

    One thread at a time: the style is global to Matplotlib, and two that overlap would each restore the other's.
    """
    import matplotlib as mpl
    import matplotlib.style

    with _STYLE_LOCK:
        before = mpl.rcParams.copy()
        matplotlib.style.use(["default", _STYLE])
        ours = mpl.rcParams.copy()
        try:
            yield
        finally:
            # Only what is still ours: a person's cell may have set something meanwhile, on another thread. Not the
            # backend: reading it chooses one.
            keys = [key for key in before if key != "backend"]
            mpl.rcParams.update({key: before[key] for key in keys if mpl.rcParams[key] == ours[key] != before[key]})


def new_sheet(
    title: str,
    subtitle: str,
    height: float,
    *,
    rows: Sequence[int] = (1,),
    columns: Sequence[int] = (1,),
    subtitle_characters: int = _SUBTITLE_CHARACTERS,
) -> tuple[Figure, list[Axes]]:
    """A figure of `height` inches with panels of the relative sizes given, a title and a subtitle."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
    figure = _figure_class()(figsize=(WIDTH_IN, height), dpi=100, layout=engine)
    figure.suptitle(title, x=0.012, ha="left", fontsize=FONT_PT + 3, fontweight="bold")
    panels = figure.subplots(
        len(rows),
        len(columns),
        sharex="col" if len(rows) > 1 else False,
        gridspec_kw={"height_ratios": list(rows), "width_ratios": list(columns)},
        squeeze=False,
    )
    axes: list[Axes] = list(panels.flat)
    axes[0].set_title(_subtitle_lines(subtitle, subtitle_characters), loc="left", fontsize=SMALL_PT, color=GREY, pad=10)
    for panel in axes:
        panel.tick_params(labelsize=FONT_PT)
    return figure, axes


def _subtitle_lines(subtitle: str, width: int) -> str:
    """Broken where a part ends (`a | b`) rather than inside one, unless the part itself is too long."""
    lines: list[str] = []
    for block in subtitle.split("\n"):  # names of a record are one line each, so a break is meant
        lines.append("")
        for part in one_line(block).split(" | "):
            longer = f"{lines[-1]} | {part}" if lines[-1] else part
            if len(longer) <= width:
                lines[-1] = longer
            else:
                lines += textwrap.wrap(part, width)
    return "\n".join(line for line in lines if line)


def words_only(title: str, record: RunRecord | None, why: str = "", subtitle: str = "") -> Figure:
    """A figure for a run that has nothing to plot: it says so, and why, instead of showing empty axes."""
    if record is not None and not why:
        why = f"No bucket was captured ({record.outcome}): {record.reason}"
    elif record is not None and record.outcome != "captured":
        why += f" Outcome {record.outcome}: {record.reason}"
    if record is not None:
        subtitle = provenance(record)
    with sheet_style():
        figure, (axes,) = new_sheet(title, subtitle, 3.0)
        axes.set_axis_off()
        text = textwrap.fill(one_line(clean_text(why)), _WORDS_CHARACTERS, max_lines=6, placeholder=" ...")
        axes.text(0, 0.5, text, transform=axes.transAxes, va="center", fontsize=FONT_PT + 1)
    describe(figure, f"{title}, {in_one(subtitle)}. {why}")
    return figure


def in_one(subtitle: str) -> str:
    """A subtitle of several lines as part of a sentence."""
    return subtitle.replace("\n", "; ")


def describe(figure: Figure, words: str) -> None:
    """Give a figure the words that `alt_text` returns."""
    figure.set_label(one_line(clean_text(words)))


def alt_text(figure: Figure) -> str:
    """What a figure shows, in words, for those who cannot see it."""
    return str(figure.get_label())


def figure_png(figure: Figure, dpi: int = 144) -> bytes:
    """The figure as PNG bytes, with a palette: a third of the size, and flat colours show no difference."""
    from PIL import Image

    whole, small = io.BytesIO(), io.BytesIO()
    with sheet_style():
        figure.savefig(whole, format="png", dpi=dpi)
    Image.open(whole).convert("RGB").quantize(64).save(small, format="png")
    return small.getvalue()


@cache
def _figure_class() -> type[Figure]:
    from matplotlib.figure import Figure

    class LabFigure(Figure):
        """Jupyter shows it even where no `%matplotlib inline` was run; its repr is its title."""

        def _repr_png_(self) -> bytes:
            return figure_png(self)

        def __repr__(self) -> str:
            return f"<Figure: {self.get_suptitle()}>"

    return LabFigure


# --- the bucket axis --------------------------------------------------------------------------------------


def bucket_ladder(record: RunRecord) -> list[int]:
    """Every bucket that has a place on the axis: those captured and the one that did not fit."""
    failed = set() if record.oom_bucket is None else {record.oom_bucket}
    return sorted({bucket.num_tokens for bucket in record.buckets} | failed)


def labelled_positions(ladder: Sequence[int], always: int | None = None) -> list[int]:
    """Positions whose label fits beside those chosen before: the ends, powers of two, then round numbers."""
    points_per_bucket = (WIDTH_IN - 1.4) * 72 / len(ladder)
    ends = (0, len(ladder) - 1)

    def is_power(tokens: int) -> bool:
        return tokens & (tokens - 1) == 0

    def rank(position: int) -> tuple[bool, bool, bool, int]:
        tokens = ladder[position]
        lowest_bit = tokens & -tokens  # the rounder a number, the larger
        return tokens != always, position not in ends, not is_power(tokens), -lowest_bit

    def half_width(position: int) -> float:
        # A number that is not a power of two only fills a wide gap, or it would be read as one of them.
        room = 0.8 if is_power(ladder[position]) or len(ladder) <= 24 else 3.5
        return (len(str(ladder[position])) + room) * _POINTS_PER_DIGIT / 2

    chosen: list[int] = []
    for position in sorted(range(len(ladder)), key=rank):
        gaps = (abs(position - other) * points_per_bucket - half_width(other) for other in chosen)
        if all(gap >= half_width(position) for gap in gaps):
            chosen.append(position)
    return sorted(chosen)


def finish_buckets(
    figure: Figure, panels: Sequence[Axes], ladder: Sequence[int], oom_bucket: int | None = None
) -> None:
    """Ticks, grid, the mark of the bucket that did not fit, and one legend outside the data."""
    chosen = labelled_positions(ladder, oom_bucket)
    for axes in panels:
        axes.set_xlim(-0.8, len(ladder) - 0.2)
        axes.set_xticks(chosen, [str(ladder[position]) for position in chosen])
        axes.set_xticks(range(len(ladder)), minor=True)
        axes.grid(axis="y", color="#D0D0D0", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    if oom_bucket in ladder:
        mark_oom(panels, ladder.index(oom_bucket), len(ladder), f"out of memory at {oom_bucket} tokens")
    panels[-1].set_xlabel(BUCKET_LABEL)
    figure.legend(loc="outside lower center", ncols=2, handlelength=3)
    # Kept with the figure, for whoever wants to say more about a bucket where it stands.
    cast(Any, figure).bucket_panels = (tuple(ladder), tuple(panels))


def bucket_panels(figure: Figure) -> tuple[tuple[int, ...], tuple[Axes, ...]]:
    """The ladder of a figure with the bucket axis, and its panels; bucket i stands at x = i. Else nothing."""
    found: tuple[tuple[int, ...], tuple[Axes, ...]] = getattr(figure, "bucket_panels", ((), ()))
    return found


def mark_oom(panels: Sequence[Axes], position: int, count: int, words: str, line: int = 0) -> None:
    """Hatch the bucket at `position` of `count` in every panel; `words` say why, a line lower for each `line`."""
    for axes in panels:
        axes.axvspan(position - 0.5, position + 0.5, fc="none", ec=VERMILLION, hatch="xx", zorder=0)
    # Room above the data, so that the words hide nothing.
    top = panels[0]
    bottom, highest = top.get_ylim()
    top.set_ylim(bottom, highest + 0.2 * (highest - bottom))
    x, side = words_beside(position, count)
    top.text(
        x,
        0.98 - 0.11 * line,
        words,
        transform=top.get_xaxis_transform(),
        ha=side,
        va="top",
        color=VERMILLION,
        fontweight="bold",
        bbox=paper(),
    )


def words_beside(position: int, count: int) -> tuple[float, Literal["left", "right", "center"]]:
    """Where words about the bucket at `position` of `count` start, and their side: towards the middle."""
    if count == 1:
        return position, "center"
    return (position + 0.7, "left") if position < count / 2 else (position - 0.7, "right")


# --- small things -----------------------------------------------------------------------------------------


def drawable(*values: float | None) -> bool:
    """Whether every value is a number that an axis can hold: a record may say 1e308, and Matplotlib overflows."""
    return all(value is not None and abs(value) <= _LARGEST_DRAWN for value in values)


def numbers(values: Sequence[float | None]) -> list[float]:
    """Missing, and what no axis can hold, as NaN, which Matplotlib leaves out: a gap, never a 0."""
    return [value if value is not None and drawable(value) else float("nan") for value in values]


def highest(values: Sequence[float]) -> float:
    """The largest number among `values`, at least 0; NaN is left out."""
    return max([0.0, *(value for value in values if value == value)])


def paper() -> dict[str, Any]:
    """White behind words, so that no hatch or line runs through them."""
    return {"facecolor": "white", "edgecolor": "none", "pad": 1.5}


def marker_size(count: int) -> float:
    """Points; smaller where there are many buckets."""
    return 7.0 if count <= 24 else 4.5


def beside(axes: Axes, x: float, y: float, words: str) -> None:
    """Words that stand six points right of where a bar ends."""
    axes.annotate(words, (x, y), (6, 0), textcoords="offset points", va="center", bbox=paper())
