"""Names of classes at different plants: aliases,
and the class that an unknown name probably stands for.
"""

import difflib
import re
import shlex
import tomllib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from broker_config.protocol.errors import UsageError, suggest

TERMS = Path(__file__).with_name("defect_terms.toml")
# difflib's ratio from which two names are spelled alike, in their normal forms: "scrathces" has
# 0.80 to "scratches", "patches" 0.67.
_ALIKE = 0.78
_TWO_LETTERS = {
    "ä": "ae",
    "ö": "oe",
    "ü": "ue",
    "ß": "ss",
    "æ": "ae",
    "œ": "oe",
    "ł": "l",
    "ø": "o",
    "đ": "d",
    "ı": "i",
}


class Proposal(NamedTuple):
    """The class that a name probably stands for, and why."""

    class_name: str
    reason: str


class _Known(NamedTuple):
    """A name that is known for a class, in its normal form, and how a reason calls it;
    nothing for the class itself.
    """

    key: str
    class_name: str
    name: str = ""
    called: str = ""


class _Term(NamedTuple):
    """A technical term: its normal form, as it is written, concept, language."""

    key: str
    text: str
    concept: str
    language: str


def find_fault(aliases: Mapping[str, str], classes: Collection[str]) -> str:
    """Why a federation cannot have these aliases; empty if it can."""
    for alias, name in aliases.items():
        if alias in classes:
            return f"the alias {alias!r} is a class itself"
        if name not in classes:
            return f"{alias!r} is an alias of {name!r}, which is no class"
    return ""


def check_own_aliases(
    aliases: Mapping[str, str], folders: Collection[str], classes: Collection[str] = ()
) -> None:
    """Check a plant's aliases.

    Raises:
        UsageError: no folder has an alias's name, or it stands for what is none of the `classes`,
            if there are any.
    """
    for alias, name in aliases.items():
        if alias not in folders:
            raise UsageError(
                f"--alias {alias}={name}: no class folder is called {alias!r}",
                suggest(alias, sorted(folders)),
            )
        if classes and name not in classes:
            raise UsageError(
                f"--alias {alias}={name}: {name!r} is none of the federation's classes",
                suggest(name, classes),
            )


def check_class_folders(
    folders: Iterable[str],
    classes: Sequence[str],
    aliases: Mapping[str, str] = {},
    proposals: Mapping[str, Proposal] | None = None,
) -> None:
    """Check that folders are called like classes.

    Args:
        folders: names of a plant's class folders.
        classes: the federation's.
        aliases: the federation's, for proposals.
        proposals: for names that are no class; None lets them be made from the names alone.

    Raises:
        UsageError: the message says which are not, what they may stand for, and what to do.
    """
    unknown = [name for name in folders if name not in classes]
    if not unknown:
        return
    if proposals is None:
        proposals = propose_all(unknown, classes, aliases)
    named = ", ".join(map(repr, unknown))
    none = "is none" if len(unknown) == 1 else "are none"
    hints = []
    for name in unknown:
        if name in proposals:
            subject = name + " is " if len(unknown) > 1 else ""
            hints.append(f"; {subject}perhaps {format_proposal(proposals[name])}")
    guesses = "".join(hints)
    options = []
    for name in unknown:
        class_name = proposals[name].class_name if name in proposals else "CLASS"
        options.append(f"{name}={class_name}")
    alias = " ".join(f"--alias {shlex.quote(option)}" for option in options)
    raise UsageError(
        f"{named} {none} of the federation's classes, which are {', '.join(classes)}{guesses}",
        f"say which class it is: {alias}; or remove the folder",
    )


def format_proposal(proposal: Proposal) -> str:
    """The class and the reason."""
    return f"{proposal.class_name} ({proposal.reason})"


def propose_all(
    names: Iterable[str], classes: Sequence[str], aliases: Mapping[str, str] = {}
) -> dict[str, Proposal]:
    """The first proposal for each of these names that has one."""
    found = {name: propose(name, classes, aliases) for name in names}
    return {name: proposals[0] for name, proposals in found.items() if proposals}


def propose(name: str, classes: Sequence[str], aliases: Mapping[str, str] = {}) -> list[Proposal]:
    """The classes that a name may stand for, by the name alone; the order is that of the classes.

    Names are compared in a normal form, without case, accents, plural and words such as "surface":
    with the classes, their aliases, and the terms of TERMS for them in several languages. Equal
    ones come before those of which one contains all words of the other, and these before those that
    are spelled alike. A name that is itself a term for something else is not compared with terms
    so: a rolled pit is no pit, a shell (in German Schale) no scale.
    """
    key = normalise(name)
    known = list(_vocabulary(classes, aliases))
    words = set(key.split())
    is_term = key in _terms()
    keys = {each.key for each in known}
    ratios = {each: difflib.SequenceMatcher(None, key, each).ratio() for each in keys}
    best = max(ratios.values(), default=0.0)
    kinds = (
        ("the same but for its spelling", [each for each in known if each.key == key]),
        (
            "one name has all words of the other",
            [each for each in known if _overlap(words, each) and not (is_term and each.called)],
        ),
        (
            "spelled alike",
            [each for each in known if ratios[each.key] == best >= _ALIKE and not is_term],
        ),
    )
    for kind, fits in kinds:
        if fits:
            reasons = {each.class_name: _reason(key, each, kind) for each in reversed(fits)}
            return [Proposal(each, reasons[each]) for each in classes if each in reasons]
    return []


def add_votes(
    candidates: Sequence[Proposal], votes: Counter[str], classes: Sequence[str], model: str
) -> Proposal | None:
    """The best proposal, by names and by a model's votes on a folder's images;
    None if neither speaks for one.

    Args:
        candidates: those by the name.
        votes: for each class of the model, how many images look most like it.
        classes: the federation's.
        model: its name for the reason.
    """
    total = votes.total()
    most = max(classes, key=lambda name: votes[name])
    if 2 * votes[most] <= total:  # no majority
        return candidates[0] if candidates else None
    looks = f"{votes[most]} of {total} of its images look like"
    by_name = {each.class_name: each.reason for each in candidates}
    if most in by_name:
        return Proposal(most, f"{by_name[most]}; {looks} it to {model}")
    if candidates:
        return Proposal(
            candidates[0].class_name, f"{candidates[0].reason}; but {looks} {most} to {model}"
        )
    return Proposal(most, f"{looks} it to {model}")


def _overlap(words: set[str], known: _Known) -> bool:
    """Whether a folder's words are among a class's,
    or contain those of any name that is known for it.
    """
    others = set(known.key.split())
    return others <= words or (not known.called and words <= others)


def _reason(key: str, known: _Known, kind: str) -> str:
    if not known.called:
        return kind
    return known.called if known.key == key else f"{known.name} is {known.called}"


def _vocabulary(classes: Sequence[str], aliases: Mapping[str, str]) -> Iterator[_Known]:
    """The names that are known for classes: their own, their aliases,
    and the terms for what they are.
    """
    for name in classes:
        key = normalise(name)
        yield _Known(key, name)
        yield from (
            _Known(normalise(alias), name, alias, "its alias")
            for alias, of in aliases.items()
            if of == name
        )
        same = _terms().get(key, ())
        languages = {term.language for term in same}
        for concept in dict.fromkeys(term.concept for term in same):
            for term in _concepts()[concept]:
                called = (
                    "another word for it"
                    if term.language in languages
                    else f"{term.language} for it"
                )
                yield _Known(term.key, name, term.text, called)


def normalise(name: str) -> str:
    """The normal form of a name: its words in lower case and singular, without accents,
    numbers and fillers.
    """
    every = _words(name)
    fillers = _fillers()
    return " ".join([word for word in every if word not in fillers] or every)


def _words(name: str) -> list[str]:
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    lower = "".join(
        _TWO_LETTERS.get(letter, letter)
        for letter in unicodedata.normalize("NFC", parted).casefold()
    )
    plain = "".join(
        each for each in unicodedata.normalize("NFKD", lower) if not unicodedata.combining(each)
    )
    words = re.split(r"[\W_]+", plain)
    return [_singular(word) for word in words if word and not word.isdigit()] or [plain]


def _singular(word: str) -> str:
    """Without a plural's ending, as in English and, roughly,
    in the languages that form it with s.
    """
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return (
        word[:-1]
        if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is"))
        else word
    )


@cache
def _file() -> Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]]:
    content: dict[str, dict[str, dict[str, list[str]]]] = tomllib.loads(
        TERMS.read_text(encoding="utf-8")
    )
    return content


@cache
def _fillers() -> frozenset[str]:
    fillers = []
    for words in _file()["fillers"].values():
        for each in words:
            for word in _words(str(each)):
                fillers.append(word)
    return frozenset(fillers)


@cache
def _concepts() -> Mapping[str, Sequence[_Term]]:
    """The terms of each concept."""
    languages = _file()["languages"]
    concepts = {}
    for concept, terms in _file()["concepts"].items():
        made = []
        for language, texts in terms.items():
            for text in texts:
                made.append(_Term(normalise(text), text, concept, str(languages[language])))
        concepts[concept] = made
    return concepts


@cache
def _terms() -> Mapping[str, Sequence[_Term]]:
    """The terms of each normal form."""
    found: dict[str, list[_Term]] = defaultdict(list)
    for terms in _concepts().values():
        for term in terms:
            found[term.key].append(term)
    return dict(found)
