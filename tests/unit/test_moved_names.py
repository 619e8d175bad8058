"""Names that were moved raise an error that says where they are now."""

import importlib

import pytest

import attnrx as rx

MOVED = {
    "control_prescriptions": rx,
    "measure_divergence": rx,
    "Controls": rx.checks,
    "TargetRank": rx.losses,
}


@pytest.mark.parametrize("name", MOVED)
def test_a_moved_name_says_where_it_is(name: str) -> None:
    with pytest.raises(AttributeError, match=name) as caught:
        getattr(MOVED[name], name)
    place = next(word for word in str(caught.value).split() if word.startswith("attnrx_lab."))
    module, _, new = place.rpartition(".")
    assert hasattr(importlib.import_module(module), new)


@pytest.mark.parametrize("package", [rx.checks, rx.losses])
def test_an_unknown_name_is_named(package: object) -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = package.nonsense  # pyright: ignore[reportAttributeAccessIssue]
