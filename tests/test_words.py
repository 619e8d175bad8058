"""The words of the documents and the docstrings: short sentences, no chains of genitives, lines that fit a screen."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
HOW_TOS = [path for path in sorted((ROOT / "docs" / "how-to").glob("*.py")) if "# %%" in path.read_text()]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

MAX_WORDS_OF_RESULTS = 12_000  # 46,000 of them, a diary, were read by nobody
MAX_WORDS_PER_SENTENCE = 20  # on average over a page
MAX_GENITIVES = 0.5  # "that of" and "those of" per 1,000 words
MAX_LINE = 200
GENITIVE = re.compile(r"\b(?:that|those)\s+of\b")


def markdown(path: Path) -> str:
    """Returns a page as Markdown; of a how-to the cells of prose."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    cells = re.findall(r"^# %% \[markdown\]\n((?:#.*\n)*)", text, re.MULTILINE)
    return "\n".join(re.sub(r"^# ?", "", cell, flags=re.MULTILINE) for cell in cells)


def prose(text: str) -> str:
    """Returns the paragraphs and lists of a page. Code in a line counts as one word, however long the command."""
    text = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(```+).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?:\||#|<|:::|    |--8<|!\[).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]+`", "code", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[int]:
    """Returns the numbers of words of the sentences; a paragraph and an item of a list end one."""
    parts = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text)
    found = [sentence for part in parts for sentence in re.split(r"(?<=[.?!])[)*\"]*\s+", " ".join(part.split()))]
    return [count for sentence in found if (count := len(re.findall(r"[^\W_][\w'.,%-]*", sentence)))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_sentences_are_counted() -> None:
    page = "# A title\n\nOne two three. Four `five six` [seven](a.md)\n\n- Eight nine\n\n```\nno. code.\n```\n| a | b |"
    assert sentences(prose(page)) == [3, 3, 2]


def test_pages_have_short_sentences() -> None:
    counts = {name(path): sentences(prose(markdown(path))) for path in (*PAGES, *HOW_TOS)}
    assert len(counts) > 60
    means = {page: sum(count) / len(count) for page, count in counts.items() if count}
    assert {page: round(mean, 1) for page, mean in means.items() if mean > MAX_WORDS_PER_SENTENCE} == {}


def test_prose_has_lines_that_fit_a_screen() -> None:
    long = []
    for path in (*PAGES, *HOW_TOS):
        lines = re.sub(r"^(```+).*?^\1$", "", markdown(path), flags=re.DOTALL | re.MULTILINE).splitlines()
        text = [line for line in lines if not line.startswith(("|", "![", "<", "    "))]
        long += [(name(path), line) for line in text if len(line) > MAX_LINE]
    assert long == []


def test_pages_name_the_noun_again() -> None:
    texts = [prose(markdown(path)) for path in (*PAGES, *HOW_TOS)]
    found = sum(len(GENITIVE.findall(text)) for text in texts)
    assert 1000 * found / sum(len(text.split()) for text in texts) <= MAX_GENITIVES


def test_results_are_short() -> None:
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in RESULTS) <= MAX_WORDS_OF_RESULTS


def docstrings() -> list[str]:
    return [
        text
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node))
    ]


def test_docstrings_name_the_noun_again() -> None:
    texts = docstrings()
    found = sum(len(GENITIVE.findall(text)) for text in texts)
    assert 1000 * found / sum(len(text.split()) for text in texts) <= MAX_GENITIVES
