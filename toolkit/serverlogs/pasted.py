"""A log that went through a browser's text field, with the carriage returns of its progress bars put back."""

from __future__ import annotations

from toolkit.serverlogs.bars import TITLES


def from_browser(text: str) -> str:
    """`text` with its lines as the file has them, as far as that can be told.

    A text field turns every carriage return into a line end (https://html.spec.whatwg.org/#concept-textarea-raw-value),
    and so each state of a progress bar into a line. A line that begins with the title of a bar, right after a line that
    holds the same title, was another state of that bar; so was one after an empty line, as tqdm begins with a return.
    A text that has carriage returns did not come that way and is left alone.
    """
    if "\r" in text:
        return text
    parts: list[str] = []
    before = "\n"  # nothing is empty before the first line
    for line in text.split("\n"):
        title = next((title for title in TITLES if line.startswith(title)), None)
        goes_on = title is not None and (title in before or not before)
        parts += ["\r" if goes_on else "\n", line]
        before = line
    return "".join(parts[1:])
