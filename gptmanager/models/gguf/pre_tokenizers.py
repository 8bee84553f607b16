r"""A table of the pre-tokenizers of byte-level BPE, by their names in `tokenizer.ggml.pre`.

A pre-tokenizer is a list of regular expressions, which are applied in order: each expression splits
the pieces so far into its matches and the text between them. The expressions are those of
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER_LOWER = (
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+",
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*",
)
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_EAST_ASIAN = "[一-龥ࠀ-一가-퟿]+"


@dataclass(frozen=True)
class PreTokenizer:
    """The regular expressions of a pre-tokenizer, and options of the tokenizers that use it.

    `ignore_merges`: a piece that is itself a token becomes that token without merges. `add_bos`:
    whether a BOS token is added if the file does not have `add_bos_token`.
    """

    patterns: Sequence[str]
    ignore_merges: bool = False
    add_bos: bool = False


def _alternatives(*patterns: str) -> tuple[str, ...]:
    return ("|".join(patterns),)


# The first of 512, 256, 128, ..., 4, 2 and 1 white-space characters after which white space or the
# end of the text follows; if none of these fits, one white-space character.
_FALLING_SPACES = (
    *(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1)),
    r"\s{1,2}(?!\S)",
    r"\s{1}",
)
_LLAMA3 = _alternatives(_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _SIGNS, _SPACES)
_QWEN2 = _alternatives(_CONTRACTIONS, _LETTERS, r"\p{N}", _SIGNS, _SPACES)
_GPT4O = _alternatives(
    *(part + _CONTRACTIONS + "?" for part in _UPPER_LOWER),
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    _SPACES,
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    _ASCII_SIGNS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
# Latin, Greek, Cyrillic, Georgian, Cherokee and other scripts with two cases
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-"
    "ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"

_DEFAULT = PreTokenizer(
    (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
)
# Each pre-tokenizer, and all its names, separated by spaces.
_NAMED: Sequence[tuple[PreTokenizer, str]] = (
    (_DEFAULT, "default"),
    (
        PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (
        PreTokenizer(
            _alternatives(
                _CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _SIGNS, r"\s*[\r\n]+", *_FALLING_SPACES
            )
        ),
        "jais-2",
    ),
    (PreTokenizer(_LLAMA3), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer(_LLAMA3, ignore_merges=True), "glm4 glm5"),
    (
        PreTokenizer((_WORDS,)),
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
    ),
    (
        PreTokenizer((r"\p{N}", _WORDS)),
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    ),
    (
        PreTokenizer(_QWEN2),
        "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2",
    ),
    (
        PreTokenizer(
            _alternatives(
                _CONTRACTIONS,
                r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                _SPACES,
            )
        ),
        "qwen35",
    ),
    (
        PreTokenizer(
            _alternatives(*_UPPER_LOWER, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES),
            ignore_merges=True,
            add_bos=True,
        ),
        "tekken",
    ),
    (PreTokenizer(_GPT4O), "gpt-4o llama4 kanana2 minimax-m2"),
    (
        PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
        "deepseek-coder",
    ),
    (
        PreTokenizer(
            (
                "[\r\n]",
                rf"\s?[{_CASED}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                _EAST_ASIAN,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (PreTokenizer(_DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm"),
    (
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _WORDS, "[0-9][0-9][0-9]")),
        "falcon",
    ),
    (PreTokenizer((_BLOOM,)), "poro-chat bloom gpt3-finnish"),
    (PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    (
        PreTokenizer(
            _alternatives(
                r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])",
                _LETTERS,
                r"\p{N}",
                _SIGNS,
                r"\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        "bailingmoe bailingmoe2 llada-moe",
    ),
    (
        PreTokenizer(
            _alternatives(_CONTRACTIONS, _LETTERS, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES)
        ),
        "seed-coder",
    ),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: pre_tokenizer for pre_tokenizer, names in _NAMED for name in names.split()
}
