"""The command `prefill-lab`: parsing and printing, no logic that a script could need."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from toolkit import __version__, cli_capture, cli_diagnose, cli_extras, cli_ladder, cli_plan, cli_runs
from toolkit.cli_output import complain, end_quietly, say, say_help
from toolkit.errors import PrefillLabError

_INTERRUPTED = 130  # What typer makes of Ctrl-C.

app = typer.Typer(
    name="prefill-lab",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="What prefill CUDA graphs cost in memory and time, whether they fit, who decides, what they buy.",
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        say(f"prefill-lab {__version__}")
        raise typer.Exit()
    say_help(context)


app.command()(cli_capture.capture)
app.command()(cli_capture.compare)
app.command()(cli_plan.plan)
app.command()(cli_ladder.ladder)
app.command("diagnose")(cli_diagnose.diagnose_logs)
app.add_typer(cli_runs.app, name="runs")
app.command()(cli_extras.demo)
app.command()(cli_extras.selfcheck)
app.command()(cli_extras.lab)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 the capture did not succeed, 2 bad input.

    Whatever a person can get wrong ends with one line on standard error; a traceback is always a bug.
    """
    # A stream that was closed (`>&-`) is None here: what would be written there goes nowhere.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - it lives as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # A model name must not break an ASCII terminal.
    # Schedulers and `timeout` end a command with SIGTERM: like Ctrl-C, that cancels and leaves a record.
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, _cancel_once)
    try:
        return _run(arguments)
    finally:
        end_quietly()


def _cancel_once(number: int, frame: object) -> None:
    """The first SIGTERM cancels. `timeout` sends it twice, and the second must not end the cancelling."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(arguments: Sequence[str] | None) -> int:
    try:
        command = typer.main.get_command(app)
        code = command.main(args=arguments, prog_name="prefill-lab", standalone_mode=False)
    except PrefillLabError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except OSError as error:
        # The help is printed by typer itself. Whatever else meets a full disk says so as StorageError.
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        complain(f"standard output cannot be written ({error.strerror}); free some space or send it elsewhere")
        return 1
    except Exception as error:
        # typer carries its own copy of click or uses the installed one, by version: told by what it can do.
        if not hasattr(error, "format_message"):
            raise
        complain(_usage(error))
        return 2
    if code == _INTERRUPTED:
        complain("interrupted; nothing was recorded")
        return 1
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> str:
    """A parsing error in one line: what was wrong, and where to read what is allowed."""
    message, context = str(error.format_message()).rstrip("."), getattr(error, "ctx", None)
    if context is None:
        return message
    commands = getattr(context.command, "commands", None)
    if commands and message.startswith("No such command"):
        message += f"; commands are {', '.join(commands)}"
    return f"{message}; see {context.command_path} --help"


if __name__ == "__main__":
    sys.exit(main())
