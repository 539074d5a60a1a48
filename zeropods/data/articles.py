"""WikiText's lines as articles, without losing a character."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

TITLE = re.compile(r" = (?!= ).*(?<! =) = ?\n?")
"""` = Title = `, and not ` = = Section = = `."""


def articles(lines: Iterable[str]) -> Iterator[str]:
    """The articles of a split, each from its title to the next; joined they are the lines again.

    A title stands between blank lines: some 30 lines of WikiText-2 look like one and are rows of a table.
    """
    article: list[str] = []
    title_before = False
    blank_before = True
    for line in lines:
        blank = not line.strip()
        if title_before and blank and len(article) > 1:
            title = article.pop()
            if any(part.strip() for part in article):
                yield "".join(article)
                article = []
            article.append(title)
        article.append(line)
        title_before = blank_before and TITLE.fullmatch(line) is not None
        blank_before = blank
    if article:
        yield "".join(article)
