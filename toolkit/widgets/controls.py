"""The left half of the Lab: what to pick, what it means, and the buttons. A view: it decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ipywidgets as w

from toolkit.catalogue import model_ids
from toolkit.errors import PrefillLabError
from toolkit.policies import POLICIES
from toolkit.settings import MAX_BUCKET_TOKENS, MAX_DEVICE_GIB, MIN_DEVICE_GIB, Backend
from toolkit.views import markup
from toolkit.widgets.binding import bind
from toolkit.widgets.painter import Painter
from toolkit.widgets.panels import preview_html, snippets_html, verdicts_html
from toolkit.widgets.parts import LABEL, html, named
from toolkit.widgets.state import REFUSED, LabState

POLICYLABELS = {
    "gated": "old gate (July 2026)",
    "ungated": "today (August 2026)",
    "budgeted": "budgeted",
    "capture_first": "capture first",
}
_REST_S = 0.3
"""How long controls must rest before a forecast is made: it would share the interpreter with who moves them."""


def pick_view(state: LabState) -> w.Widget:
    """Every control, with what the settings mean beside it."""
    controls = w.VBox(
        [*_model(state), *_memory(state), *_graph(state)], layout=w.Layout(flex="1 1 420px", min_width="380px")
    )
    meaning = w.VBox(
        [w.HTML("<h3>What these settings mean</h3>"), _preview(state), _snippets(state)],
        layout=w.Layout(flex="1 1 380px", min_width="340px"),
    )
    both = w.HBox([controls, meaning], layout=w.Layout(flex_flow="row wrap", width="100%"))
    return w.VBox([both, w.HTML("<h3>Who decides</h3>"), _verdicts(state)], layout=w.Layout(width="100%"))


def act_view(state: LabState) -> w.Widget:
    """Capture, Cancel and Clear, two captures under two policies; below them how far the capture is."""
    capture = _button(
        "Capture", "play", "success", "Capture with these settings, in a child process", state.capture, state
    )
    cancel = _button("Cancel", "stop", "warning", "Stop between two buckets", state.cancel, state)
    clear = _button("Clear", "eraser", "", "Show nothing; runs stay in the folder", state.clear, state)
    bar = w.IntProgress(min=0, max=1, layout=w.Layout(width="260px"))
    bar.add_class("plab-bar")
    doing, message = html("activity"), html("message")

    def show_activity(_: object = None) -> None:
        now = state.activity
        # The maximum first: a value above the old one would be cut to it.
        bar.max, bar.value = max(1, now.total), min(now.done, max(1, now.total))
        doing.value = f'<span role="status">{markup.safe(now.words)}</span>'
        cancel.disabled = not now.running
        capture.description = "Capture next" if now.running else "Capture"

    def show_message(_: object = None) -> None:
        refused = ' class="problem"' if state.message.startswith(REFUSED) else ""
        message.value = f'<div role="status"{refused}>{markup.safe(state.message)}</div>' if state.message else ""

    state.observe(show_activity, "activity")
    state.observe(show_message, "message")
    show_activity()
    show_message()
    buttons = w.HBox([capture, cancel, clear, bar], layout=w.Layout(flex_flow="row wrap", align_items="center"))
    return w.VBox([buttons, _pair(state), doing, message])


def _pair(state: LabState) -> w.Widget:
    """Two policies, and a button that runs both."""
    names = [(POLICYLABELS.get(name, name), name) for name in POLICIES]

    def dropdown(letter: str, trait: str) -> w.Widget:
        made = w.Dropdown(
            options=names,
            description=f"Policy {letter}",
            style={"description_width": "64px"},
            layout=w.Layout(width="250px"),
        )
        bind(state, trait, made)
        return named(made, f"policy-{letter.lower()}")

    tooltip = "Capture twice, under policy A and then B, with these settings; both are shown over each other"
    both = _button("Run both", "columns", "", tooltip, state.capture_pair, state)
    parts = [dropdown("A", "first_policy"), dropdown("B", "second_policy"), both]
    return w.HBox(parts, layout=w.Layout(flex_flow="row wrap", align_items="center"))


def _model(state: LabState) -> list[w.Widget]:
    model = w.Combobox(
        options=model_ids(),
        description="Model",
        placeholder="catalogue id, hub id or path",
        tooltip="A catalogue id (type to search), a hub id org/name, or the path of a folder, config or .gguf file",
        continuous_update=False,
        style=LABEL,
        layout=_wide(),
    )
    device = w.Dropdown(
        options=[(option.label, option.value) for option in state.devices],
        description="Device",
        style=LABEL,
        layout=_wide(),
    )
    capacity = w.BoundedFloatText(
        description="its memory (GiB)",
        tooltip="Declared capacity of the accounted CPU device",
        min=MIN_DEVICE_GIB,
        max=MAX_DEVICE_GIB,
        step=1,
        style=LABEL,
        layout=w.Layout(width="240px"),
    )
    bind(state, "model", model)
    bind(state, "device", device)
    bind(state, "device_memory_gib", capacity)
    _enable(state, capacity, "device", lambda: state.device == "cpu")
    return [named(model, "model"), named(device, "device"), named(capacity, "capacity")]


def _memory(state: LabState) -> list[w.Widget]:
    auto = w.Checkbox(description="auto (the server's heuristic)", indent=False, layout=w.Layout(width="230px"))
    slider = w.FloatSlider(
        description="Memory fraction",
        min=0.5,
        max=0.98,
        step=0.001,
        readout_format=".3f",
        style=LABEL,
        layout=w.Layout(width="98%", max_width="560px"),
    )
    leave = w.ToggleButtons(
        options=[("as the fraction leaves it", False), ("exactly", True)],
        description="Free memory",
        tooltips=["The KV pool takes its fraction", "The KV pool is sized so that this much is left"],
        style={**LABEL, "button_width": "auto"},
    )
    free = w.BoundedFloatText(
        description="GiB left free",
        min=0.001,
        max=MAX_DEVICE_GIB,
        step=0.01,
        style=LABEL,
        layout=w.Layout(width="240px"),
    )
    bind(state, "auto_fraction", auto)
    # Whoever moves the slider has chosen by hand.
    bind(state, "mem_fraction", slider, lambda value: state.change(auto_fraction=False, mem_fraction=value))
    bind(state, "leave_exactly", leave)
    bind(state, "free_memory_gib", free)
    for widget in (auto, slider):
        _enable(state, widget, "leave_exactly", lambda: not state.leave_exactly)
    _enable(state, free, "leave_exactly", lambda: state.leave_exactly)
    return [named(slider, "fraction"), named(auto, "auto"), named(leave, "leave"), named(free, "free")]


def _graph(state: LabState) -> list[w.Widget]:
    backend = w.ToggleButtons(
        options=[kind.value for kind in Backend],
        description="Prefill backend",
        tooltips=["Nobody chooses: the old gate applies", *["Chosen by hand: bypasses the old gate"] * 3, "No capture"],
        style={**LABEL, "button_width": "auto"},
    )
    policy = w.ToggleButtons(
        options=[(POLICYLABELS.get(name, name), name) for name in POLICIES],
        description="Policy",
        tooltips=[policy.summary for policy in POLICIES.values()],
        style={**LABEL, "button_width": "auto"},
    )
    ladder = w.ToggleButtons(
        options=[("server default", "default"), ("up to a ceiling", "ceiling"), ("own", "own")],
        description="Ladder",
        style={**LABEL, "button_width": "auto"},
    )
    ceiling = w.BoundedIntText(
        description="ceiling (tokens)",
        min=4,
        max=MAX_BUCKET_TOKENS,
        step=64,
        style=LABEL,
        layout=w.Layout(width="240px"),
    )
    own = w.Text(
        description="own (tokens)", placeholder="8,32,128", continuous_update=False, style=LABEL, layout=_wide()
    )
    reserve = _gib("Reserve (GiB)", "default", "To stay free. Default: 10 % of what is free, at most 0.5")
    later = _gib("Needed later (GiB)", "nothing", "What something needs after the capture: a workspace of long prompts")
    bind(state, "reserve", reserve)
    bind(state, "later", later)
    kept = w.HBox(
        [named(reserve, "reserve"), named(later, "later")], layout=w.Layout(flex_flow="row wrap", width="98%")
    )
    for name, widget in (("backend", backend), ("policy", policy), ("ladder", ladder)):
        bind(state, name, widget)
    bind(state, "max_tokens", ceiling)
    bind(state, "buckets", own)
    _enable(state, ceiling, "ladder", lambda: state.ladder == "ceiling")
    _enable(state, own, "ladder", lambda: state.ladder == "own")
    return [
        named(backend, "backend"),
        named(policy, "policy"),
        kept,
        named(ladder, "ladder"),
        named(ceiling, "ceiling"),
        named(own, "own"),
    ]


def _gib(description: str, placeholder: str, tooltip: str) -> w.Widget:
    """A field of text for GiB, because it may be empty."""
    return w.Text(
        description=description,
        placeholder=placeholder,
        tooltip=tooltip,
        continuous_update=False,
        style=LABEL,
        layout=w.Layout(width="240px"),
    )


def _preview(state: LabState) -> w.Widget:
    shown = html("preview")

    def show(_: object = None) -> None:
        shown.value = preview_html(state.preview)

    state.observe(show, "preview")
    show()
    return shown


def _verdicts(state: LabState) -> w.Widget:
    """What every policy would do, at once; and again with the forecast, which is made on a thread of its own."""
    shown = html("verdicts")

    def foresee() -> bool:
        before = None
        while before is not state.preview:  # while somebody moves a control, the forecast waits
            before = state.preview
            time.sleep(_REST_S)
        state.foresee()
        return False

    painter = Painter(foresee)

    def show(_: object = None) -> None:
        preview = state.preview
        shown.value = verdicts_html(preview)
        if preview is not None and preview.settings is not None and not preview.foreseen:
            painter.ask(now=True)

    state.observe(show, "preview")
    show()
    return shown


def _snippets(state: LabState) -> w.Widget:
    """The settings as code."""
    shown = html("snippets")

    def show(_: object = None) -> None:
        shown.value = snippets_html(state.preview)

    state.observe(show, "preview")
    show()
    return shown


def _enable(state: LabState, widget: w.Widget, trait: str, when: Callable[[], bool]) -> None:
    def update(_: object = None) -> None:
        widget.disabled = not when()

    state.observe(update, trait)
    update()


def _button(name: str, icon: str, style: str, tooltip: str, act: Callable[[], Any], state: LabState) -> w.Button:
    button = w.Button(description=name, icon=icon, button_style=style, tooltip=tooltip)

    def pressed(_: w.Button) -> None:
        try:
            act()
        except PrefillLabError as error:
            state.message = f"{REFUSED}: {error}"

    button.on_click(pressed)
    return named(button, name.lower().replace(" ", "-"))


def _wide() -> w.Layout:
    """One for each widget: a layout is closed with the widget that has it."""
    return w.Layout(width="98%", max_width="560px")
