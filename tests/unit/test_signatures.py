"""The options of commands are the arguments of functions: names, defaults and help are read from their source."""

import inspect
from dataclasses import MISSING, fields
from typing import Any

import pytest

import attnrx as rx
from attnrx.cli.commands import COMMANDS
from attnrx.cli.options import Number, parameters

FUNCTIONS = sorted(name for name in rx.__all__ if inspect.isfunction(getattr(rx, name)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_source_states_the_signature(name: str) -> None:
    signature = inspect.signature(getattr(rx, name)).parameters.values()
    plain = [each for each in signature if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    found = parameters(name)
    assert list(found) == [each.name for each in plain]
    for each in plain:
        # The name of a constant is no literal, and is left to the function.
        assert found[each.name].default in (None, () if each.default == [] else each.default), each.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_describes_every_argument(name: str) -> None:
    assert [argument for argument, found in parameters(name).items() if not found.help] == []


def test_the_fields_of_a_configuration_are_described_with_their_defaults() -> None:
    found = parameters("TrainingConfig")
    assert all(each.help for each in found.values())
    for field in fields(rx.TrainingConfig):
        assert field.default is MISSING or found[field.name].default in (None, field.default)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text(command: str) -> None:
    parser = COMMANDS[command].parser()
    assert [action.dest for action in parser._actions if not action.help] == []


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Number(int), "12", 12),
        (Number(float), "1e-3", 1e-3),
        (Number(float), "50%", 0.5),
        (Number(float), ".5", 0.5),
        (Number(float, unit="pt"), "1pt", 1.0),
        (Number(int, several=True), "1,8,64", (1, 8, 64)),
    ],
)
def test_numbers_are_read(kind: Number, text: str, value: Any) -> None:
    assert kind(text) == value
