"""How the command line refuses: one line on standard error, nothing on standard output, exit code 2."""

from __future__ import annotations

import pytest

from toolkit.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that bad input ends with."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.endswith("\n") and err.count("\n") == 1, err
    return err
