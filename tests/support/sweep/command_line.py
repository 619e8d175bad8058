"""Command lines in which one option is odd: exit codes as documented, one line on what is wrong, no traceback."""

import argparse
import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

from attnrx.cli import main
from attnrx.cli.commands import COMMANDS
from attnrx.cli.main import BAD_DATA, BAD_INPUT
from support.sweep.case import HUNG, Case
from support.sweep.draws import edited, generator, shuffled
from support.sweep.workshop import WORKSHOP

# A valid line of every command. Those that take long get lines that are refused before they begin: with a value that
# no option of its kind takes.
COMPLETE = {
    "bench": "svda:digits --methods a=total_rank:0.5 --out {out}",
    "compare": "{model} --data {data} --methods a=total_rank:0.5 --out {out}",
    "costs": "svda:digits",
    "demo": "--out {out}",
    "diagnose": "{model} --data {data} --out {out}.json",
    "export": "{model} --to program --out {out}.pt2",
    "prescribe": "{diagnosis} --rules total_rank:0.5 --out {out}.json",
    "push": "{model} owner/name",
    "realize": "{model} --prescription {prescription} --out {out}",
    "report": "--prescription {prescription} --out {out}.html",
    "reproduce": "svda/table1 --out {out}",
    "shrink": "{model} --data {data} --macs 0.5 --out {out} --no-onnx",
    "elastic": "{model} --data {data} --macs 0.7,0.5 --out {out}",
    "train": "{model} --data {data} --out {out}",
    "verify": "{slim} --reference {model} --data {data} --checks costs,fidelity --out {out}.json",
}
LONG = ("bench", "compare", "demo", "export", "push", "reproduce", "shrink", "elastic", "train")
REFUSED = (
    "", " ", "a\0b", "\udcff", "nan", "-1", "1e999", "9" * 30, "²", "1_0", "0x10", "nothing/at/all", "x" * 5000,
    "/dev/null", "/dev/zero", "{pipe}", "{loop}", "--", "--help-me",
)  # fmt: skip
NO_TEXT = ("", " ", "a\0b", "\udcff", "\ud800")
NOT_TYPED = (*NO_TEXT, "nan", "1e999", "9" * 30, "²", "1_0", "0x10", "x" * 5000, "{pipe}")
TRIED = (
    *REFUSED, "0", "1", "2", "0.5", "1.5", "1e-3", "50%", "None", "true", "müller", "\U0001f642", "\u202e", "%s{0}",
    "a,b", ",", ";", ":", "@", "../..", "~", "~nobody", "$HOME", "*", "[", "{model}", "{slim}", "{data}", "{diagnosis}",
    "{prescription}", "{evidence}", "{text}", "cpu", "cuda:99", "meta", "total_rank:0.5", "accuracy,costs", "onnx",
)  # fmt: skip
# What may also be wrong with a line, besides the value of one option.
WAYS = (
    "value",
    "value",
    "value",
    "edited",
    "twice",
    "without value",
    "left out",
    "unknown",
    "before",
    "equals",
    "abbreviated",
)


def words_of(line: str, folder: Path) -> list[str]:
    """The words of a line, with the files that its names in braces stand for."""
    made = WORKSHOP
    places = {
        "model": made.original_folder, "slim": made.own_folder, "data": made.data_folder, "out": folder / "out",
        "diagnosis": made.diagnosis_file, "prescription": made.prescription_file, "evidence": made.evidence_file,
        "pipe": _odd_file("pipe"), "loop": _odd_file("loop"), "text": _odd_file("text"),
    }  # fmt: skip
    return [re.sub(r"\{(\w+)\}", lambda found: str(places.get(found[1], found[0])), word) for word in line.split(" ")]


@cache
def _odd_file(kind: str) -> Path:
    import os

    path = WORKSHOP.root / "odd" / kind
    path.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to("loop")
    else:
        path.write_text("{}")
    return path


@cache
def slots() -> tuple[tuple[str, str, str], ...]:
    """Every command, option and way, the commands taking turns; positional arguments are options without dashes."""
    by_command = []
    for name in COMPLETE:
        actions = COMMANDS[name].parser()._actions
        options = [each.option_strings[-1] if each.option_strings else each.dest for each in actions]
        every = [
            (name, option, way)
            for option in options
            if option not in ("--help", "--debug")
            for way in (*WAYS, *("value",) * 5)
        ]
        by_command.append(shuffled(every, name))
    longest = max(map(len, by_command))
    return tuple(every[turn] for turn in range(longest) for every in by_command if turn < len(every))


def action_of(command: str, option: str) -> argparse.Action:
    actions = COMMANDS[command].parser()._actions
    return next(each for each in actions if option in (*each.option_strings, each.dest))


def values_for(command: str, option: str) -> Sequence[str]:
    """The values to draw from for an option."""
    if command not in LONG:
        return TRIED
    action = action_of(command, option)
    return NOT_TYPED if action.type is not None or action.choices else NO_TEXT


def line_of(number: int, folder: Path) -> list[str]:
    command, option, way = slots()[number]
    random = generator("command line", number)
    words = words_of(COMPLETE[command], folder)
    value = words_of(random.choice(values_for(command, option)), folder)[0]
    if not option.startswith("-"):  # positional
        words = [value, *words[1:]] if way != "left out" else words[1:]
        return [command, *words]
    position, required = words.index(option) if option in words else None, action_of(command, option).required
    if way == "left out" and not (command in LONG and not required):
        words = ["more", *words] if position is None else [*words[:position], *words[position + 2 :]]
        return [command, *words]
    if way == "twice":
        return [command, *words, option, value, option, value]
    if way == "without value":
        return [command, *words, "--nothing", option]
    if way == "unknown":
        return [command, *words, f"{option}x", value]
    if way == "abbreviated":
        return [command, *words, option[:-1], value]
    if way == "before":
        return [option, value, command, *words]
    if way == "equals":
        return [command, *words, f"{option}={value}"]
    if way == "edited" and position is not None and command not in LONG:
        words[position + 1] = edited(words[position + 1], random)
        return [command, *words]
    return [command, *words, option, value]


def ran(words: Sequence[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


def told(result: tuple[int, str, str], out: Path) -> str | None:
    """The law of a line: a documented exit code, and one message where it is refused, which leaves no file."""
    code, shown, said = result
    if HUNG in said:
        return "hung"
    if code not in (0, 1, BAD_INPUT, BAD_DATA) or "Traceback" in said:
        return f"exit code {code}: {said[-400:]}"
    if code in (0, 1):
        return None if shown.strip() else "printed nothing"
    messages = [line for line in said.splitlines() if re.match(r"attnrx: (?!warning)", line)]
    if len(messages) != 1 or len(messages[0]) < 25:
        return f"{len(messages)} messages: {said[-400:]}"
    if len(said) > 8000:
        return f"a message of {len(said)} characters"
    left = sorted(out.parent.rglob("out*"))
    return f"a refused line left {left[0].name}" if left else None


def draw(number: int, folder: Path) -> Case:
    words = line_of(number, folder)
    name = " ".join(words).replace(str(WORKSHOP.root), "").replace(str(folder), "")
    return Case(repr(name)[:160], lambda: ran(words), lambda result: told(result, folder / "out"))
