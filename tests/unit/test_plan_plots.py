"""Figures and tables of a plan: what they say, in words, and that they say they are a forecast."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

import toolkit
from toolkit.views.plan_plots import plan_provenance, plot_plan_ledger, plot_plan_memory
from toolkit.views.plots import alt_text, figure_png


@pytest.fixture(scope="module")
def kimi() -> Any:
    return toolkit.plan(model="kimi-k2", tp=8, mem_fraction=0.97, sglang_version="0.5.16", max_tokens=64)


def _legend(figure: Any) -> str:
    return " ".join(text.get_text().replace("\n", " ") for legend in figure.legends for text in legend.get_texts())


def test_the_ledger_names_every_owner_with_its_figure(kimi: Any) -> None:
    figure = plot_plan_ledger(kimi)
    for words in ("weights: 71.83 GiB", "KV pool", "prefill graph", "decode graph reserve", "total: 79.19 GiB"):
        assert words in _legend(figure)
    assert "forecast (engine sglang), nothing was captured" in alt_text(figure)
    assert figure_png(figure)[:4] == b"\x89PNG"


def test_memory_with_the_gate_and_with_what_others_measured(kimi: Any) -> None:
    row = {"gpu": "H200", "backend": "tc_piecewise", "n_buckets": 42.0, "source_url": "https://example.org"}
    field = pd.DataFrame(
        [
            row | {"id": "pr30889", "catalogue_id": "kimi-k2.7-code", "mem_usage_gib": 1.33},
            row | {"id": "unknown", "catalogue_id": "kimi-k2.7-code", "mem_usage_gib": float("nan")},
            row | {"id": "other", "catalogue_id": "qwen3-8b", "mem_usage_gib": 1.74},
        ]
    )
    figure = plot_plan_memory(kimi, field)
    legend = _legend(figure)
    assert "measured: 1.33 GiB, H200, tc_piecewise, 42 buckets (pr30889)" in legend
    assert "unknown" not in legend and "other" not in legend
    assert "old gate 4.00 GiB" in legend and "range of cumulative" in legend
    assert "1.33 GiB, H200" in alt_text(figure)


def test_without_a_graph_there_is_nothing_to_draw_but_the_reason() -> None:
    plan = toolkit.plan(backend="disabled")
    assert "disabled by hand" in alt_text(plot_plan_memory(plan))
    assert "free" in alt_text(plot_plan_ledger(plan))


def test_the_bucket_that_would_not_fit_is_marked() -> None:
    plan = toolkit.plan(free_memory_gib=0.1, max_tokens=64)
    assert plan.policies["ungated"].outcome == "oom"
    assert "out of memory at bucket 64" in alt_text(plot_plan_memory(plan))


def test_a_subtitle_says_whose_figures_they_are(kimi: Any) -> None:
    assert "rules of SGLang 0.5.16" in plan_provenance(kimi)
