"""A figure as one inline `<svg>` for a page or a widget, with words for each bucket under the pointer.

Text is drawn as paths rather than left as text: a browser without DejaVu Sans would set another font of another
width, and labels that were laid out not to touch would touch. It costs about 60 kB; the words are in `aria-label`.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from toolkit.views.markup import safe
from toolkit.views.sheet import alt_text, bucket_panels, sheet_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS, _CSS_PIXELS = 72, 96  # per inch
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_OWN_STYLE = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)
_REFERENCE = re.compile(r'(xlink:href="#|url\(#)([^")]+)')
_ID = re.compile(r' id="([^"]*)"')


def figure_svg(figure: Figure, tips: Mapping[int, str] | None = None) -> str:
    """The figure as one `<svg>` element that fills the width of its parent, up to its size on paper.

    The same record gives the same text, as long as its figure is drawn for the first time: Matplotlib lays one out
    again from where it stands. Ids begin with a hash of the content, so that figures on one page do not use each
    other's definitions, and nothing outside the element is styled.

    Args:
        figure: any figure of `toolkit.views`.
        tips: words for a bucket (its token count). A figure with the bucket axis gets one invisible
            `<rect class="bucket" data-num-tokens="N">` per bucket and panel, which shows them on hover and is
            shaded then. Buckets that have no place on the axis are left out, and so are other figures.
    """
    body = _drawn(figure)
    rectangles = "".join(_rectangles(figure, tips or {}))
    name = "fig-" + hashlib.sha256((body + rectangles).encode()).hexdigest()[:10]
    used = {reference for _, reference in _REFERENCE.findall(body)}
    body = _ID.sub(lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", body)
    body = _REFERENCE.sub(rf"\g<1>{name}-\g<2>", body)
    hover = f"<style>#{name} .bucket:hover{{fill:#000;fill-opacity:.12}}</style>" if rectangles else ""
    return f"{_opening(figure, name)}{hover}{body}{rectangles}</svg>"


def _opening(figure: Figure, name: str) -> str:
    width, height = figure.get_size_inches()
    # What Matplotlib writes as a style of `*` would reach every other drawing of the page; here it is inherited.
    style = f"width:100%;max-width:{width * _CSS_PIXELS:.0f}px;height:auto;stroke-linejoin:round;stroke-linecap:butt"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width * _POINTS:g} {height * _POINTS:g}" id="{name}" role="img" '
        # All the words as `<title>` would cover the figure with a large tooltip; its heading does not.
        f'aria-label="{safe(alt_text(figure))}" style="{style}"><title>{safe(figure.get_suptitle())}</title>'
    )


def _drawn(figure: Figure) -> str:
    """What Matplotlib draws inside its `<svg>`: without its style sheet, comments and line breaks."""
    from matplotlib import rc_context

    file = io.StringIO()
    with sheet_style(), rc_context({"svg.fonttype": "path", "svg.hashsalt": "prefill-lab"}):
        figure.savefig(file, format="svg", metadata=_NO_METADATA)
    whole = file.getvalue()
    inside = whole[whole.index(">", whole.index("<svg")) + 1 : whole.rindex("</svg>")]
    # Comments repeat the text that is drawn. No text is outside them, so white space separates nothing but numbers.
    inside = re.sub(r"<!--.*?-->", "", _OWN_STYLE.sub("", inside, count=1), flags=re.DOTALL)
    return re.sub(r"\s*([<>])\s*", r"\1", " ".join(inside.split()))


def _rectangles(figure: Figure, tips: Mapping[int, str]) -> Iterator[str]:
    """One invisible rectangle for each panel and bucket with words; bucket i of the ladder stands at x = i."""
    width, height = figure.get_size_inches() * _POINTS
    ladder, panels = bucket_panels(figure)
    for axes in panels:
        # Where the panel stands is known only after drawing: the layout is part of that.
        box = axes.get_position()
        first, last = axes.get_xlim()
        step = box.width * width / (last - first)
        for position, tokens in enumerate(ladder):
            if tokens in tips:
                left = box.x0 * width + (position - 0.5 - first) * step
                yield (
                    f'<rect class="bucket" data-num-tokens="{tokens}" x="{left:.2f}" y="{(1 - box.y1) * height:.2f}" '
                    f'width="{step:.2f}" height="{box.height * height:.2f}" fill="#fff" fill-opacity="0">'
                    f"<title>{safe(tips[tokens])}</title></rect>"
                )
