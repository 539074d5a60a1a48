"""The pages of the documentation as tests read them: files, code in them, commands in that code."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}[^\n]*\n)+")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def pages() -> dict[str, str]:
    """Text by path from the project's folder: every page that people read, except generated reports."""
    paths = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("d*/README.md")})
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def blocks(text: str) -> list[str]:
    """The code blocks, with lines that a backslash continues joined."""
    found = FENCE.findall(text) + INDENTED.findall(FENCE.sub("", text))
    return [re.sub(r"\\\n\s*", " ", block) for block in found]


def spans(text: str) -> list[str]:
    """Code within lines of text."""
    return SPAN.findall(FENCE.sub("", text))


def code(text: str) -> list[str]:
    """Each line of code blocks, and each span."""
    return [line.strip() for block in blocks(text) for line in block.splitlines()] + spans(text)


def commands(text: str, program: str) -> list[list[str]]:
    """The calls of a program: the words of each, without the comment behind it."""
    found = []
    for line in code(text):
        calls = re.findall(rf"(?:^|(?<=[ ;])){re.escape(program)}(?= |$)[^#`]*", line)
        found += [words for call in calls if (words := _words(call))]
    return found


def _words(call: str) -> list[str]:
    try:
        return shlex.split(call)
    except ValueError:
        return call.split()


def anchors(text: str) -> set[str]:
    """Anchors that GitHub makes from the headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower().replace(" ", "-") for heading in headings}
