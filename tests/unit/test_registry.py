"""A registry: names of classes and of other things, unknown and second ones, packages that are imported on demand."""

import sys
from importlib.metadata import EntryPoint

import pytest

from attnrx.support import optional, registry
from attnrx.support.errors import InvalidInput, UnknownName
from attnrx.support.registry import Registry


class TotalRank:
    pass


class EViT(TotalRank):
    name = "evit"


class OfEViT(EViT):
    pass


def test_a_thing_has_its_own_name_or_that_of_its_class() -> None:
    found = Registry[type]("rule", TotalRank, EViT, OfEViT, named={"a-b": int})
    assert list(found.loaded) == [TotalRank, EViT, OfEViT, int]
    assert found["total_rank"] is TotalRank and found["evit"] is EViT and found["of_evi_t"] is OfEViT
    assert found["a-b"] is int


def test_a_thing_is_registered_once_and_returned() -> None:
    found = Registry[type]("rule", TotalRank)
    assert found.register(EViT) is EViT and found.register(EViT) is EViT and found["evit"] is EViT
    with pytest.raises(InvalidInput, match="the rule total_rank exists already"):
        found.register(EViT, "total_rank")


def test_other_packages_are_imported_for_an_unknown_name_and_for_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(registry, "import_plugins", imported.append)
    found = Registry[type]("rule", TotalRank, group="here")
    assert found["total_rank"] is TotalRank and found.loaded and "total_rank" in found and not imported
    with pytest.raises(UnknownName, match="unknown rule 'totl_rank': did you mean 'total_rank'"):
        found["totl_rank"]
    assert found.get("other") is None and len(found) == 1 and list(found) == ["total_rank"]
    assert set(imported) == {"here"}


def test_entry_points_are_imported_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint(name, name, "here") for name in ("wave", "colorsys")]
    for each in entries:
        monkeypatch.delitem(sys.modules, each.name, raising=False)
    monkeypatch.setattr(optional.importlib.metadata, "entry_points", lambda group: entries if group == "here" else [])
    optional.import_plugins.__wrapped__("here")
    assert [name for name in sys.modules if name in ("wave", "colorsys")] == ["colorsys", "wave"]
