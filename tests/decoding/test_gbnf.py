"""Grammars in GBNF: the texts that they permit, and errors of those that cannot be read."""

from __future__ import annotations

import json
import re

import pytest
from guided_requests import asked, serve, text
from text_checkpoint import END_ID, byte_tokenizer

from gptmanager import GuidedDecoding
from gptmanager.decoding.guided.gbnf import is_gbnf
from gptmanager.errors import InvalidRequestError

ARITHMETIC = r"""
# equations, one on each line
root  ::= (expr "=" ws term "\n"){1,3}
expr  ::= term ([-+*/] term){0,3}   # left to right
term  ::= ident | num | "(" ws num ")" ws
ident ::= [a-z] [a-z0-9_]{0,3} ws
num   ::= [0-9]{1,3} ws
ws    ::= [ \t\n]{0,2}
"""
TERM = r"([a-z][a-z0-9_]{0,3}|[0-9]{1,3}|\([ \t\n]{0,2}[0-9]{1,3}[ \t\n]{0,2}\))[ \t\n]{0,2}"
LINE = rf"{TERM}([-+*/]{TERM}){{0,3}}=[ \t\n]{{0,2}}{TERM}\n"
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (
    string ":" ws value ("," ws string ":" ws value){0,2}
  )? "}" ws
array  ::= "[" ws (value ("," ws value){0,2})? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  ){0,5} "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,4})? ([eE] [-+]? [0-9]{1,2})? ws
ws     ::= | " " | "\n" [ \t]{0,2}
"""


def is_permitted(guided, grammar, written):
    matcher = guided.gbnf(grammar).prepare("cpu").result(30).deep_copy()
    tokens = guided._tokenizer.tokenize_str(written)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def fault_of(guided, grammar):
    with pytest.raises(InvalidRequestError, match="^logits_post_processor gbnf: ") as refused:
        guided.gbnf(grammar).prepare("cpu").result(30)
    return str(refused.value).removeprefix("logits_post_processor gbnf: ")


def test_outputs_of_a_model_fit_their_grammars():
    from gptmanager.callbacks import load_guided_decoding, load_tokenizer

    guided, tokenizer = (
        load("examples/tiny_llama") for load in (load_guided_decoding, load_tokenizer)
    )
    grammars = [guided.gbnf(ARITHMETIC), guided.gbnf(JSON)] * 4
    host = serve(
        [asked(tokenizer, i, grammar, 400, temperature=3.0) for i, grammar in enumerate(grammars)]
    )
    for i in range(0, 8, 2):
        assert re.fullmatch(
            f"({LINE}){{1,3}}", text(tokenizer, host, i).removesuffix("<|endoftext|>")
        )
        json.loads(text(tokenizer, host, i + 1).removesuffix("<|endoftext|>"))


@pytest.mark.parametrize(
    ("grammar", "permitted", "forbidden"),
    [
        (ARITHMETIC, ["a_1 =\n2\t\n", "1+2 *b=( 3 )\n", "0=0\n1=1\n"], ["", "1", "a=b", "1+=2\n"]),
        (JSON, ['{"a": [1, -0.5e3, "ü\\u00e9"]}', "{}", '{\n "" :null}'], ["[]", '{"a"}', "{01}"]),
        # repetitions of a rule end before its longest match, too
        ('root ::= a "x"\na ::= [a-z]*', ["x", "abcx", "xxx"], ["", "abc"]),
        ('root ::= _a A-a\n_a ::= "a"*\nA-a ::= "ab"', ["ab", "aaab"], ["a", "b"]),
        ("root ::= . .", ["ab", "\né", "\r\n"], ["a", "abc"]),
        (r'root ::= "\u00e9" [\u00e0-\u00ef\U0001F600]', ["éé", "éà", "é😀"], ["é", "ea"]),
        (r'root ::= "\x41\u0042\"\\\n\[\]"', ['AB"\\\n[]'], ["AB"]),
        (r'root ::= [\]\[\x5e\u002d\\] [a\-z]', ["]a", "[-", "^z", "--", "\\a"], ["ab", "/a"]),
        ('root ::= "a"\r\n  | "b" # c\r\n | "c"\r\n', ["a", "b", "c"], ["", "d"]),
        (r"root ::= [a\x26\x26b] [+-\x2d]", ["a+", "&,", "b-"], ["a.", "c+"]),
        (r'root ::= "\\u0041"', ["\\u0041"], ["A"]),
        ('root ::= "a#" # "b"\n\n  # c\n  | "b" # |\r\n\t| [#"|]\nc ::= "d"',
         ["a#", "b", "#", '"', "|"], ["a", "c", "d"]),
        ('root ::= ["] "/" [/] [^/"]', ['"//a', '"//\n'], ['"///']),
        ('root ::= "A a" Bb\nBb ::= "B A"', ["A aB A"], ["a aB A", "A aB a"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2}', ["aab", "aabbcc"], ["ab", "aaccc", "aabccc"]),
        # the lexer prefers a longer literal, as the page says
        ('root ::= [a-z ]* "end"', ["set end", "exend"], ["seen end", "set"]),
        ("root ::= [𝄞-𝄢ぁ-ゟ]+", ["𝄞", "あゟ"], ["", "a"]),
    ],
)  # fmt: skip
def test_a_grammar_permits_its_texts_and_no_others(byte_guided, grammar, permitted, forbidden):
    assert is_gbnf(grammar)
    for written in permitted:
        assert is_permitted(byte_guided, grammar, written), written
    for written in forbidden:
        assert not is_permitted(byte_guided, grammar, written), written


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ("", "No 'root' rule found"),
        ('a ::= "b"', "No 'root' rule found"),
        ("root ::= x", "Rule 'x' not found"),
        ('root ::= "a', "Unexpected end of input at line 1"),
        ('root ::= "\\', "the grammar ends inside an escape"),
        ('root ::=\n  ("a"', "Expected ')' at line 2"),
        ("root ::= <think>", "Expected name at line 1, 'root ::= ' ^ '<think>'"),
        (r'root ::= "\d"', r"Invalid escape sequence \d at line 1"),
        (r'root ::= "\ud800"', r"the escape \ud800 must be a Unicode character"),
        (r'root ::= "\UFFFFFFFF"', r"the escape \UFFFFFFFF must be a Unicode character"),
        ("root ::= [a&&b]", r"the character class [a&&b] has &&, which is a set operator"),
        ("root ::= [+--]", r"write - as \x2d"),
        ("root ::= [~~]", r"write ~ as \x7e"),
        ('root ::= "a"{,3}', "Expected integer at line 1"),
        ('root ::= "a\tb"', "converted to Lark: 3(10): lexer error"),
        ('root ::= 1a\n1a ::= "b"', "converted to Lark: 3(8): Expected value"),
        ('root ::= a-b a_b\na-b ::= "a"\na_b ::= "b"', "Rule 'A_B' already exists"),
        ("root ::= []", 'converted to Lark: at 3(8): invalid regex "[]"'),
        ('root ::= ("a"+)?', "converted to Lark: 3(12): Expected value"),
        ('root ::= A a\nA ::= "a"\na ::= "b" a | "c"', 'duplicate rule: "a"'),
        ('root ::= start\nstart ::= "a"', "Rule 'start' already exists"),
        ("root ::= root", "the grammar permits no text"),
        ("root ::= " + "(" * 10**6, "the grammar is nested too deeply"),
        ('root ::= "a"{' + "9" * 10**6 + "}", "Exceeds the limit (4300"),
        ("root ::= " + "[" * 10**6, "Unexpected end of input"),
        ("root ::= " + "\\" * 10**6, "Expected name at line 1"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_read_is_refused_with_the_place(byte_guided, grammar, fault):
    assert fault in fault_of(byte_guided, grammar)


def test_a_grammar_that_is_converted_for_too_long_is_refused():
    guided = GuidedDecoding(byte_tokenizer(), [END_ID], compile_timeout_s=1.0)
    chain = "".join(f"r{i} ::= r{i + 1}\n" for i in range(40_000))
    grammar = f'root ::= r0\n{chain}r40000 ::= "a"'
    assert "it takes more than 1 s to compile" in fault_of(guided, grammar)


def test_a_grammar_of_many_comments_is_converted_in_time(byte_guided):
    assert is_permitted(byte_guided, "#\n" * 500_000 + 'root ::= "a"', "a")


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('root ::= start\nstart ::= "a"', True),
        ('# start: x\n  root-1\t::="a"', True),
        ("", False),
        ('start: "a::="', False),
        ('start[capture]: x\nx: "::="', False),
        ('// a ::= b\nstart: "a"', False),
    ],
)
def test_rules_distinguish_gbnf_from_lark(grammar, expected):
    assert is_gbnf(grammar) is expected
