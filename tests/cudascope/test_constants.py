"""Constant expressions: their values and types by hand and by g++, and where a kernel needs them."""

import re
import subprocess
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cudascope import CudaKernel
from cudascope.cpp.constants import UNKNOWN, Reader, Unreadable, Value
from cudascope.cpp.definitions import ConstantError
from cudascope.cpp.file import read
from cudascope.cpp.tokens import split, substitute, text_of, tokens_of

NAMES = """
#define MACRO 1 + 2
#define NESTED MACRO * 2
constexpr int N = 1 + 2;
constexpr unsigned char SMALL = 250;
const unsigned MASK{0xF0F0F0F0u}, OTHER = -2;
constexpr auto WIDE = 1ll << 40;
constexpr float QUARTER = 0.25, TENTH = 0.1;
constexpr short NEGATIVE = -7;
constexpr bool YES = 4;
enum Color { RED, GREEN = 4, BLUE };
enum Big : unsigned long { HUGE_ = 1ul << 63 };
enum class Tree : signed char { OAK = -3, ELM };
enum { LAST = 4u, BEFORE = LAST - 5 };
enum { FIRST = 4u, SECOND };
enum { HIGHEST = 2147483647, ABOVE, HALF = ABOVE / 2 };
enum class Same { SAME = 4u, LESS = SAME - 5 < 0 };
constexpr int POWER = 1 << 2, ROOT = 8 >> 1;
constexpr short EMPTY{};
namespace inner { constexpr int DEEP = 5; using Real = double; }
using Int = int;
typedef unsigned short Half;
"""
VALUES = ["MACRO", "NESTED", "N", "SMALL", "MASK", "OTHER", "WIDE", "QUARTER", "TENTH", "NEGATIVE", "YES", "BLUE"]
VALUES += ["HUGE_", "BEFORE", "FIRST", "HALF", "POWER", "inner::DEEP"]


def evaluated(expression: str, source: str = NAMES) -> Value:
    return read(source).scope.evaluate(tokens_of(expression))


# ------------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize(
    ("expression", "type", "number"),
    [
        # macros are text, constants are values
        ("N * 2", "int", 6),
        ("MACRO * 2", "int", 5),
        ("NESTED", "int", 5),
        ("-MACRO", "int", 1),
        ("-N", "int", -3),
        # literals
        ("0x7fffffff", "int", 2**31 - 1),
        ("0x80000000", "unsigned int", 2**31),
        ("2147483648", "long", 2**31),
        ("0xffffffffffffffff", "unsigned long", 2**64 - 1),
        ("017 + 0b101 + 1'000'000", "int", 15 + 5 + 10**6),
        ("3uLL", "unsigned long long", 3),
        ("3lu", "unsigned long", 3),
        ("'a'", "char", 97),
        (r"'\n' + '\x41' + '\101' + '\0' + '\''", "int", 10 + 65 + 65 + 39),
        (r"'\xff'", "char", -1),
        ("true + true", "int", 2),
        ("1.5f", "float", 1.5),
        (".5e1", "double", 5.0),
        ("0x1.8p1", "double", 3.0),
        ("1.00000017881393432617187499f", "float", float(np.float32(1 + 2**-23))),  # not rounded twice
        ("16777219", "int", 16777219),
        ("9007199791611905 * 1.0f", "float", 9007200328482816.0),  # nor are integers
        # division and remainder
        ("-7 / 2", "int", -3),
        ("-7 % 2", "int", -1),
        ("7 / -2", "int", -3),
        ("7 % -2", "int", 1),
        ("-7 / 2u", "unsigned int", (2**32 - 7) // 2),
        ("7 / 2.0f", "float", 3.5),
        # conversions
        ("-1 > 0u", "bool", 1),
        ("-1 > 0ul", "bool", 1),
        ("-1l > 0u", "bool", 0),
        ("1u - 2", "unsigned int", 2**32 - 1),
        ("1ul - 2", "unsigned long", 2**64 - 1),
        ("-1 + 0ull", "unsigned long long", 2**64 - 1),
        ("1ul + 1ll", "unsigned long long", 2),
        ("SMALL + SMALL", "int", 500),
        ("~SMALL", "int", -251),
        ("~MASK", "unsigned int", 0x0F0F0F0F),
        ("-OTHER", "unsigned int", 2),
        ("YES + 1", "int", 2),
        ("TENTH == 0.1", "bool", 0),
        ("TENTH == 0.1f", "bool", 1),
        ("0.1f * 3", "float", float(np.float32(0.1) * np.float32(3))),
        ("16777216 + 1.0f", "float", 16777216.0),
        # operators
        ("1 + 2 << 3", "int", 24),
        ("1 << 31", "int", -(2**31)),
        ("-16 >> 2", "int", -4),
        ("1u << 31 >> 31", "unsigned int", 1),
        ("1 << 3ull", "int", 8),
        ("6 & 3 ^ 1 | 8", "int", 11),
        ("1 | 3 ^ 1", "int", 3),
        ("2 ^ 3 & 1", "int", 3),
        ("2 == 1 < 3", "bool", 0),
        ("~true + ~'a'", "int", -2 - 98),
        ("1 | 2 == 2", "int", 1),
        ("8 - 4 - 2", "int", 2),
        ("!3 == 0", "bool", 1),
        ("not 0 and 1", "bool", 1),
        ("-2147483647 - 1", "int", -(2**31)),
        ("1 < 2 == true", "bool", 1),
        ("1 ? 2 : 3 ? 4 : 5", "int", 2),
        ("0 ? 'a' : 'b'", "char", 98),
        ("1 ? -1 : 0u", "unsigned int", 2**32 - 1),
        ("1 ? 1 : 2.5", "double", 1.0),
        # what is not evaluated has no overflow
        ("0 && 1 / 0", "bool", 0),
        ("1 || 1 % 0", "bool", 1),
        ("1 ? 7 : 1 / 0", "int", 7),
        ("0 ? 1 << 99 : 7", "int", 7),
        ("sizeof(1 / 0)", "unsigned long", 4),
        # casts
        ("(unsigned char)300", "unsigned char", 44),
        ("(signed char)200", "signed char", -56),
        ("unsigned(-1)", "unsigned int", 2**32 - 1),
        ("static_cast<unsigned long long>(1) << 40", "unsigned long long", 2**40),
        ("(int)-2.9 + int{3}", "int", 1),
        ("(unsigned)-0.9", "unsigned int", 0),
        ("int() + (bool)0.5 + float(1)", "float", 2.0),
        ("(float)0.1 == 0.1", "bool", 0),
        ("std::size_t(1) - uint8_t(2)", "unsigned long", 2**64 - 1),
        ("(Int)2.5 + Half(65537)", "int", 3),
        ("inner::Real(1) / 2", "double", 0.5),
        ("(int64_t)1 << 40", "long", 2**40),
        ("(N) - 1", "int", 2),
        # sizes
        ("sizeof(double) * 2", "unsigned long", 16),
        ("sizeof(float4) + sizeof(half) + sizeof(char*)", "unsigned long", 16 + 2 + 8),
        ("sizeof SMALL", "unsigned long", 1),
        ("sizeof(SMALL + 0) - 1", "unsigned long", 3),
        ("sizeof(unsigned long) / sizeof(Int)", "unsigned long", 2),
        # names
        ("BLUE + RED", "int", 5),
        ("Color::GREEN", "int", 4),
        ("(int)Tree::ELM", "int", -2),
        ("ABOVE", "unsigned int", 2**31),
        ("HALF", "unsigned int", 2**30),
        ("(int)Same::LESS", "int", 1),
        ("POWER * 10 + ROOT", "int", 44),
        ("sizeof(Same::SAME) + sizeof(Tree::OAK)", "unsigned long", 5),
        ("EMPTY", "short", 0),
        ("LAST > BEFORE", "bool", 0),  # 4u - 5 is unsigned, so the type of both is
        ("-1 < FIRST", "bool", 1),  # 4u outside of its enumeration
        ("HUGE_ / 2", "unsigned long", 2**62),
        ("::inner::DEEP + DEEP", "int", 10),
        ("sizeof(MASK) + MASK % 16", "unsigned long", 4),
    ],
)
def test_an_expression_has_the_value_and_the_type_of_cpp(expression, type, number):
    assert evaluated(expression) == (type, number)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("2147483647 + 1", "overflows int"),
        ("-2147483647 - 2", "overflows int"),
        ("65536 * 65536", "overflows int"),
        ("-(-2147483647 - 1)", "overflows int"),
        ("(-2147483647 - 1) / -1", "overflows int"),
        ("(-2147483647 - 1) % -1", "overflows int"),
        ("9223372036854775807 + 1", "overflows long"),
        ("1 / 0", "divides by zero"),
        ("1 % (N - 3)", "divides by zero"),
        ("1.0f / 0", "divides by zero"),
        ("1 << 32", "shifts int by 32 bits"),
        ("1ul >> 64", "shifts unsigned long by 64 bits"),
        ("1 << -1", "shifts int by -1 bits"),
        ("(int)1e10", "overflows int"),
        ("(unsigned)-1.0", "overflows unsigned int"),
        ("1e38f * 10", "overflows float"),
        ("1e39f", "overflows float"),
        ("(float)1e300", "overflows float"),
        ("18446744073709551616", "no integer type holds"),
        ("0 || 1 / 0", "divides by zero"),
    ],
)
def test_an_expression_without_a_value_is_refused_by_name(expression, why):
    with pytest.raises(ConstantError, match=re.escape(f"`{text_of(tokens_of(expression))}` ") + f".*{why}"):
        evaluated(expression)


def test_the_refusal_names_the_constant_that_has_no_value_every_time():
    scope = read("constexpr int ZERO = 0; constexpr int BAD = 4 / ZERO; constexpr int WORSE = BAD + 1;").scope
    for _ in range(2):
        with pytest.raises(ConstantError, match="`4 / ZERO` divides by zero"):
            scope.evaluate(["WORSE"])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("f(3)", UNKNOWN),
        ("std::max(N, 4)", UNKNOWN),
        ("max<int>(3, 4) + 1", UNKNOWN),
        ("table[2].x + 1", UNKNOWN),
        ("sizeof(Struct)", Value("unsigned long", None)),
        ("f(3) && 0", Value("bool", 0)),
        ("1 || f(3)", Value("bool", 1)),
        ("0 ? f(3) : 4", UNKNOWN),  # the type of f may be the common one
        ("f(3) ? 1 / 0 : 4", Value("int", None)),
        ("(int)f(3)", Value("int", None)),
        ("sizeof((int)f(3))", Value("unsigned long", 4)),
        ("f(3) / 0", UNKNOWN),
        ("5 % 2.0", UNKNOWN),
        ("1.0l", UNKNOWN),
        ("", UNKNOWN),
        ("1 +", UNKNOWN),
        ("(1", UNKNOWN),
        ("1 2", UNKNOWN),
        ("a::", UNKNOWN),
        ("09", UNKNOWN),
        ("'ab'", UNKNOWN),
        (r"'\777'", UNKNOWN),
        ('"text"', UNKNOWN),
    ],
)
def test_what_only_the_compiler_can_tell_is_unknown(expression, value):
    assert evaluated(expression) == value


@pytest.mark.parametrize(
    "source",
    [
        "namespace a { constexpr int X = 1; } namespace b { constexpr int X = 2; }",
        "#if A(1)\nconstexpr int X = 1;\n#else\n#define X 1\n#endif",
        "#if A(1)\n#define X 1\n#else\n#define X 2\n#endif",
        "constexpr int X = 1\n#if A(1)\n+ 1\n#endif\n;",
        "enum { OTHER,\n#if A(1)\nMORE,\n#endif\nX };",
        "enum { X = f(), Y };",
        "enum E : Unknown { X };",
        "enum class E { X };",
        "constexpr int Y = 2, *X = 0;",
        "constexpr Unknown X = 1;",
        "constexpr int X = f();",
        "constexpr int X = Y, Y = X;",
        "const int* X = 0;",
        "constexpr int X[2] = {1, 2};",
        "int X = 1;",
        "template <int N> constexpr int X = N;",
        "struct S { static constexpr int X = 1; enum { Y }; };",
        "enum E Z[] = {X, Y};",
        "#define X(n) n",
    ],
)
def test_a_name_that_may_mean_another_thing_is_unknown(source):
    assert evaluated("X + 1", source).number is None


def test_a_shift_is_not_a_bracket_of_a_template():
    assert [text_of(part) for part in split(tokens_of("1 << (2, 3), A<4, 1 << 2>, 5 >> 1"))] == [
        "1 << (2, 3)", "A < 4, 1 << 2 >", "5 >> 1"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "name", "default", "value"),
    [
        ("int N", "k<3 + 4>", "M + N", ("int", 27)),  # M has the N of the file
        ("int N", "k<N * 3>", "N", ("int", 6)),
        ("int A, int N", "k<5, A + 1>", "N", ("int", 101)),  # the A of the file
        ("int A, int B = A * 2", "k<1 + 1>", "B", ("int", 4)),
        ("unsigned char C", "k<258 - 2>", "C", ("unsigned char", 0)),
        ("class T, T C", "k<long, 3>", "C", ("long", 3)),
        ("auto C", "k<3u>", "C - 4", ("unsigned int", 2**32 - 1)),
        ("class T = short, int S = sizeof(T)", "k<>", "S + sizeof(T)", ("unsigned long", 4)),
        ("bool", "k<true>", "N", ("int", 2)),
    ],
)
def test_a_template_argument_is_a_value_of_its_type(template, name, default, value):
    source = "constexpr int N = 2, A = 100; constexpr int M = N * 10;"
    made = CudaKernel(f"{source} template <{template}> __global__ void k(int n = {default}) {{}}", name)
    assert made.parameters[0].default.value == value


@pytest.mark.parametrize(
    ("directives", "is_taken"),
    [
        ("#define A 1 + 2\n#if A * 2 == 5", True),
        ("#define A 2\n#define A 3\n#if A == 3", True),
        ("#define A 2\n#undef A\n#if A == 0", True),
        ("#define A B\n#define B 2\n#if A == 2 && defined(A) && !defined C", True),
        ("#define A A + 1\n#if A == 1", None),
        ("#define A(x) 1\n#if defined A && true", True),
        ("#define A(x) 1\n#if A(2)", None),
        ("#define A defined B\n#define B 0\n#if A", None),
        ("#define A defined B\n#define B - 1\n#if A", None),
        ("#define A\n#if A == 1", None),
        ("#define A 2\n#if __CUDA_ARCH__ > 800\n#define A 3\n#endif\n#if A == 2", None),
        ("#define A 2\n#if __CUDA_ARCH__ > 800\n#undef A\n#endif\n#if A == 2", None),
        ("#if 1 / 0", None),
        ("#if 0 && 1 / 0", False),
        ("#if 1.0 > 0", None),
        ("#if __has_include(<x>) || 1", True),
    ],
)
def test_a_condition_is_known_as_far_as_the_text_tells(directives, is_taken):
    source = f"{directives}\nusing T = int;\n#else\nusing T = short;\n#endif\n__global__ void k(T x) {{}}"
    assert read(source).named["T"] == {True: ["int"], False: ["short"], None: ["?"]}[is_taken]


# ------------------------------------------------------------------------------------------------ by g++

NUMBERS = [0, 1, 2, 3, 5, 7, 31, 63, 100, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1]
OTHERS = ["'a'", r"'\377'", r"'\t'", "true", "false", "1'0'0"]
FLOATS = ["1.5f", "0.1f", "0.1", "1.e10", ".25f", "3.f", "1.e-3f", "16777217.0f", "0x1.p-3"]
FLOATING = re.compile(r"\.|QUARTER|TENTH|float|double")
LOGICAL = re.compile(r"(?<!<)<(?!<)|(?<!>)>(?!>)|[=!]=|!|&&|\|\||\?|bool")  # in them g++ 12 accepts some overflows
TYPES = ["bool", "char", "signed char", "unsigned char", "short", "unsigned short", "int", "unsigned", "long"]
TYPES += ["unsigned long", "long long", "unsigned long long", "float", "double", "std::size_t", "Int", "Half"]


def literal(random: Random) -> str:
    number = random.choice(NUMBERS)
    digits = random.choice([str(number), str(number), hex(number), bin(number), f"0{number:o}"])
    return random.choice([digits + random.choice(["", "", "u", "l", "UL", "ll", "uLL"]), random.choice(OTHERS)])


def expression(random: Random, depth: int, names: list[str], *, is_directive: bool = False) -> str:
    """A random expression; without casts, floats and sizes if it is for an #if."""

    def part() -> str:
        return expression(random, depth - 1, names, is_directive=is_directive)

    def integer() -> str:
        return f"(int)({written})" if FLOATING.search(written := part()) else written

    def binary() -> str:
        operation = random.choice(BINARY)
        operand = part if operation in ARITHMETIC else integer
        return f"{operand()} {operation} {operand()}"

    if depth == 0 or random.random() < 0.1:
        leaves = [literal(random), literal(random), random.choice(names)]
        return random.choice(leaves if is_directive else [*leaves, random.choice(FLOATS)])
    forms = [
        lambda: f"({binary()})",
        lambda: f"({binary()})",
        lambda: f"{integer()} {random.choice(BINARY)} {integer()}",
        lambda: f"({integer()} {random.choice(['<<', '>>'])} {random.randrange(33)})",
        lambda: f"{random.choice('+-!')}({part()})",
        lambda: f"~({integer()})",
        lambda: f"({part()} ? {part()} : {part()})",
    ]
    casts = [
        lambda: f"({random.choice(TYPES)})({part()})",
        lambda: f"static_cast<{random.choice(TYPES)}>({part()})",
        lambda: f"sizeof({part()})",
    ]
    return random.choice(forms if is_directive else forms + casts)()


ARITHMETIC = ["+", "-", "*", "/", "<", ">", "<=", ">=", "==", "!=", "&&", "||"]
BINARY = [*ARITHMETIC, "%", "&", "|", "^", "<<", ">>"]
ONE_COMPILATION = settings(
    max_examples=2, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
SHOW = "\n".join(
    f'void show({type} x) {{ std::printf("{type} {form}\\n", x); }}'
    for type, form in {
        "bool": "%d", "char": "%d", "signed char": "%d", "unsigned char": "%d", "short": "%d", "unsigned short": "%d",
        "int": "%d", "unsigned int": "%u", "long": "%ld", "unsigned long": "%lu", "long long": "%lld",
        "unsigned long long": "%llu", "float": "%a", "double": "%a",
    }.items()
)  # fmt: skip


def gcc(source: str, *options: str) -> subprocess.CompletedProcess:
    command = ["g++", "-std=c++20", "-fsigned-char", "-w", "-x", "c++", "-", *options]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False)


@ONE_COMPILATION
@given(st.randoms(use_true_random=True))
def test_values_and_types_are_those_of_gcc(tmp_path_factory, random):
    known, refused = {}, []
    scope = read(NAMES).scope
    for written in (expression(random, random.randrange(1, 4), VALUES) for _ in range(300)):
        try:
            value = scope.evaluate(tokens_of(written))
        except ConstantError:
            value = UNKNOWN
        if value.number is not None:
            known[written] = value
        elif not FLOATING.search(written) and not LOGICAL.search(written):
            refused.append(written)
    assert len(known) > 100
    program = tmp_path_factory.mktemp("gcc") / "program"
    lines = "\n".join(f"{{ constexpr auto x = {each}; show(x); }}" for each in known)
    built = gcc(f"#include <cstdio>\n#include <cstddef>\n{NAMES}{SHOW}\nint main() {{\n{lines}\n}}", "-o", str(program))
    assert built.returncode == 0, built.stderr
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    for (written, value), line in zip(known.items(), printed, strict=True):
        type, _, number = line.rpartition(" ")
        number = float.fromhex(number) if type in ("float", "double") else int(number)
        assert (written, *value) == (written, type, number)
    header = f"#include <cstddef>\n{NAMES}\n#line 1\n"
    lines = "\n".join(f"constexpr auto x{i} = {each};" for i, each in enumerate(refused))
    checked = gcc(header + lines, "-fsyntax-only", "-fmax-errors=0")
    found = {int(line) for line in re.findall(r"^<stdin>:(\d+):\d+: error", checked.stderr, re.MULTILINE)}
    assert [each for i, each in enumerate(refused, 1) if i not in found] == []


@ONE_COMPILATION
@given(st.randoms(use_true_random=True))
def test_conditions_are_those_of_gcc(random):
    macros = {"MACRO": tokens_of("1 + 2"), "NESTED": tokens_of("MACRO * 2")}
    text, right = "#define MACRO 1 + 2\n#define NESTED MACRO * 2\n", []
    for i in range(400):
        written = expression(random, random.randrange(1, 4), ["MACRO", "NESTED", "NOTHING"], is_directive=True)
        if "?" in written and re.search("[/%]", written):
            continue  # gcc gives a division by zero that it leaves out the type of the dividend
        try:
            reader = Reader(substitute(tokens_of(written), macros), lambda name: Value("long", int(name == "true")))
            type, number = reader.read()
        except (Unreadable, ArithmeticError):
            continue
        signed = "<" if type == "long" else ">"
        literal = f"{number}u" if type == "unsigned long" else f"{number}" if number > -(2**63) else f"{number + 1} - 1"
        text += f"#if ({written}) == ({literal}) && ({written}) * 0 - 1 {signed} 0\n{i}\n#else\n{written}\n#endif\n"
        right.append(str(i))
    assert len(right) > 200
    assert gcc(text, "-E", "-P").stdout.split("\n")[:-1] == right


# ------------------------------------------------------------------------------------------------ in kernels

DEFAULTS = {
    "constant": ("int", "N * 2"),
    "macro": ("int", "MACRO * 2"),
    "given_macro": ("int", "GIVEN * 2"),
    "nested": ("long", "AREA - 1"),
    "negative": ("int", "-7 / 2"),
    "remainder": ("int", "-7 % 4"),
    "quotient": ("float", "-7 / 2"),
    "real": ("float", "-7 / 2.0"),
    "comparison": ("bool", "-1 > 0u"),
    "chosen": ("int", "N > 2 ? MASK >> 30 : 1 / 0"),
    "wrapped": ("unsigned", "-1"),
    "wide": ("unsigned long long", "-1"),
    "small": ("uint8_t", "300"),
    "cut_off": ("int", "2.9"),
    "character": ("char", "'a' + 1"),
    "size": ("size_t", "sizeof(float4) * N"),
    "enumerator": ("int", "Mode::FAST | SLOW"),
    "enumeration": ("Mode", "FAST"),
    "mask": ("unsigned", "~0u << 4 & 0xff"),
    "tenth": ("double", "TENTH"),
    "large": ("float", "9007199791611905"),  # rounded once
    "pointer": ("float*", "nullptr"),
    "zero_pointer": ("float*", "0"),
}
LENGTHS = {
    "threes": ("int", "N", (3,)),
    "twice": ("float", "N * 2", (6,)),
    "halved": ("float", "-7 / 2 + 5", (2,)),
    "shifted": ("double", "1 << N", (8,)),
    "of_macro": ("int", "MACRO * 2", (5,)),
    "of_enumerators": ("float2", "SLOW][FAST", (8, 4, 2)),
    "of_sizes": ("char", "2][sizeof(int) * AREA / 4u", (2, 9)),
}
BRANCHES = ["MACRO * 2 == 6", "(1 - 8) / 2 == -3", "-1 > 0u", "GIVEN * 2 == 11", "(1 << 31) < 0", "-7 % 4 == -3",
            "defined MACRO && ~0 == -1", "0xffffffff < 0", "'a' == 97 ? 0 : 1"]  # fmt: skip
NEW_LINE = "\n"
KERNEL = f"""
#define MACRO 1 + 2
constexpr int N = 1 + 2;
const unsigned MASK{{0xF0000000u}};
constexpr auto AREA = long(N) * N;
constexpr float TENTH = 0.1;
enum Mode {{ FAST = 4, SLOW = FAST * 2 }};
{"".join(f"__constant__ {type} {name}[{lengths}];" for name, (type, lengths, _) in LENGTHS.items())}
template <class T> __device__ void keep(char* out, T passed, T right) {{
    *(T*)out = passed;
    *(T*)(out + 8) = right;
}}
{"".join(f"#if {text}{NEW_LINE}using T{i} = int;{NEW_LINE}#else{NEW_LINE}using T{i} = short;{NEW_LINE}#endif{NEW_LINE}"
         for i, text in enumerate(BRANCHES))}
__global__ void k(char* out, int* sizes{"".join(f", T{i} x{i}" for i in range(len(BRANCHES)))},
                  {", ".join(f"{type} {name} = {text}" for name, (type, text) in DEFAULTS.items())}) {{
    {"".join(f"*sizes++ = sizeof(T{i});" for i in range(len(BRANCHES)))}
    {"".join(f"keep<{type}>(out, {name}, {text}); out += 16;" for name, (type, text) in DEFAULTS.items())}
}}
"""  # fmt: skip


@pytest.fixture(scope="module")
def launched() -> tuple[CudaKernel, dict[str, np.ndarray], np.ndarray]:
    """The kernel; of each default argument what was passed and what is right; the size of each branch's type."""
    kernel = CudaKernel(KERNEL, "k", defines=["GIVEN=5 + 3"])
    out, sizes = np.full((len(DEFAULTS), 2, 8), -1, np.int8), np.zeros(len(BRANCHES), np.int32)
    kernel[1, 1](out, sizes, *(1 for _ in BRANCHES))
    return kernel, dict(zip(DEFAULTS, out, strict=True)), sizes


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_argument_is_what_cpp_passes(launched, name):
    passed, right = launched[1][name]
    assert passed.tobytes() == right.tobytes()
    assert (right != -1).any() or name in ("wrapped", "wide")


@pytest.mark.parametrize("i", range(len(BRANCHES)))
def test_the_branch_of_an_if_is_the_compilers(launched, i):
    assert launched[0].parameters[2 + i].ctype == {4: "int", 2: "short"}[int(launched[2][i])]


@pytest.mark.parametrize("name", LENGTHS)
def test_a_variable_has_the_shape_of_cpp(launched, name):
    assert launched[0].variable(name).shape == LENGTHS[name][2]


@pytest.mark.parametrize(
    ("bounds", "name", "threads"),
    [
        ("EIGHT * 32", "k<1>", 256),
        ("FOURS * 32", "k<1>", 4 + 4 * 32),
        ("N * 32", "k<4 + 4>", 256),
        ("N * 32", "k<FOURS>", 256),
        ("N * 32", "k<EIGHT - N>", 224),
        ("M * 32", "k<1 + 1>", 128),
        ("-7 / 2 + 35, 2", "k<1>", 32),
        ("sizeof(T) << 4", "k<1>", 64),
        ("sizeof(T) << 4", "k<1, 0, double>", 128),
        ("MANY", "k<1>", 512),
        ("Size::MANY / 4u * B", "k<1, true>", 128),
        ("tuned::THREADS", "k<1>", 96),
        ("f(3)", "k<1>", 1024),
        ("64\n#if __CUDA_ARCH__ >= 900\n* 2\n#endif\n", "k<1>", 1024),
    ],
)
def test_launch_bounds_are_the_most_threads(bounds, name, threads):
    source = f"""
#define FOURS 4 + 4
constexpr int EIGHT = 4 + 4, N = 1;
enum Size {{ FEW = 1 << 5, MANY = FEW << 4 }};
namespace tuned {{ static constexpr int WARPS = 3; constexpr unsigned THREADS{{WARPS * 32}}; }}
template <int N, int M = N * 2, class T = float> __global__ void __launch_bounds__({bounds}) k(int n) {{}}
"""
    if name == "k<1, true>":
        source = source.replace("int M = N * 2", "bool B")
    made = CudaKernel(source, name)
    assert made[1, threads]
    with pytest.raises(ValueError, match=f"has {threads + 1} threads, at most {threads}|block must be at most"):
        made[1, threads + 1]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("__global__ void __launch_bounds__(N / 0) k() {}", "k",
         "kernel k: its __launch_bounds__, `N / 0` divides by zero"),
        ("__global__ void k(int n = 2147483647 + N) {}", "k",
         "kernel k: the default of n, `2147483647 + N` overflows int"),
        ("constexpr int BAD = 1 << -N; __global__ void k(int* x, int n = BAD) {}", "k",
         "kernel k: the default of n, `1 << - N` shifts int by -1 bits"),
        ("template <int M> __global__ void k() {}", "k<1 % 0>",
         "name: the template argument of M in 'k<1 % 0>', `1 % 0` divides by zero"),
        ("template <int M = N << 40> __global__ void k() {}", "k<>",
         "name: the template argument of M in 'k<>', `N << 40` shifts int by 40 bits"),
    ],
)  # fmt: skip
def test_a_kernel_with_a_constant_without_a_value_is_refused(source, name, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CudaKernel(f"constexpr int N = 1; {source}", name)


@pytest.mark.parametrize(
    ("default", "error", "message"),
    [
        ("int n = f(3)", TypeError, "the default of n, f(3), cannot be told from the source: pass it"),
        ("int n = 1e10", ValueError, "the default of n, 1e10, overflows int: pass it"),
        ("float4 n = {}", TypeError, "the default of n, { }, cannot be told from the source: pass it"),
        ("int* n = f()", TypeError, "the default of n, f(), cannot be told from the source: pass it"),
        ("float n = 1e39", ValueError, "the default of n, 1e39, overflows float: pass it"),
        ("__half n = 1e6", ValueError, "n must fit in `__half`"),
    ],
)
def test_a_default_that_cannot_be_passed_is_refused_at_the_launch(default, error, message):
    made = CudaKernel(f"__global__ void k({default}) {{}}", "k")
    with pytest.raises(error, match=re.escape(message)):
        made[1, 1]()
