"""Writes tables and reference sections for attnrx's plug-ins (rules, checks, reducers, losses), from its registries."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import attnrx as rx
from attnrx.nouns.runtime import RUNTIMES
from attnrx.vit.maps import TOKENS

Registry = Mapping[str, type]

# Every kind of plug-in with its registry, which maps names in texts to classes.
REGISTRIES: Mapping[str, Registry] = {
    "rules": rx.rules.RULES,
    "checks": rx.checks.CHECKS,
    "tokens": rx.tokens.REDUCERS,
    "losses": rx.losses.LOSSES,
    "diagnostics": rx.diagnostics.DIAGNOSTICS,
}


def _address(kind: str, part: type) -> str:
    home = getattr(rx, kind).__name__
    if part.__module__.startswith("attnrx_lab."):  # the laboratory registers its own checks and reducers
        home = f"attnrx_lab.{kind}" if part.__module__.startswith(f"attnrx_lab.{kind}.") else part.__module__
    return f"{home}.{part.__name__}"


def table(kind: str) -> str:
    """Returns a Markdown table of all plug-ins of a kind, with their names in texts, purposes and options."""
    rows = [
        f"| [`{name}`][{_address(kind, part)}] | {first_sentence(part)} | {_knobs(part)} |"
        for name, part in REGISTRIES[kind].items()
    ]
    return "\n".join(("| in text | purpose | options |", "|---|---|---|", *rows))


def entries(kind: str) -> str:
    """Returns a reference section for every plug-in of a kind. mkdocstrings fills it from the docstring."""
    return "\n\n".join(
        f"::: {_address(kind, part)}\n    options: {{heading_level: 3}}" for part in REGISTRIES[kind].values()
    )


def exports(package: str) -> str:
    """Returns a table of all names that a package exports, followed by a reference section for each."""
    home = importlib.import_module(f"attnrx.{package}")
    rows = [f"| [`{name}`][attnrx.{package}.{name}] | {first_sentence(getattr(home, name))} |" for name in home.__all__]
    documented = (f"::: attnrx.{package}.{name}" for name in home.__all__)
    return "\n\n".join(("\n".join(("| name | what it is |", "|---|---|", *rows)), *documented))


def families() -> str:
    """Returns a table of the model names that `attnrx.load` accepts."""
    rows = [f"| `{name}` | attnrx's own, random weights unless a file is given |" for name in rx.models.model_names()]
    rows += [
        f"| `{name}:NAME` | adopted from {family.library}, with the same outputs |"
        for name, family in rx.models.LIBRARIES.items()
    ]
    return "\n".join(("| name | what it is |", "|---|---|", *rows))


def datasets() -> str:
    """Returns a table of the datasets that `attnrx.load_data` knows by name."""
    rows = [
        f"| `{name}` | {card.geometry.size} px, {card.geometry.channels} channels |"
        for name, card in rx.data.DATASETS.items()
    ]
    return "\n".join(("| name | images |", "|---|---|", *rows))


def runtimes() -> str:
    """Returns a table of the runtimes, with what plans may choose for each of them."""
    head = "| where | named by | axes | heads | ranks | widths | stages | source |"
    rows = []
    for runtime in RUNTIMES.values():
        plans_tokens = TOKENS in runtime.axes
        page = runtime.page.replace("results/", "../results/").replace("how-to/", "")
        cells = (
            runtime.title,
            f"`{runtime.named_by}`" if "=" in runtime.named_by else runtime.named_by,
            ", ".join(f"`{axis}`" for axis in runtime.axes),
            ("equal ranks" if runtime.equal_heads else "any ranks") if "qk" in runtime.axes else "whole heads",
            str(runtime.rank_multiple) if "qk" in runtime.axes else "-",
            str(runtime.width_multiple),
            (str(runtime.most_stages) if runtime.most_stages else "any number") if plans_tokens else "-",
            f"[{runtime.source}]({page})",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join((head, "|---|---|---|---|--:|--:|--:|---|", *rows))


def public_names() -> str:
    """Returns a table of all public names in `attnrx`, with the first sentence of each docstring."""
    rows = []
    for name in rx.__all__:
        part = getattr(rx, name)
        if name.startswith("__"):
            continue
        target = f"[`rx.{name}`][attnrx.{name}]"
        if inspect.ismodule(part):
            target = f"[`rx.{name}`]({name}.md)"
        rows.append(f"| {target} | {first_sentence(part)} |")
    return "\n".join(("| name | what it is |", "|---|---|", *rows))


def first_sentence(part: Any) -> str:
    """Returns the first sentence of a docstring on one line, for a table."""
    paragraph = (inspect.getdoc(part) or "").partition("\n\n")[0]
    text = " ".join(paragraph.split())
    sentence = re.match(r".*?\.(?=\s+[A-Z`]|$)", text)
    return (sentence[0] if sentence else text).replace("|", "\\|")


def _knobs(part: type) -> str:
    """Returns the options of a plug-in with their defaults, in the form in which users write them."""
    if not dataclasses.is_dataclass(part):
        return ""
    shown = []
    for field in dataclasses.fields(part):
        if field.name.startswith("_"):
            continue
        default = field.default
        shown.append(f"`{field.name}`" if default is dataclasses.MISSING else f"`{field.name}={default}`")
    return ", ".join(shown)
