"""The pages of the documentation as tests read them: files, code in them, commands in that code."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}[^\n]*\n)+")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def pages() -> dict[str, str]:
    """Text by path from the project's folder: every page that people read, except generated
    reports."""
    paths = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("d*/README.md")})
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def blocks(text: str) -> list[str]:
    """The code blocks, with lines that a backslash continues joined."""
    fenced = FENCE.findall(text)
    indented = INDENTED.findall(FENCE.sub("", text))
    return [re.sub(r"\\\n\s*", " ", block) for block in [*fenced, *indented]]


def spans(text: str) -> list[str]:
    """Code within lines of text."""
    return SPAN.findall(FENCE.sub("", text))


def code(text: str) -> list[str]:
    """Each line of code blocks, and each span."""
    lines = []
    for block in blocks(text):
        lines += [line.strip() for line in block.splitlines()]
    return lines + spans(text)


def commands(text: str, program: str) -> list[list[str]]:
    """The calls of a program: the words of each, without the comment behind it."""
    pattern = re.compile(rf"(?:^|(?<=[ ;])){re.escape(program)}(?= |$)[^#`]*")
    calls = []
    for line in code(text):
        for call in pattern.findall(line):
            words = _words(call)
            if words:
                calls.append(words)
    return calls


def _words(call: str) -> list[str]:
    try:
        return shlex.split(call)
    except ValueError:
        return call.split()


def anchors(text: str) -> set[str]:
    """Anchors that GitHub makes from the headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {_anchor(heading) for heading in headings}


def _anchor(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", ""))
    return kept.strip().lower().replace(" ", "-")
