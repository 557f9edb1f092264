"""A ladder design as tables and sentences for a terminal or a pipe. Pure functions; every figure has its unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from toolkit.ladder_coverage import Coverage
from toolkit.ladder_design import LadderDesign
from toolkit.ladder_models import LadderLaw
from toolkit.views.frames import NA, memory_words, seconds_words
from toolkit.views.tables import count, plain

if TYPE_CHECKING:
    import pandas as pd

_ROWS: tuple[tuple[str, Callable[[Coverage], str]], ...] = (
    ("buckets", lambda one: f"{len(one.ladder)} ({one.buckets_used} used)"),
    ("hit rate (of prefills)", lambda one: f"{one.hit_rate:.2%}"),
    ("eager (of prefills)", lambda one: f"{one.eager_share:.2%}"),
    ("  over the largest bucket", lambda one: f"{one.too_long / one.prefills:.2%}" if one.ladder else NA),
    ("  bucket over the replay limit", lambda one: f"{one.too_padded / one.prefills:.2%}" if one.ladder else NA),
    ("padding (of computed tokens)", lambda one: f"{one.padded_share:.2%}"),
    ("memory of the capture", lambda one: memory_words(one.memory_gib)),
    ("time of the capture", lambda one: seconds_words(one.capture_s)),
)


def ladder_view(made: LadderDesign) -> list[RenderableType]:
    """The default ladder, the proposal and no graphs side by side; then the ladder, its flags and what to know."""
    laws = {"memory": (made.limits.memory, "GiB"), "time": (made.limits.time, "s")}
    seen = " (see the caution above)" if made.caution else ""
    lines = [
        f"ladder: {', '.join(map(str, made.ladder)) or f'no bucket: {made.empty_because}'}",
        f"flags of {made.flags_of}{seen}: {' '.join(made.server_flags()) or NA}",
        f"cost: {made.cost.source}",
        f"choice: {choice_words(made)}",
        f"held-out check: {made.held_out_words()}",
        *(f"{name}: {_taken(made, law, unit)}{law.source}" for name, (law, unit) in laws.items() if law is not None),
        *(f"note: {note}" for note in made.notes),
    ]
    return [plain(made.sentence()), _table(made), *map(plain, lines)]


def _taken(made: LadderDesign, law: LadderLaw, unit: str) -> str:
    """What each ladder takes with its range, where the law has one."""
    ladders = {"default": made.default.ladder, "proposal": made.ladder}
    if law.bounds is None:
        return ""
    return "".join(f"{name} {law.words(ladder, unit)}; " for name, ladder in ladders.items() if ladder)


def choice_words(made: LadderDesign) -> str:
    """How the ladder was chosen, and from what."""
    limits = made.limits
    asked = [
        f"at most {limits.max_buckets} buckets" if limits.max_buckets is not None else "",
        f"{limits.memory_gib:g} GiB" if limits.memory_gib is not None else "",
        f"{limits.time_s:g} s" if limits.time_s is not None else "",
        f"the buckets {', '.join(map(str, made.kept))} kept" if made.kept else "",
    ]
    best = "no cheaper ladder exists" if made.exact else "cheapest found; sizes were thinned or a fit was checked"
    rule = f"a bucket over {made.replay_limit} x the tokens runs eager" if made.replay_limit else "no replay limit"
    return "; ".join((f"within {', '.join(filter(None, asked)) or 'no limit'}", best, rule))


def coverage_table(made: Mapping[str, Coverage]) -> pd.DataFrame:
    """Coverages by name as text, one row each, with the same figures and words as `ladder_view`."""
    import pandas as pd

    rows = []
    for name, one in made.items():
        row = {"ladder": name} | {label.strip(): words(one) for label, words in _ROWS}
        rows.append(row | {f"mean cost ({one.unit})": _cost(one)})
    return pd.DataFrame(rows).set_index("ladder")


def _cost(one: Coverage) -> str:
    return f"{one.mean_cost:,.1f}" if one.mean_cost >= 100 else f"{one.mean_cost:,.3f}"


def _table(made: LadderDesign) -> Table:
    table = Table(
        title=plain(f"{count(made.proposal.prefills)} prefills from {made.traffic}"),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("")
    for name in made.coverages:
        table.add_column(name, justify="right", no_wrap=True)
    for label, words in _ROWS:
        table.add_row(label, *(words(one) for one in made.coverages.values()))
    costs = map(_cost, made.coverages.values())
    table.add_row(f"mean cost of a prefill ({made.cost.unit})", *costs)
    gains = (f"{made.default_gain:.1%}", f"{made.proposal_gain:.1%}", NA)
    table.add_row("expected gain over eager", *gains)
    return table
