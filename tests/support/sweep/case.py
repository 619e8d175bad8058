"""A case of the sweep, and the law that it is judged by.

The law: a call returns a right result, or raises an error of attnrx that says what was passed. Everything else is a
fault: an exception from the depths, a result that is not finite, files that a refused call leaves behind, a changed
default of torch, a hang, and repeated warnings.
"""

import dataclasses
import io
import math
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnrx.support.errors import AttnrxError
from support.time_limits import time_limit

SECONDS = 60  # of a case
SHORTEST, LONGEST = 20, 6000  # characters of a message
HUNG = "nothing happened for"  # of `time_limit`, whatever attnrx makes of it
REPEATED = 3  # times that a warning may be given
DEEPEST = 6  # levels of a result that are looked at


def finite(result: Any) -> str | None:
    """The law of most results: all numbers in it are finite, and it has a text."""
    if problem := _infinite(result, 0):
        return problem
    str(result)
    return None


@dataclasses.dataclass(frozen=True)
class Case:
    """One input: a call, what is wrong with its result if anything is, and words of which a message needs one."""

    name: str
    call: Callable[[], Any]
    law: Callable[[Any], str | None] = finite
    words: Collection[str] = ()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a case: whether it was refused, and its fault if it has one."""

    is_refused: bool = False
    fault: str | None = None


def judged(case: Case, folder: Path) -> Verdict:
    """Calls a case in a folder, which a refused call must leave as it was."""
    state, place = global_state(), Path.cwd()
    os.chdir(folder)
    try:
        with (
            warnings.catch_warnings(record=True) as shown,
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("always")
            verdict = _called(case, folder)
    finally:
        os.chdir(place)
    if verdict.fault is None and global_state() != state:
        verdict = Verdict(fault=f"changed the defaults {state} to {global_state()}")
    often = Counter(str(each.message)[:200] for each in shown).most_common(1)
    if verdict.fault is None and often and often[0][1] > REPEATED:
        verdict = Verdict(fault=f"warned {often[0][1]} times: {often[0][0]}")
    return verdict


def _called(case: Case, folder: Path) -> Verdict:
    before = listing(folder)
    try:
        with time_limit(SECONDS):
            return Verdict(fault=case.law(case.call()))
    except AttnrxError as error:
        left = listing(folder).items() - before.items()
        fault = message_fault(str(error), case.words)
        return Verdict(True, f"the refused call left {sorted(left)[0]}" if left and fault is None else fault)
    except TypeError as error:
        return Verdict(True, None if is_stated(error) else depths(error))
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return Verdict(fault=depths(error))


def message_fault(message: str, words: Collection[str]) -> str | None:
    """What is wrong with a message: nothing, where it is a sentence of a readable length with one of the words."""
    if HUNG in message:
        return "hung"
    if not SHORTEST <= len(message) <= LONGEST:
        return f"a message of {len(message)} characters: {message[:200]}"
    if words and not any(word in message for word in words):
        return f"a message without {' or '.join(sorted(words))[:100]}: {message[:300]}"
    try:
        message.encode()
    except UnicodeEncodeError:
        return f"a message that cannot be printed: {message!r:.200}"
    return None


def is_stated(error: TypeError) -> bool:
    """Whether attnrx raised it for arguments that a function does not take."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.endswith("support/arguments.py")


def depths(error: BaseException) -> str:
    """An exception with the last line of attnrx and the last line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "/attnrx" in each.filename] or frames
    places = dict.fromkeys(f"{Path(each.filename).name}:{each.lineno}" for each in (ours[-1], frames[-1]))
    return f"{type(error).__name__} at {', '.join(places)}: {str(error)[:200]!r}"


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """All files below a folder, with their size and time."""
    found = {}
    for above, _, names in os.walk(folder):
        for name in names:
            state = os.lstat(Path(above) / name)
            found[str((Path(above) / name).relative_to(folder))] = (state.st_size, state.st_mtime_ns)
    return found


def global_state() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
    )


def _infinite(value: Any, level: int) -> str | None:
    if level > DEEPEST:
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"the result has {value}"
    if isinstance(value, Tensor):
        usable = not value.is_meta and (value.is_floating_point() or value.is_complex())
        return "the result has a tensor that is not finite" if usable and not value.isfinite().all() else None
    if isinstance(value, nn.Module):
        parts: Collection[Any] = [
            weight.detach() for weight in value.state_dict().values() if isinstance(weight, Tensor)
        ]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        parts = list(value.values())
    else:
        parts = value if isinstance(value, list | tuple) else ()
    return next((problem for part in parts if (problem := _infinite(part, level + 1))), None)
