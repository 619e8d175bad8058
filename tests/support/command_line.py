"""The command line, run in this process."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import Any

from attnrx.cli import main


def call(*words: object) -> SimpleNamespace:
    """Runs the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


def record(*words: object, code: int = 0) -> dict[str, Any]:
    """Runs a command that is to print one JSON object."""
    done = call(*words, "--json")
    assert done.code == code, done.err
    return json.loads(done.out)
