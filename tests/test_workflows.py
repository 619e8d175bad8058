"""The workflows run the targets of the Makefile, and actions of other people only at a commit that was read."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import attnrx as rx

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs(path: Path) -> dict[str, dict]:
    return yaml.safe_load(path.read_text())["jobs"]


def steps(path: Path) -> list[dict]:
    return [step for job in jobs(path).values() for step in job["steps"]]


def made(path: Path) -> set[str]:
    """The targets of make that a workflow runs, those of its matrix among them."""
    found = set()
    for job in jobs(path).values():
        of_matrix = job.get("strategy", {}).get("matrix", {}).get("target", [])
        for step in job["steps"]:
            if step.get("run", "").startswith("make "):
                words = step["run"].replace("${{ matrix.target }}", " ".join(of_matrix)).split()
                found |= set(words[1:])
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit(path: Path) -> None:
    for line in re.findall(r"uses: (.*)", path.read_text()):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+(\.\d+)*", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_read_the_repository_and_no_more_unless_they_publish(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    assert {name for name, job in jobs(path).items() if "permissions" in job} <= {"publish"}
    checkouts = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_makes_is_in_the_makefile(path: Path) -> None:
    assert made(path) and made(path) <= TARGETS


def test_pull_requests_run_what_ci_runs_on_every_system_and_python_version() -> None:
    path = ROOT / ".github" / "workflows" / "tests.yml"
    of_ci = re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert of_ci and set(of_ci) <= made(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = {text.rpartition(" ")[2] for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)}
    assert set(jobs(path)["test"]["strategy"]["matrix"]["python"]) == stated


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", version) for version in versions[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds
    released = {version[1:].partition("]")[0] for version in versions[1:]}
    assert rx.__version__ in released or f"next version, {rx.__version__}," in text


def test_the_citation_names_the_papers_of_the_readme() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    readme = " ".join((ROOT / "README.md").read_text().split())
    titles = [reference["title"] for reference in citation["references"]]
    assert len(titles) == 3 and all(title in readme for title in titles)
