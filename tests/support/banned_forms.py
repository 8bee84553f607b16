"""Forms of English that messages, docstrings and comments of the product do not have.

Each is a word that means several things here, an inverted sentence that a reader has to turn
around, or a private word where the field has one. The right side says what to write instead.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator

BANNED = {
    r"(?<![Tt]here )\b(is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|other\b)\w+": (
        "must be ..., got ...; is not a ..."
    ),
    r"\b(stands?|stood|standing)\b(?! for\b)": "is, is in",
    r"\b(lies|lie|lay|lain|lying)\b": "is, is in",
    r"\bbears?\b|\bbore\b": "has",
    r"\b(comes?|came|coming) (?!from\b|first\b|before\b|after\b)": "arrives, follows, is passed",
    r"\b(goes|gone)\b(?! wrong\b)": "is removed, has left, has disconnected",
    r"\bbeside\b": "next to, in parallel with, in addition to",
    r"\bso (many|long|much)\b": "the number, the limit",
    r"\b(told|untold)\b": "reported, unreported",
    r"\b(whom|whose)\b|\bwho\b": "which, the request that, the client that",
    r"\bturned\b(?! (off|on|into)\b)": "rotated, transposed",
    r"(?<![`\"'<])\bturns?\b(?! (off|on|into|\w+ into|\w+ off|\w+ on)\b)": "iteration; in order",
    r"(?<!dot )(?<!outer )(?<!inner )\bproducts?\b(?! of (two|its|the sizes|numbers))": (
        "matmul, gemm, gemv"
    ),
    r"\brounded rows?\b|\bwhole numbers?\b": "quantized rows; integers, int8, int16",
    r"\bbrings?\b|\bbrought\b": "provides, copies, passes",
    r"\bdeput(y|ies)\b|\b[Dd]eposed\b": "a stand-in; an abandoned loop",
    r"\b(its|their) time (was|is) over\b": "the request timed out",
    r"\bnobody\b|\bsomebody\b": "nothing, no caller, a client",
    r"\bas good as\b|\bever so\b|\bmay not be so\b|\bforeseen?\b": "predict",
    r"\bof what\b": "the thing itself",
}
_PATTERNS = [(re.compile(form), instead) for form, instead in BANNED.items()]
_IN_C = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def banned_forms(text: str, suffix: str) -> list[str]:
    """Return each banned form in the strings and comments of a file, with its line."""
    found = []
    for line, piece in _pieces(text, suffix):
        flat = re.sub(r"\n[ \t]*(#|//)?[ \t]*", "\n", piece)
        for pattern, instead in _PATTERNS:
            for match in pattern.finditer(flat):
                at = line + flat.count("\n", 0, match.start())
                found.append(f"{at}: {match[0]!r}, write: {instead}")
    return found


# Python 3.12 and later have tokens for the texts of f-strings, and 3.14 for those of t-strings.
_TEXTS = {
    getattr(tokenize, name, tokenize.STRING)
    for name in ("COMMENT", "STRING", "FSTRING_MIDDLE", "TSTRING_MIDDLE")
}


def _pieces(text: str, suffix: str) -> Iterator[tuple[int, str]]:
    if suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in _TEXTS:
                yield token.start[0], token.string
    else:
        for match in _IN_C.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, match[0]
