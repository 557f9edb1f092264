"""Records: they survive JSON, and what is damaged or newer is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_records import made_up_record, oom_record, skipped_record

from toolkit.errors import RecordError
from toolkit.runs.provenance import scrub, scrub_record, software_versions
from toolkit.runs.record import OUTCOME_EXIT_CODES, SCHEMA_VERSION, BucketFigures, RunRecord

figure = st.none() | st.floats(0, 1e6)
seconds = st.floats(0, 1e4)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
buckets = st.builds(
    BucketFigures,
    num_tokens=st.integers(1, 1 << 20),
    elapsed_s=seconds,
    warmup_s=seconds,
    capture_s=seconds,
    added_mib=figure,
    cumulative_mib=figure,
    segments=st.integers(0, 999),
    graph_nodes=st.none() | st.integers(0, 99999),
)
records = st.builds(
    RunRecord,
    id=text,
    created=text,
    settings=st.dictionaries(text, text | st.integers() | st.none(), max_size=3),
    device=st.dictionaries(text, text, max_size=2),
    software=st.dictionaries(text, text, max_size=2),
    outcome=st.sampled_from(sorted(OUTCOME_EXIT_CODES)),
    runner=st.none() | text,
    reason=text,
    free_before_gib=figure,
    buckets=st.lists(buckets, max_size=4),
    log=st.lists(text, max_size=3),
    a_later_field=text,
)


@given(records)
def test_a_record_survives_json(record: RunRecord) -> None:
    assert RunRecord.from_json(record.to_json()) == record


@given(st.recursive(st.none() | st.integers() | text, lambda inner: st.dictionaries(text, inner, max_size=3)))
def test_other_json_is_refused_in_one_line(value: Any) -> None:
    with pytest.raises(RecordError) as caught:
        RunRecord.from_json(json.dumps(value))
    assert len(str(caught.value).splitlines()) == 1


@given(st.integers(0, 10_000))
def test_half_a_record_is_refused(length: int) -> None:
    whole = made_up_record().to_json()
    with pytest.raises(RecordError):
        RunRecord.from_json(whole[: min(length, len(whole) - 1)])


def test_a_newer_schema_is_refused_by_its_number() -> None:
    newer = json.loads(made_up_record().to_json()) | {"schema_version": SCHEMA_VERSION + 1}
    with pytest.raises(RecordError, match=f"schema_version {SCHEMA_VERSION + 1}.*update"):
        RunRecord.from_json(json.dumps(newer))


@pytest.mark.parametrize("figure", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_a_figure_that_is_no_number_is_refused(figure: str) -> None:
    text = made_up_record().to_json().replace('"free_before_gib": 3.97', f'"free_before_gib": {figure}', 1)
    assert figure in text
    with pytest.raises(RecordError, match="free_before_gib"):
        RunRecord.from_json(text)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("buckets", "num_tokens", 0),
        ("buckets", "num_tokens", 10**30),
        ("buckets", "segments", -1),
        ("buckets", "graph_nodes", 10**30),
        ("speed", "num_tokens", 0),
        ("", "oom_bucket", 10**30),
        ("", "kv_cache_tokens", 10**30),
        ("", "capture_order", [0]),
    ],
)
def test_a_count_that_no_capture_can_have_is_refused(where: str, name: str, value: object) -> None:
    """Padding divides by the tokens of a bucket, and tables hold counts in 64 bits."""
    raw = json.loads(made_up_record().to_json())
    (raw[where][0] if where else raw)[name] = value
    with pytest.raises(RecordError, match=name) as caught:
        RunRecord.from_json(json.dumps(raw))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 300_000, '{"schema_version": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}"])
def test_json_too_deep_to_read_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(RecordError) as caught:
        RunRecord.from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("record", "code"),
    [(made_up_record(), 0), (skipped_record(), 0), (oom_record(), 1), (made_up_record(outcome="crashed"), 1)],
)
def test_the_exit_code_follows_the_outcome(record: RunRecord, code: int) -> None:
    assert record.exit_code == code


# --- what must not travel with a record ---------------------------------------------------------------------


@pytest.fixture
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user `mallory` on the machine `atlas.example.org`, so that the test is the same everywhere."""
    monkeypatch.setattr("socket.gethostname", lambda: "atlas.example.org")
    monkeypatch.setattr("getpass.getuser", lambda: "mallory")
    monkeypatch.setenv("HOME", "/home/mallory")


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("no /home/mallory/models/x.gguf here", "no ~/models/x.gguf here"),
        ('File "/opt/app/lib/run.py", line 3', 'File "<path>/run.py", line 3'),
        ("mallory@atlas.example.org: killed", "<user>@<host>: killed"),
        ("on ATLAS, by Mallory.", "on <host>, by <user>."),
        ("file:///srv/data/a.json", "<path>/a.json"),
        ("path=/srv/a/b:/srv/c/d", "path=<path>/b:<path>/d"),
        # What only looks like a path or a name stays.
        (
            "https://huggingface.co/a/b 1.78 GiB/GPU and/or 3/4",
            "https://huggingface.co/a/b 1.78 GiB/GPU and/or 3/4",
        ),
        ("the mallorys of atlases", "the mallorys of atlases"),
    ],
)
@pytest.mark.usefixtures("somebody")
def test_paths_and_names_are_taken_out(said: str, kept: str) -> None:
    assert scrub(said) == kept


@pytest.mark.usefixtures("somebody")
def test_a_record_is_scrubbed_as_a_whole_but_not_what_was_asked() -> None:
    record = made_up_record(
        settings={"model": "/home/mallory/m", "prompt": "/etc/motd/x of mallory"},
        reason="mallory has no /home/mallory/m",
        log=["on atlas"],
        stderr_tail=["/srv/x/y.py: mallory"],
    )
    clean = scrub_record(record)
    assert clean.settings["model"] == "~/m"
    assert clean.settings["prompt"] == "/etc/motd/x of mallory"
    assert (clean.reason, clean.log) == ("<user> has no ~/m", ["on <host>"])
    assert clean.model_extra == {"stderr_tail": ["<path>/y.py: <user>"]}
    assert clean.buckets == record.buckets


def test_a_name_that_is_a_word_of_the_field_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    monkeypatch.setattr("socket.gethostname", lambda: "gpu")
    assert scrub("the root of a gpu problem") == "the root of a gpu problem"


def test_versions_say_what_was_used_and_not_where() -> None:
    versions = software_versions()
    assert {"prefill-lab", "python", "torch", "transformers", "platform"} == set(versions)
    assert len(versions["platform"].split()) == 2
