"""Numbers and lists read out of a line by the words before them.

Each looks for a literal mark and then at one short pattern after it, so that a line costs time linear in its length
whatever it holds. A number counts only when what must follow it is there: a line cut inside a number gives None.
"""

from __future__ import annotations

import re

_NUMBER = r" {0,4}(-?\d[\d,]{0,24}(?:\.\d{1,12})?)"
_FOLLOWED = {
    "GB": re.compile(_NUMBER + r" ?(?:GB|GiB)\b"),
    "s": re.compile(_NUMBER + r" ?s(?:ec|econd)?s?(?![A-Za-z])"),
    # A line cut behind a thousands separator ends like one cut behind the number.
    ",": re.compile(_NUMBER + r"(?=, |[^\d.,])"),
    "": re.compile(_NUMBER + r"(?![\d.])"),
}
_SIZE = re.compile(r" {0,4}(-?\d{1,18}(?:\.\d{1,9})?) ?(bytes|KiB|MiB|GiB|TiB)\b")
_GIB_OF = {"bytes": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "TiB": 2.0**10}
_WORD = re.compile(r"([\w.:<>/+-]{1,120})")


def number(text: str, mark: str, unit: str = "GB", start: int = 0) -> float | None:
    """The number after `mark`, thousands separators removed.

    `unit` is what must follow: `GB` (or GiB), `s` (or sec, seconds), `,` (anything but an end or a digit), or
    nothing special.
    """
    at = text.find(mark, start)
    match = _FOLLOWED[unit].match(text, at + len(mark)) if at >= 0 else None
    if match is None:
        return None
    digits = match[1].replace(",", "")
    return float(digits) if len(digits) <= 40 else None


def whole(text: str, mark: str, unit: str = ",", start: int = 0) -> int | None:
    """As `number`, for counts; a fraction is none."""
    found = number(text, mark, unit, start)
    return int(found) if found is not None and found == int(found) else None


def gib(text: str, mark: str) -> float | None:
    """The size after `mark` (bytes, KiB, MiB, GiB or TiB, as PyTorch writes it) in GiB."""
    at = text.find(mark)
    match = _SIZE.match(text, at + len(mark)) if at >= 0 else None
    return float(match[1]) * _GIB_OF[match[2]] if match else None


def gib_before(text: str, mark: str) -> float | None:
    """The size that ends right before `mark`, in GiB."""
    at = text.find(mark)
    start = max(at - 40, 0)
    match = None
    for match in _SIZE.finditer(text, start, at) if at > 0 else ():  # noqa: B007 - the last one is meant
        pass
    return float(match[1]) * _GIB_OF[match[2]] if match else None


def word(text: str, mark: str) -> str | None:
    """The word after `mark`, if something follows it (a cut word is none)."""
    at = text.find(mark)
    match = _WORD.match(text, at + len(mark)) if at >= 0 else None
    if match is None or match.end() == len(text):
        return None
    return match[1].rstrip(".:")


def integers(text: str, mark: str) -> tuple[tuple[int, ...], bool] | None:
    """The list of integers after `mark` (which ends with the opening bracket), and whether it is complete.

    None when there is no list. A list that is cut or shortened gives what was there and False.
    """
    at = text.find(mark)
    if at < 0:
        return None
    at += len(mark)
    end = text.find("]", at)
    entries = text[at : end if end >= 0 else len(text)].split(",")
    if end < 0:
        entries.pop()  # it may be cut inside the number
    found = [int(entry) for entry in entries if entry.strip().isascii() and 0 < len(entry) < 20 and _is_whole(entry)]
    return tuple(found), end >= 0 and len(found) == sum(1 for entry in entries if entry.strip())


def _is_whole(entry: str) -> bool:
    return entry.strip().isdigit()
