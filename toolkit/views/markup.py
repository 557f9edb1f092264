"""Pieces of HTML for reports and widgets. Everything that goes into them is escaped here."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import one_line
from toolkit.views import frames
from toolkit.views.frames import NA

if TYPE_CHECKING:
    import pandas as pd

_LOG_CHARACTERS = 20_000


def safe(text: object) -> str:
    """Text made harmless: escaped, and without characters that are not to be seen."""
    return html.escape(frames.clean_text(text))


def table(frame: pd.DataFrame, caption: str) -> str:
    """A table of text whose index holds the row headings."""
    if frame.empty:
        return f'<p class="source">{safe(caption)}: none.</p>'
    columns = [frame.index.name or frame.columns.name or "", *frame.columns]
    head = "".join(f'<th scope="col">{safe(frames.heading(str(column)))}</th>' for column in columns)
    rows = (
        f'<tr><th scope="row">{safe(label)}</th>' + "".join(f"<td>{safe(cell)}</td>" for cell in cells) + "</tr>"
        for label, *cells in frame.itertuples(name=None)
    )
    return (
        # Focusable, so that a wide table can be scrolled with the keyboard.
        f'<div class="wide" tabindex="0" role="region" aria-label="{safe(caption)}"><table>'
        f"<caption>{safe(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def pairs(caption: str, values: Mapping[str, Any]) -> str:
    """A table of names and their values, one a row; what is not text is shown as JSON, missing as n/a."""
    rows = "\n".join(
        f'<tr><th scope="row">{safe(key)}</th><td>{safe(_value(value))}</td></tr>' for key, value in values.items()
    )
    return f'<table class="pairs"><caption>{safe(caption)}</caption>\n<tbody>\n{rows}\n</tbody></table>'


def _value(value: object) -> str:
    if value is None:
        return NA
    return value if isinstance(value, str) else json.dumps(value, default=str)


def bullets(caption: str, lines: Sequence[str]) -> str:
    """A heading and a list of lines; nothing when there is no line."""
    items = "\n".join(f"<li>{safe(one_line(line))}</li>" for line in lines)
    return f"<h3>{safe(caption)}</h3>\n<ul>\n{items}\n</ul>" if lines else ""


def log(caption: str, lines: object) -> str:
    """The end of a log: its last lines say most when something went wrong."""
    if not isinstance(lines, list) or not lines:
        return ""
    text = "\n".join(str(line) for line in lines)
    if len(text) > _LOG_CHARACTERS:
        text = f"... ({len(text) - _LOG_CHARACTERS} characters left out)\n{text[-_LOG_CHARACTERS:]}"
    return f'<h3>{safe(caption)}</h3>\n<pre tabindex="0">{safe(text)}</pre>'
