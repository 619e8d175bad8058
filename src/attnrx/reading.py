"""Small languages, such as those of rules and of policies: text cut into tokens, which a reader takes one by one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from attnrx.errors import InvalidInput


@dataclass(frozen=True)
class Token:
    """A piece of text; its kind is "number", "name", "end" or the sign itself."""

    kind: str
    text: str
    start: int


@dataclass(frozen=True)
class Language:
    """What a text is called, examples of it, the signs between its numbers and names, and the error for all else."""

    noun: str
    plural: str
    examples: str
    signs: str
    error: type[InvalidInput]

    def problem(self, text: str, start: int, problem: str) -> InvalidInput:
        """Makes the error that tells where in a text the problem is, and what texts look like."""
        return self.error(
            f"the {self.noun} {text!r}, at character {start + 1}: {problem}. {self.plural} read like {self.examples}."
        )

    def tokens(self, text: str) -> Iterator[Token]:
        """Cuts a text into tokens, or says what cannot be read."""
        pattern = re.compile(
            r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])|(?P<name>[A-Za-z_]\w*)"
            rf"|(?P<sign>[{re.escape(self.signs)}]))"
        )
        end, position = len(text.rstrip()), 0
        while position < end:
            match = pattern.match(text, position)
            if match is None or match.lastgroup is None:
                start = position + len(text[position:]) - len(text[position:].lstrip())
                raise self.problem(text, start, f"{text[start:].split()[0]!r} cannot be read")
            kind, said = match.lastgroup, match.group(match.lastgroup)
            yield Token(said if kind == "sign" else kind, said, match.start(kind))
            position = match.end()
        yield Token("end", "the end", end)


class Reader:
    """Reads a text of its language from left to right; a method of a subclass takes the tokens of its part."""

    language: ClassVar[Language]

    def __init__(self, text: str):
        self.text, self.tokens, self.position = text, tuple(self.language.tokens(text)), 0

    def take(self, kind: str) -> bool:
        """Takes the next token if it is of this kind."""
        found = self.tokens[self.position].kind == kind
        self.position += found
        return found

    def expect(self, kind: str, wanted: str) -> Token:
        """Takes the next token, which must be of this kind."""
        token = self.tokens[self.position]
        if not self.take(kind):
            raise self.problem(token.start, f"expected {wanted}, found {token.text!r}")
        return token

    def problem(self, start: int, problem: str) -> InvalidInput:
        """Makes the error for a problem at this place in the text."""
        return self.language.problem(self.text, start, problem)
