"""Counts phrases of stilted English in docstrings, comments, messages and pages.

    python -m tests.english                     # phrases per 1000 words, by folder
    python -m tests.english packages/streams    # the phrases in a folder

A phrase is a reason to rewrite its sentence, rather than to replace a word. Some are right, so the limits in
test_english.py are above 0.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ("packages", "tests", "benchmarks", "tools", "examples", "docs", "*.py", "*.md")
SKIPPED = re.compile(
    r"docs/(?:_build|benchmarks)/|models-tried\.md|CHANGELOG|/changelog\.d/|/build/|\.egg-info|tests/(?:test_)?english\.py"
)

_NOUN = r"(?:of|by|with|for|from|in|on|than|and|or|to|all|after|before|between|unless|until|is|are|has|have)"
_WITH = r"(?:of|that|which|who|whose|with|without|in|on|from|for|between|after|before|inside|outside)"
_OFTEN = r"(?:once|twice|times|seconds?|bytes|minutes|calls?|tokens|samples|rows?|operations|messages)"
_UNIT = r"(?:worker|step|run|cell|device|call|round|second|row|micro-batch|mini-batch|stage|layer|rank|process|token)"
_FACT = r"(?:number|output|value|result|shape|dtype|model|order|mask|gradient|size|name|row|option|mode|way|rule)"

PHRASES = {
    name: (re.compile(pattern, re.MULTILINE), advice)
    for name, pattern, advice in (
        ("what", rf"\b{_NOUN} what (?!to )|[.;:] What (?!to |about )[a-z`]", "use the noun: the result, the input"),
        ("that of", rf"\b[Tt]h(?:at|ose) {_WITH}\b", "repeat the noun, or use a possessive"),
        (
            "where",
            r"[.;:] Where (?!to |are |is )[a-z`]|\b(?:also|only|except|even|or|but|None|error) where\b",
            "if, when",
        ),
        ("of", r"[.;:] Of (?!course)[a-z`]|^\W*Of (?!course)[a-z`]", "begin with the subject"),
        ("summary", r'^"""(?:Whether|What|Which|Where|How|Why|Who|Those|These|That|As|Also|By)\b', "begin with a verb"),
        (
            "also if",
            r"\b[Aa]lso (?:if|where|when|under|without|of|in|for|those)\b|\bnor (?:a|an|the)\b",
            "even if, as well",
        ),
        ("other", rf"\b(?:[Aa]nother|[Oo]ther) {_FACT}s?\b", "different, wrong, varying"),
        (
            "people",
            r"\b(?:[Ww]hoever|[Nn]obody|[Ss]omebody|[Ee]verybody|[Aa]nybody)\b",
            "no stage, the caller, all ranks",
        ),
        (
            "refused",
            r"\brefus(?:e|ed|es|al|als|ing)\b|\bby (?:hand|itself|themselves)\b",
            "raises, rejects; explicitly",
        ),
        ("per", rf"\b{_OFTEN} an? {_UNIT}\b|\bso many\b|\bonce for (?:each|every)\b", "once per step"),
        ("again", r"\b(?:comput(?:e|es|ed|ing)|draws?|drawn) (?:\w+ )?again\b|\banew\b", "recompute, repeat"),
        (
            "in place",
            r"\bin (?:the )?places? of\b|\bworks? in place\b|\btakes? (?:its|their) place\b",
            "instead of; in-place",
        ),
        ("before", r"\b(?:stages?|layers?|block|micro-batch) before\b(?! (?:it|the|a)\b)", "the previous stage"),
        (
            "beside",
            r"\bbeside\b|\bside by side\b|\bmeanwhile\b|\bone after the other\b",
            "next to, concurrently, in order",
        ),
        ("whole", r"\bwhole (?:mini-)?batch\b|\ball rows\b|\bfullest\b", "the full batch; the peak"),
        ("inside of", r"\b(?:in|out)side of\b|\bfor ever\b", "inside, outside, forever"),
        (
            "data",
            r"\b(?:has|have|without|with) (?:no )?data\b|\brehears\w+|\bthat are not there\b",
            "on meta; hypothetical",
        ),
    )
}

_STRING = r'"""(?:[^"\\]|\\.|"(?!""))*"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\''
_TOKEN = re.compile(rf"#[^\n]*(?:\n[ \t]*#[^\n]*)*|{_STRING}", re.DOTALL)
_BREAK = re.compile(r"\n[ \t]*(?:#[ \t]*)?")
_WORD = re.compile(r"[A-Za-z]{2,}")


class Text(NamedTuple):
    """A docstring, message, comment or paragraph, on a single line."""

    path: Path
    line: int
    text: str

    def phrases(self) -> Iterator[tuple[str, str]]:
        """Yield each phrase, and the advice on it."""
        for pattern, advice in PHRASES.values():
            for match in pattern.finditer(self.text):
                yield match[0].strip(' ".;:#'), advice


def texts(path: Path) -> Iterator[Text]:
    """Yield the prose of a Python file or of a page. Strings of fewer than four words are names."""
    content = path.read_text(encoding="utf-8")
    for start, found in _paragraphs(content) if path.suffix == ".md" else _tokens(content):
        yield Text(path, content.count("\n", 0, start) + 1, _BREAK.sub(" ", found))


def _tokens(content: str) -> Iterator[tuple[int, str]]:
    for match in _TOKEN.finditer(content):
        if match[0].startswith(("#", '"""')) or match[0].count(" ") > 2:
            yield match.start(), match[0]


def _paragraphs(content: str) -> Iterator[tuple[int, str]]:
    start, is_code = 0, False
    for part in content.split("\n\n"):
        is_fenced = part.count("```") % 2 == 1
        if not is_code and "```" not in part:
            yield start, part
        is_code ^= is_fenced
        start += len(part) + 2


def folders() -> dict[str, list[Path]]:
    """Return the files with prose, by folder."""
    found: dict[str, list[Path]] = {}
    for source in SOURCES:
        for root in ROOT.glob(source):
            for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
                name = path.relative_to(ROOT).as_posix()
                if path.suffix in (".py", ".md") and not SKIPPED.search(name):
                    found.setdefault("/".join(name.split("/")[:-1][:5]) or ".", []).append(path)
    return dict(sorted(found.items()))


class Count(NamedTuple):
    """The prose of a folder."""

    words: int
    phrases: int

    @property
    def rate(self) -> float:
        """Phrases per 1000 words."""
        return 1000 * self.phrases / max(1, self.words)


def count(paths: list[Path]) -> Count:
    """Count the words and the phrases in some files."""
    lines = "\n".join(text.text for path in paths for text in texts(path))
    return Count(len(_WORD.findall(lines)), sum(len(pattern.findall(lines)) for pattern, _ in PHRASES.values()))


def report(paths: list[Path]) -> str:
    """List the phrases in some files."""
    return "\n".join(
        f"{text.path.relative_to(ROOT)}:{text.line}: {phrase!r} ({advice})"
        for path in paths
        for text in texts(path)
        for phrase, advice in text.phrases()
    )


def main(names: list[str]) -> None:
    """Print the table, or the phrases in the folders ``names``."""
    for folder, paths in folders().items():
        if names:
            found = report([path for path in paths if path.relative_to(ROOT).as_posix().startswith(tuple(names))])
            sys.stdout.write(f"{found}\n" if found else "")
        else:
            words, phrases = counted = count(paths)
            sys.stdout.write(f"{folder:45} {words:7,} words {phrases:5} phrases {counted.rate:6.1f}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
