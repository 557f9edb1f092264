"""`python -m toolkit.forecast.calibrate`: fit the sglang forecast on `data/field` and write `data/calibration.json`.

Fitted are the slope of flat bucket traces (what the driver keeps) and one constant (what is loaded on first use); all
else is derived. With `--check` nothing is written; it fails if the stored file is not what a fresh fit gives.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from toolkit.catalogue import get_model
from toolkit.forecast.calibration import (
    CALIBRATION_FILE,
    Calibration,
    Coefficient,
    Coefficients,
    FeedForward,
    FieldRow,
    LeftOut,
)
from toolkit.forecast.sglang_body import BodyShape, body_shape
from toolkit.forecast.sglang_engine import forecast_body, kind_of
from toolkit.forecast.terms import Forecast
from toolkit.ladder import generate_prefill_buckets
from toolkit.resources import data_dir, write_whole
from toolkit.settings import Backend

MIB_PER_GIB = 1024
_DIGITS = 4
_KINDS: tuple[FeedForward, ...] = ("dense", "moe")
_TRACED_ROW, _TRACE = "mystous_t1_p", "breakable_qwen3-30b-a3b-fp8_h100.csv"
"""One run, of which both the total and the bucket trace are public."""
METHOD = (
    "Total = graph pool + retained tensors (both derived by replaying SGLang's fused body through the allocator model) "
    "+ driver memory per segment and bucket + one first-use constant. Driver: least squares over the flat parts of "
    "bucket traces, by kind of layers. Constant: median over the rows of measured minus all other terms; not charged "
    "where decode graphs were captured first, which load the same kernels. Its range is what the rows of that kind "
    "needed, each against a fit without it. Leave-one-out refits the constant alone: the traces stay, and one of them "
    "is of the same run as one row. The structure was chosen with these few rows in view; take the errors as a lower "
    "bound of what other models will show. Negative errors are underestimates."
)

_Row = dict[str, str]


def _read(name: str) -> list[_Row]:
    with (data_dir() / "field" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


# --- driver memory, from slopes -----------------------------------------------------------------------------


def _slope_mib(trace: _Row) -> float:
    """MiB of free memory that go with each bucket of the flat part, by least squares."""
    points = [
        (float(row["step"]), float(row["avail_mem_gib"]) * MIB_PER_GIB)
        for row in _read(trace["file"])
        if int(row["num_tokens"]) <= int(trace["flat_from"])
    ]
    steps, free = zip(*points, strict=True)
    return -statistics.linear_regression(steps, free).slope


def _driver(traces: Sequence[_Row]) -> tuple[dict[FeedForward, Coefficient], Coefficient]:
    per_segment = {}
    for kind in _KINDS:
        chosen = [trace for trace in traces if trace["kind"] == kind and trace["backend"] != "full"]
        slopes = [_slope_mib(trace) / (int(trace["layers"]) + 1) for trace in chosen]
        per_segment[kind] = _coefficient(slopes, "slope of " + ", ".join(trace["model"] for trace in chosen))
    full = [_slope_mib(trace) / int(trace["layers"]) for trace in traces if trace["backend"] == "full"]
    return per_segment, _coefficient(full, "slope of decode graphs of Qwen3-30B-A3B-FP8; no prefill trace is public")


def _coefficient(values: Iterable[float], source: str) -> Coefficient:
    ordered = sorted(values)
    mid = round(statistics.mean(ordered), _DIGITS)
    return Coefficient(mid=mid, low=round(ordered[0], _DIGITS), high=round(ordered[-1], _DIGITS), source=source)


# --- the rest -----------------------------------------------------------------------------------------------


def _shape(row: _Row) -> BodyShape:
    config, weights = get_model(row["catalogue_id"]).config, row["weights"]
    compiled = row["backend"] == Backend.TC_PIECEWISE
    return body_shape(config, int(row["tp"]), weights=weights, compiled=compiled)  # type: ignore[arg-type]


def _forecast(row: _Row, fitted: Coefficients) -> Forecast:
    ladder = generate_prefill_buckets(int(row["max_bucket_tokens"]))
    if len(ladder) != int(row["n_buckets"]):
        raise ValueError(f"data/field/captures.csv: {row['id']} has not the ladder of its ceiling")
    return forecast_body(_shape(row), tuple(ladder[::-1]), Backend(row["backend"]), fitted)


def _measured_mib(row: _Row) -> float:
    return float(row["mem_usage_gib"]) * MIB_PER_GIB


def _seconds(rows: Sequence[_Row]) -> tuple[Coefficient, Coefficient]:
    """(first bucket, each later one) of breakable captures: totals split where a trace has the first bucket's end."""
    first = float(_read(_TRACE)[1]["elapsed_s"])
    each = [
        (float(row["elapsed_s"]) - first) / (int(row["n_buckets"]) - 1) for row in rows if row["backend"] == "breakable"
    ]
    note = f"{len(each)} breakable captures on H100 and H200 took {min(each):.2f} to {max(each):.2f} s a bucket"
    later = _coefficient(each, f"{note}; where kernels must be compiled first, minutes (a GB10's first bucket: 115 s)")
    return _coefficient([first], "trace of Qwen3-30B-A3B-FP8 on H100, read in whole seconds"), later


def _warm_up_factor(fitted: Coefficients, row: _Row) -> Coefficient:
    """What came back at the end of the traced capture, over what the body leaves in the cache."""
    begin, lowest = (float(_read(_TRACE)[place]["avail_mem_gib"]) for place in (0, -1))
    returned = (begin - lowest - float(row["mem_usage_gib"])) * MIB_PER_GIB
    bare = _forecast(row, fitted)
    derived = bare.buckets[-1].cumulative.mid - bare.total.mid
    factor = round(returned / derived, _DIGITS)
    source = "Qwen3-30B-A3B-FP8 on H100 gave 1.00 GiB back; its attention's own temporaries are not derived"
    return Coefficient(mid=factor, low=min(1.0, factor), high=max(1.0, factor), source=source)


def fit() -> Calibration:
    """The calibration from `data/field`. Same data, same figures."""
    table = _read("captures.csv")
    rows = [row for row in table if row["use"] == "fit"]
    per_segment, per_full_layer = _driver(_read("traces.csv"))
    none = Coefficient(mid=0, low=0, high=0, source="")
    one = none.model_copy(update={"mid": 1.0, "low": 1.0, "high": 1.0})
    first, later = _seconds(rows)
    fitted = Coefficients(
        driver_mib_per_segment=per_segment, driver_mib_per_full_layer=per_full_layer,
        first_use_mib={kind: none for kind in _KINDS}, warm_up_factor=one, first_bucket_s=first, later_bucket_s=later,
    )  # fmt: skip
    factor = _warm_up_factor(fitted, next(row for row in rows if row["id"] == _TRACED_ROW))
    bare = [_forecast(row, fitted).total.mid for row in rows]
    first_use, compared = _first_use(rows, bare)
    fitted = fitted.model_copy(update={"warm_up_factor": factor, "first_use_mib": first_use})
    return Calibration(
        method=METHOD,
        coefficients=fitted,
        rows=tuple(compared),
        median_abs_error_pct=_median_abs(row.error_pct for row in compared),
        median_abs_loo_error_pct=_median_abs(row.loo_error_pct for row in compared),
        left_out=tuple(_left_out(row) for row in table if row["use"] != "fit"),
    )


def _first_use(rows: list[_Row], bare: list[float]) -> tuple[dict[FeedForward, Coefficient], list[FieldRow]]:
    """The constant with its range by kind of layers, and every row against it."""
    charged = [row["decode_first"] == "no" for row in rows]
    implied = [_measured_mib(row) - mib for row, mib in zip(rows, bare, strict=True)]

    def median_without(left_out: int | None) -> float:
        used = [mib for place, mib in enumerate(implied) if charged[place] and place != left_out]
        return statistics.median(used)

    constant = median_without(None)
    compared, misses = [], {kind: [0.0] for kind in _KINDS}
    for place, row in enumerate(rows):
        loo = median_without(place) if charged[place] else 0.0
        misses[kind_of(_shape(row))].append(_measured_mib(row) - bare[place] - loo)
        compared.append(_field_row(row, bare[place] + constant * charged[place], bare[place] + loo))
    source = f"median of {sum(charged)} captures; range: what captures of such models needed beyond a fit without them"
    first_use = {
        kind: Coefficient(
            mid=round(constant, _DIGITS),
            low=round(max(0.0, constant + min(missed)), _DIGITS),
            high=round(constant + max(missed), _DIGITS),
            source=f"{source} ({len(missed) - 1} {kind} rows)",
        )
        for kind, missed in misses.items()
    }
    return first_use, compared


def _field_row(row: _Row, forecast_mib: float, loo_mib: float) -> FieldRow:
    measured = _measured_mib(row)
    return FieldRow(
        id=row["id"],
        model=row["model"],
        backend=row["backend"],
        n_buckets=int(row["n_buckets"]),
        tp=int(row["tp"]),
        measured_gib=float(row["mem_usage_gib"]),
        forecast_gib=round(forecast_mib / MIB_PER_GIB, _DIGITS),
        residual_gib=round((measured - forecast_mib) / MIB_PER_GIB, _DIGITS),
        error_pct=round((forecast_mib / measured - 1) * 100, 1),
        loo_forecast_gib=round(loo_mib / MIB_PER_GIB, _DIGITS),
        loo_error_pct=round((loo_mib / measured - 1) * 100, 1),
        source_url=row["source_url"],
    )


def _left_out(row: _Row) -> LeftOut:
    usage = float(row["mem_usage_gib"]) if row["mem_usage_gib"] else None
    return LeftOut(id=row["id"], model=row["model"], measured_gib=usage, reason=row["reason"])


def _median_abs(errors: Iterable[float]) -> float:
    return round(statistics.median(abs(error) for error in errors), 1)


# --- the command --------------------------------------------------------------------------------------------


def table(calibration: Calibration) -> str:
    """What the command prints: figures, rows with signed errors, what was left out."""
    fitted = calibration.coefficients
    named = [(f"driver, MiB per segment ({kind})", one) for kind, one in fitted.driver_mib_per_segment.items()]
    named += [("driver, MiB per layer of a full graph", fitted.driver_mib_per_full_layer)]
    named += [(f"first use, MiB ({kind})", one) for kind, one in fitted.first_use_mib.items()]
    named += [("warm-up cache, times the derived", fitted.warm_up_factor)]
    named += [("first bucket, s", fitted.first_bucket_s), ("later bucket, s", fitted.later_bucket_s)]
    lines = [f"{'figure':40}{'mid':>10}{'low':>10}{'high':>10}"]
    lines += [f"{name:40}{one.mid:10.3f}{one.low:10.3f}{one.high:10.3f}" for name, one in named]
    lines += ["", f"{'row':28}{'backend':>14}{'buckets':>9}{'measured':>10}{'forecast':>10}{'error':>9}{'alone':>10}"]
    lines += [
        f"{row.model:28}{row.backend:>14}{row.n_buckets:9}{row.measured_gib:10.2f}{row.forecast_gib:10.2f}"
        f"{row.error_pct:+8.1f}%{row.loo_error_pct:+9.1f}%"
        for row in calibration.rows
    ]
    lines += [
        f"median absolute error: fit {calibration.median_abs_error_pct:.1f} %, each row left out of its fit (alone) "
        f"{calibration.median_abs_loo_error_pct:.1f} %. Figures in GiB; negative is an underestimate.",
        "",
        "left out:",
        *[f"  {one.model}: {one.reason}" for one in calibration.left_out],
    ]
    return "\n".join(lines)


def file_content(calibration: Calibration) -> bytes:
    """What `data/calibration.json` holds."""
    return (calibration.model_dump_json(indent=2) + "\n").encode()


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code: 1 when `--check` finds another fit than the stored one."""
    if set(arguments) - {"--check"}:
        print("usage: python -m toolkit.forecast.calibrate [--check]", file=sys.stderr)
        return 2
    calibration, path = fit(), Path(data_dir() / CALIBRATION_FILE)
    print(table(calibration))
    if "--check" not in arguments:
        write_whole(path, file_content(calibration))
        return 0
    if path.is_file() and path.read_bytes() == file_content(calibration):
        return 0
    print(f"data/{CALIBRATION_FILE} is not what data/field gives now: run without --check", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
