"""Small pieces that every view of the Lab is made of."""

from __future__ import annotations

import ipywidgets as w

LABEL = {"description_width": "128px"}
"""The style of every labelled control: labels end on one line."""


def named(widget: w.Widget, name: str) -> w.Widget:
    """The widget, with a class by which style sheets and tests find it."""
    widget.add_class(f"plab-{name}")
    return widget


def html(name: str) -> w.HTML:
    """Room for HTML that says something, found as `named` says. A little narrower than its place, or it is cut."""
    return named(w.HTML(layout=w.Layout(width="calc(100% - 4px)")), name)
