"""Sections: a name, a heading, and the data for the template of that name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Section:
    """One part of the page; `name` is its anchor and the file name of its template."""

    name: str
    title: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A picture with heading and caption; `note` follows the heading, `legend` pairs pictures with names."""

    picture: str
    title: str
    note: str = ""
    caption: str = ""
    legend: tuple[tuple[str, str], ...] = ()
