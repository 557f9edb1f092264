"""Our style is ours while we draw, and what a person sets meanwhile, on another thread, stays."""

from __future__ import annotations

import matplotlib as mpl

from toolkit.views.sheet import sheet_style


def test_the_style_of_a_person_comes_back_and_what_was_set_meanwhile_stays() -> None:
    with mpl.rc_context({"font.size": 7.0, "figure.dpi": 90.0}):
        with sheet_style():
            assert mpl.rcParams["font.size"] == 12
            mpl.rcParams["figure.dpi"] = 77.0
        assert mpl.rcParams["font.size"] == 7.0
        assert mpl.rcParams["figure.dpi"] == 77.0
