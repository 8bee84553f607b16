"""A compile-time check that a logits post-processor's kernel declares the parameters it is passed.

A launch passes only bytes, so a kernel that lacks a parameter, or declares a parameter with a wrong
type, would read arbitrary memory. The compiler's output must contain the message of each failed
`static_assert`.
"""

from __future__ import annotations

import re

PARAMETERS = (
    "float* logits",
    "const int* rows",
    "const int* slots",
    "const Params* params",
    "const int* lengths",
    "const int* prompt_lengths",
    "const int* tokens",
    "int max_seq_len",
    "int vocab_size",
)
_NAMES = [parameter.split()[-1] for parameter in PARAMETERS]
_TESTS = {"float*": "IsFloats", "const int*": "IsInts", "const Params*": "IsParams", "int": "IsInt"}
_MARK = "of a logits post-processor is passed"
_FAILED = re.compile(rf"parameter (\d+) {_MARK}")
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)

# No <type_traits>: NVRTC may not find the standard headers.
_TRAITS = """
#line 1 "signature"
namespace gptmanager_signature {
struct None {};
template <int I, class... P> struct At { typedef None type; };
template <class T, class... P> struct At<0, T, P...> { typedef T type; };
template <int I, class T, class... P> struct At<I, T, P...> {
    typedef typename At<I - 1, P...>::type type;
};
template <class T> struct Bare { typedef T type; };
template <class T> struct Bare<const T> { typedef T type; };
template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };
template <class T> struct Pointee { typedef None type; };
template <class T> struct Pointee<T*> { typedef typename Bare<T>::type type; };
template <class T> struct IsInt { static constexpr bool value = Same<T, int>::value; };
template <class T> struct IsFloats {
    static constexpr bool value = Same<typename Pointee<T>::type, float>::value;
};
template <class T> struct IsInts {
    typedef typename Pointee<T>::type E;
    static constexpr bool value = Same<E, int>::value || Same<E, unsigned>::value;
};
template <class T> struct SizeOf { static constexpr unsigned long long value = sizeof(T); };
template <> struct SizeOf<void> { static constexpr unsigned long long value = 1; };
template <class T> struct IsParams {  // the struct itself, or a pointer to its bytes or words
    typedef typename Pointee<T>::type E;
    static constexpr bool value = !Same<E, None>::value && PARAMS_SIZE % SizeOf<E>::value == 0 &&
        (!__is_class(E) || PARAMS_SIZE == SizeOf<E>::value);
};
template <class F> struct Check;
"""


def with_signature(source: str, kernel_name: str) -> str:
    """Return `source` with a check that compiles only if the kernel has the types of `PARAMETERS`.

    Names of parameters are not checked.
    """
    tests = "".join(
        f"    static_assert({_TESTS[kind]}<typename At<{index}, P...>::type>::value,\n"
        f'        "parameter {index + 1} {_MARK}");\n'
        for index, (kind, _, _) in enumerate(p.rpartition(" ") for p in PARAMETERS)
    )
    count = len(PARAMETERS)
    tests += f'    static_assert(sizeof...(P) <= {count}, "parameter {count + 1} {_MARK}");\n'
    check = f"template <class... P> struct Check<void (*)(P...)> {{\n{tests}    int checked;\n}};\n"
    use = f'static_assert(sizeof(gptmanager_signature::Check<decltype(&{kernel_name})>) > 0, "");\n'
    return f"{source}\n{_TRAITS}{check}}}\n{use}"


def difference(log: str, source: str, kernel_name: str) -> str:
    """Return how the kernel's name or parameters differ from what is passed; '' if they do not.

    `log` is the compiler's output for the result of `with_signature`, and `source` is the source
    without the check.
    """
    failed = [int(number) for number in _FAILED.findall(log)]
    if not failed:
        name = _bare(kernel_name)
        is_other = name in log and name not in source
        return f"kernel_name = {kernel_name!r} is not in the source: {log}" if is_other else ""
    passed = f"; passed are ({', '.join(PARAMETERS)})"
    declared = _declared(source, kernel_name)
    names = [_name(parameter) for parameter in declared]
    missing = [p for p, name in zip(PARAMETERS, _NAMES, strict=True) if name not in names]
    extra = [p for p, name in zip(declared, names, strict=True) if name not in _NAMES]
    first = min(failed)
    if declared and len(declared) != len(PARAMETERS):
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has {', '.join(extra)} too many"] if extra and not missing else []
        what = f"takes {len(declared)} parameters, not {len(PARAMETERS)}"
        return f"{kernel_name} {what}: it {' and '.join(parts) or 'repeats one'}{passed}"
    found = f" is declared `{declared[first - 1]}`" if len(declared) >= first else " differs"
    if first > len(PARAMETERS):
        return f"{kernel_name}: parameter {first}{found} and is one too many{passed}"
    expected = PARAMETERS[first - 1]
    size = " of PARAMS_SIZE bytes, the size of params_dtype" if "Params" in expected else ""
    return f"{kernel_name}: parameter {first}{found}, expected `{expected}`{size}{passed}"


def _declared(source: str, kernel_name: str) -> list[str]:
    """Return the kernel's parameters as declared in its source; empty if they are not found."""
    name = _bare(kernel_name)
    text = _COMMENT.sub(" ", source)
    found = re.search(rf"\b__global__\b[^;{{}}]*?\b{re.escape(name)}\s*\(([^()]*)\)", text)
    if found is None:
        return []
    return [" ".join(part.split()) for part in found[1].split(",") if part.strip()]


def _bare(kernel_name: str) -> str:
    """Return the name of a kernel without its namespace and template arguments."""
    return kernel_name.partition("<")[0].rpartition("::")[2].strip()


def _name(parameter: str) -> str:
    words = re.findall(r"\w+", parameter.partition("[")[0])
    return words[-1] if words else ""
