"""A log that went through a browser's text field, which makes a line end of every carriage return."""

from __future__ import annotations

from toolkit.serverlogs.bars import TITLES


def from_browser(text: str) -> str:
    r"""`text` with the states of a progress bar that lost the name of their container joined to the one that has it.

    A file holds `pod | Capturing ...\rCapturing ...`, a text field gives two lines
    (https://html.spec.whatwg.org/multipage/form-elements.html#concept-textarea-raw-value), of which the second would
    belong to nobody. Without such names nothing tells a carriage return from a line end: then the lines stay as they
    are pasted, and so do their numbers.
    """
    parts: list[str] = []
    before, named = "", False
    for line in text.split("\n"):
        title = next((title for title in TITLES if line.startswith(title)), None)
        goes_on = title is not None and title in before and (named or not before.startswith(TITLES))
        parts += ["\r" if goes_on else "\n", line]
        before, named = line, goes_on
    return "".join(parts[1:])
