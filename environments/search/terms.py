"""The words by which papers are found: one rule for abstracts and queries.

Words are runs of letters and digits in lower case; Greek letters are spelled out and accents are left off, so that a
receptor named with a beta is found however it was typed. A query drops words that nearly every abstract holds, unless nothing else is left.
"""

import re
import unicodedata
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

MOST_QUERY_CHARS = 512
MOST_QUERY_TERMS = 48
_WORD = re.compile(r"[^\W_]+")
_FOREIGN = re.compile(r"[^\x00-\x7f]+")
_COMMON = frozenset(
    _WORD.findall(
        "a an the of in on for to by with from at as is are was were be been do does did which what who how when where why "
        "and or that this these those it its can may into than"
    )
)


def terms_of(text: str) -> list[str]:
    """The terms of a text, in order, repeats included."""
    return _WORD.findall((text if text.isascii() else _FOREIGN.sub(lambda found: _folded(found.group()), text)).lower())


@lru_cache(maxsize=65536)
def _folded(letters: str) -> str:
    return "".join(_spelled(char) for char in unicodedata.normalize("NFKD", letters))


def _spelled(char: str) -> str:
    name = unicodedata.name(char, "")
    if name.startswith("GREEK") and " LETTER " in name:
        return f" {name.partition(' LETTER ')[2].split()[0].lower()} "
    return "" if unicodedata.combining(char) else char


def cleaned_query(query: str) -> str:
    """A query as it may be sent and kept: one line of well-formed text, at most MOST_QUERY_CHARS long."""
    return " ".join(query.encode("utf-8", "replace").decode("utf-8").split())[:MOST_QUERY_CHARS].strip()


def query_terms(query: str) -> list[str]:
    """What a query is searched by: at most MOST_QUERY_TERMS distinct terms in the order they came."""
    terms = list(dict.fromkeys(terms_of(cleaned_query(query))))
    telling = [term for term in terms if term not in _COMMON]
    return (telling or terms)[:MOST_QUERY_TERMS]


def term_keys(terms: list[str]) -> NDArray[np.uint64]:
    """uint64 [n]: the 64-bit hash under which an index holds each term.

    Two of ten million terms share one with a chance of 3 in a million; they would be counted as one term.
    """
    return np.fromiter((xxhash.xxh3_64_intdigest(term.encode()) for term in terms), np.uint64, len(terms))
