"""Writes the command-line reference, from the argument parsers of the commands."""

import argparse
from collections.abc import Iterator

from attnrx.cli.commands import COMMANDS
from attnrx.cli.main import EPILOG


def command_pages() -> str:
    """Returns a Markdown section for every command, with its purpose, an example and tables of its options."""
    return "\n\n".join((_overview(), *(_command(name) for name in COMMANDS)))


def _overview() -> str:
    rows = [f"| [`attnrx {name}`](#attnrx-{name}) | {command.summary} |" for name, command in COMMANDS.items()]
    codes = EPILOG.partition("exit codes:\n")[2].strip("\n").splitlines()
    pairs = [line.split(maxsplit=1) for line in codes]
    exits = [f"| {code} | {meaning} |" for code, meaning in pairs]
    table = ["| command | what it does |", "|---|---|", *rows]
    return "\n".join([*table, "", "| exit code | meaning |", "|---|---|", *exits])


def _command(name: str) -> str:
    command = COMMANDS[name]
    parser = command.parser()
    parts = [f"## attnrx {name}", str(parser.description), f"```bash\n{_wrapped(command.example)}\n```"]
    for group in parser._action_groups:
        rows = list(_rows(group))
        if rows:
            title = "" if group.title in ("options", "positional arguments") else f"*{group.title}*\n\n"
            parts.append("\n".join((f"{title}| | |", "|---|---|", *rows)))
    return "\n\n".join(parts)


def _rows(group: argparse._ArgumentGroup) -> Iterator[str]:
    for action in group._group_actions:
        if isinstance(action, argparse._HelpAction):
            continue
        required = " *(required)*" if action.required and action.option_strings else ""
        yield f"| `{_spelled(action)}`{required} | {_cell(action.help or '')} |"


def _spelled(action: argparse.Action) -> str:
    """Returns an option as users type it, with a placeholder for its value."""
    value = ""
    if action.nargs != 0:
        choices = None if action.choices is None else "{" + ",".join(map(str, action.choices)) + "}"
        shown = action.metavar or choices or action.dest.upper()
        value = str(shown) + (" ..." if action.nargs in ("+", "*") else "")
    if not action.option_strings:
        return value if action.metavar or action.choices else action.dest
    return f"{', '.join(action.option_strings)} {value}".strip().replace("|", "\\|")


def _cell(text: str) -> str:
    """Returns text for a table cell, in which characters that Markdown would interpret are escaped."""
    text = text.replace("%%", "%")
    for mark in "\\|<>*_[]{}":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return text


def _wrapped(example: str, width: int = 88) -> str:
    """Returns a long command on several lines, divided before its options and continued by backslashes."""
    lines, line = [], ""
    for part in example.replace(" --", "\n--").split("\n"):
        if line and len(line) + len(part) > width:
            lines.append(f"{line} \\")
            line = f"    {part}"
        else:
            line = f"{line} {part}" if line else part
    return "\n".join((*lines, line))
