"""The oldest versions that pyproject.toml states are the ones that `make test-oldest` installs."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
STATED = [*PROJECT["dependencies"], *(each for each in EXTRAS if not each.startswith("attnrx["))]
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", (ROOT / "requirements" / "oldest.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize("stated", STATED)
def test_the_stated_minimum_is_the_pinned_version(stated: str) -> None:
    name, minimum = re.fullmatch(r"([\w.-]+)>=([\w.]+)(?:,<[\w.]+)?", stated).groups()  # type: ignore[union-attr]
    assert Version(PINNED[name]) == Version(minimum)


@pytest.mark.parametrize("name", ["constraints.txt", "oldest.txt"])
def test_pinned_versions_have_hashes_and_name_no_host(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text()
    assert "://" not in text and "--index" not in text and "--find-links" not in text
    pinned, hashed = r"(?m)^[\w.-]+==", r"(?m)^[\w.-]+==[^\n]*\\\n    --hash=sha256:"
    assert len(re.findall(pinned, text)) == len(re.findall(hashed, text)) > 100
