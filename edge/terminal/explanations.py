"""Explanations of messages: the entries of docs/troubleshooting.md, found by a message as it was printed."""

import functools
import math
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("troubleshooting.md")  # a link to that of docs/; a wheel has its content
_ENTRY = re.compile(r"^## (.*)\n|^- `([^`]+)`\n((?:  .*\n)*)", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\{[^}]*\}")  # stands for what differs from case to case
_ALIKE = 0.6  # share of the words of a message or of a template, by weight, that the other must have
_MOST = 3  # entries that are proposed


class Entry(NamedTuple):
    """A message, with what differs in braces, and what is said of it."""

    template: str
    text: str
    section: str


class Found(NamedTuple):
    """The entries for a message: those that fit it word for word or, if there are none, the most alike."""

    entries: tuple[Entry, ...]
    fits: bool


@functools.cache
def read_entries() -> tuple[Entry, ...]:
    """All entries, in the order of the page."""
    found, section = [], ""
    for heading, template, text in _ENTRY.findall(PAGE.read_text(encoding="utf-8")):
        if heading:
            section = heading
        else:
            found.append(Entry(" ".join(template.split()), " ".join(text.split()), section))
    return tuple(found)


def find_entries(message: str) -> Found:
    """The entries for a message, or for a part of one.

    Of several that fit, the one with most words of its own is meant: `cannot write to {folder}: {reason}` also fits
    `cannot write{file}: {reason}`.
    """
    entries, said = read_entries(), " ".join(message.split())
    fitting = [each for each in entries if _fits(each.template, said)]
    if fitting:
        most = max(map(_count_literals, fitting))
        return Found(tuple(each for each in fitting if _count_literals(each) == most), fits=True)
    return Found(_find_alike(said, entries), fits=False)


def _fits(template: str, said: str) -> bool:
    """Whether the template, with anything in its braces, stands somewhere in a text. Its time is the text's length."""
    place, text = 0, said.lower()
    for part in _PLACEHOLDER.split(template.lower()):
        found = text.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


def _count_literals(entry: Entry) -> int:
    return len(_PLACEHOLDER.sub("", entry.template))


def _find_alike(message: str, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The entries with the most words of the message in their templates, rare ones weighing more than common ones."""
    words = [_words(_PLACEHOLDER.sub(" ", each.template)) for each in entries]
    known = Counter(word for each in words for word in each)
    said = _words(message)

    def weigh(some: set[str]) -> float:
        return sum(math.log(1 + len(entries) / max(1, known[word])) for word in some)

    alike: dict[Entry, float] = {}
    for entry, each in zip(entries, words, strict=True):
        shared = weigh(each & said)
        if len(each & said) > 1 and shared >= _ALIKE * min(weigh(each), weigh(said)):
            alike[entry] = shared
    return tuple(sorted(alike, key=lambda entry: -alike[entry])[:_MOST])


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))
