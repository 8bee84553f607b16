"""One mistake at a time: what may be planted in a line of CUDA C++ or of Python.

A mutation changes one line. Comments, strings and directives of the preprocessor stay as they are.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    file: str  # from the root, with slashes
    line: int  # from 1
    kind: str
    before: str  # the whole line
    after: str

    def plant(self, text: str) -> str:
        lines = text.split("\n")
        assert lines[self.line - 1] == self.before, f"{self.file} has changed"
        lines[self.line - 1] = self.after
        return "\n".join(lines)


Change = tuple[
    int, str, int, int, str
]  # line from 0, kind, first and last column, what comes there

# Patterns are those of the project's format: operators with two operands have spaces around them,
# and pointers, references and template arguments have not.
_OPERATORS = {
    "arithmetic": {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "+=": "-=", "-=": "+="}
    | {"*=": "/=", "/=": "*="},
    "comparison": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    "logic": {"&&": "||", "||": "&&"},
    "bits": {"<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "|", "^=": "|="},
}
_OPERAND = r"[\w.]+(?:\[[\w.]+\])*"
_REPLACED = (  # kind, what, by what
    ("extreme", r"\bfmaxf\(", "fminf("),
    ("extreme", r"\bmax\(", "min("),
    ("extreme", r"\bmin\(", "max("),
    ("swapped", rf"({_OPERAND}) ([-/%]) ({_OPERAND})", r"\3 \2 \1"),
    # of two numbers that the larger, the sum or the product is taken of, the order does not matter
    (
        "swapped",
        r"(?<=\w\()(?<!max\()(?<!min\()(?<!m..f\()(?<!__umulhi\()(?<!__fadd_rn\()(?<!__fmul_rn\()"
        rf"({_OPERAND}), ({_OPERAND})(?=\))",
        r"\2, \1",
    ),
    ("swapped", r"(?<=\? )([^?:]+) : ([^?:;,)]+)(?=[;,)])", r"\2 : \1"),
    ("index", r"(?<=\w\[)([a-z]\w*)(?=\])", r"\1 + 1"),
    ("conversion", r"\b__float2(half|bfloat16)_rn\b", r"__float2\1_rz"),
    ("conversion", r"\b(?:size_t|ptrdiff_t)\(", "int("),
    ("conversion", r"\b(?:size_t|ptrdiff_t) (?=\w+ =)", "int "),
    ("constant", r"-INFINITY\b", "0.0f"),
    ("constant", r"\btrue\b", "false"),
    ("constant", r"\bfalse\b", "true"),
    ("dropped", r"(?:continue|break|return);", ";"),
    ("dropped", r"^ *\K(?:__sync\w+|__threadfence|ptx::cp_async_\w+(?:<.*>)?)\(.*\);$", ";"),
    ("dropped", r"^ *\K[a-z][\w.\[\]\->]* [-+*/|&^]?= [^;]*;$", ";"),
)
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
# Launch bounds are a hint for registers, told by the table of docs/cuda_kernels.md.
_NOT_CODE = re.compile(
    r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)"
    r'|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#[^\n]*(?:\\\n[^\n]*)*',
    re.DOTALL | re.MULTILINE,
)


def mutants_of(file: str, text: str) -> list[Mutant]:
    """All that may be planted in it, by line; each changes the line in another way."""
    changes = _of_python(text) if file.endswith(".py") else _of_cuda(text)
    lines = text.split("\n")
    found: dict[tuple[int, str], Mutant] = {}
    for line, kind, first, last, new in changes:
        before = lines[line]
        after = before[:first] + new + before[last:]
        if after != before:
            found.setdefault((line, after), Mutant(file, line + 1, kind, before, after))
    return [found[key] for key in sorted(found)]


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of one file's, the same for the same seed and text; in the order of lines."""
    if count >= len(mutants):
        return mutants
    draw = random.Random(f"{seed} {mutants[0].file}")
    return sorted(draw.sample(mutants, count), key=lambda it: (it.line, it.after))


# CUDA C++ ----------------------------------------------------------------------------------------


def _of_cuda(text: str) -> Iterator[Change]:
    code = _NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for number, line in enumerate(code.split("\n")):
        line = line.rstrip()
        for kind, first, last, new in _of_line(line):
            yield number, kind, first, last, new


def _of_line(line: str) -> Iterator[tuple[str, int, int, str]]:
    for kind, others in _OPERATORS.items():
        for found in re.finditer(r"(?<= )\S{1,2}(?= )", line):
            if found[0] in others:
                yield kind, *found.span(), others[found[0]]
    for kind, pattern, new in _REPLACED:
        begin, _, rest = pattern.rpartition(r"\K")
        for found in re.finditer(f"({begin}){rest}" if begin else pattern, line):
            start = found.end(1) if begin else found.start()
            yield kind, start, found.end(), new if begin else found.expand(new)
    for found in _NUMBER.finditer(line):
        for number in {int(found[0]) + 1, abs(int(found[0]) - 1)}:
            yield "constant", *found.span(), str(number)
    for found in re.finditer(r"\bif \(", line):
        end = _closing(line, found.end())
        if end is not None:
            yield "condition", found.end(), end, f"!({line[found.end() : end]})"
            yield "condition", found.end(), end, "true"


def _closing(line: str, start: int) -> int | None:
    """Where the bracket is closed that was opened before `start`; None if it is in another line."""
    depth = 1
    for place in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[place], 0)
        if depth == 0:
            return place
    return None


# Python ------------------------------------------------------------------------------------------

_SIGNS = {  # and what is put there
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
_SWAPPED = (ast.Sub, ast.FloorDiv, ast.Div, ast.Mod)
_EXTREMES = {"min": "max", "max": "min"}


def _of_python(text: str) -> Iterator[Change]:
    lines = text.split("\n")
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        pending += _children(node)
        for kind, first, last, new in _of_node(node, lines):
            if first[0] == last[0]:
                yield first[0] - 1, kind, first[1], last[1], new


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """But annotations, decorators, texts, what is raised, and checks that lengths are equal."""
    skipped = ("annotation", "returns", "decorator_list")
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, (ast.Raise, ast.JoinedStr)) or name in skipped:
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            if isinstance(child, ast.AST):
                yield child


Place = tuple[int, int]  # line from 1, column


def _begin(node: ast.AST) -> Place:
    return node.lineno, node.col_offset


def _end(node: ast.AST) -> Place:
    return node.end_lineno, node.end_col_offset


def _of_node(node: ast.AST, lines: list[str]) -> Iterator[tuple[str, Place, Place, str]]:
    def text(first: Place, last: Place) -> str:
        return lines[first[0] - 1][first[1] : last[1]]

    def between(left: ast.AST, sign: ast.AST, right: ast.AST) -> Iterator[tuple[Place, Place, str]]:
        own, other = _SIGNS.get(type(sign), ("", ""))
        gap = text(_end(left), _begin(right))
        if own and own in gap:
            first = left.end_col_offset + gap.index(own)
            line = left.end_lineno
            yield (line, first), (line if line == right.lineno else 0, first + len(own)), other

    whole = (_begin(node), _end(node)) if hasattr(node, "lineno") else ()
    match node:
        case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]):
            kind = "comparison" if isinstance(node, ast.Compare) else "arithmetic"
            for change in between(left, sign, right):
                yield kind, *change
            simple = all(isinstance(it, (ast.Name, ast.Attribute)) for it in (left, right))
            is_in_one_line = left.end_lineno == right.lineno
            if simple and is_in_one_line and isinstance(sign, _SWAPPED):
                parts = text(*whole).partition(text(_end(left), _begin(right)))
                yield "swapped", *whole, "".join(reversed(parts))
        case ast.BoolOp(sign, values):
            for left, right in itertools.pairwise(values):
                for change in between(left, sign, right):
                    yield "logic", *change
        case ast.Constant(bool() as value):
            yield "constant", *whole, str(not value)
        case ast.Constant(int() as value):
            yield "constant", *whole, str(value + 1)
            yield "constant", *whole, str(abs(value - 1))
        case ast.Call(ast.Name(name) as called) if name in _EXTREMES:
            yield "extreme", _begin(called), _end(called), _EXTREMES[name]
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield "dropped", *whole, "pass"
        case ast.Return(None):
            yield "dropped", *whole, "pass"
        case ast.If(test) | ast.IfExp(test):
            place = _begin(test), _end(test)
            yield "condition", *place, f"not ({text(*place)})"
            yield "condition", *place, "True"
        case ast.Subscript(_, ast.Name(name) as index):
            yield "index", _begin(index), _end(index), f"{name} + 1"
