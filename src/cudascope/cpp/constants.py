"""Constant expressions of C++ and of #if, evaluated with the types and the arithmetic of C++.

Types have the widths of Linux, a `char` is signed, and shifts follow C++20. In an #if all integers are intmax_t or
uintmax_t. The text of a source does not tell everything: the result of a function or the size of a struct, for example.
A value that depends on such a part is unknown, and the caller decides whether to ask the compiler. An expression to
which C++ gives no value, because of an overflow for example, is an ArithmeticError that says why.
"""

import ctypes
import math
import operator
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from cudascope.cpp.tokens import Tokens, Truth, after_angle, every, negated, partners
from cudascope.cpp.types import C_TYPES, INTEGERS, VECTORS


class Value(NamedTuple):
    """A value of C++: its type, "" if that is unknown, and its number, None if that is unknown."""

    type: str
    number: int | float | None


UNKNOWN = Value("", None)
POINTER = "*"  # the type of every pointer
SIZES = {name: ctypes.sizeof(carrier) for name, carrier in C_TYPES.items()}
SIZES |= {POINTER: 8, **{name: lanes * SIZES[element] for name, (element, lanes) in VECTORS.items()}}
RANKS = ["int", "unsigned int", "long", "unsigned long", "long long", "unsigned long long"]

_FLOATS = ("double", "float")
_BITS = {"bool": (1, False), **INTEGERS}
_WORDS = {"and": "&&", "or": "||", "not": "!", "bitand": "&", "bitor": "|", "xor": "^", "compl": "~", "not_eq": "!="}
_SHIFTS = ("<<", ">>")
_LEVELS = {"||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<": 7, ">": 7, "<=": 7, ">=": 7}
_LEVELS |= {"<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "%": 10}
_COMPARISONS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}
_COMPARISONS |= {"<=": operator.le, ">=": operator.ge}
_BITWISE = {"&": operator.and_, "|": operator.or_, "^": operator.xor}
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, **_BITWISE}

_INTEGER = re.compile(r"(0x[\da-f]+|0b[01]+|0[0-7]*|[1-9]\d*)(u?l{0,2}|l{1,2}u)")
_FLOAT = re.compile(r"(?=.*[.ep])((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|0x[\da-f.]+p[+-]?\d+)([fl]?)")
_CHARACTER = re.compile(r"'(?:([ -~])|\\(?:([abefnrtv\\'\"?])|([0-7]{1,3})|x([\da-fA-F]+)))'")
_ESCAPES = dict(zip("abefnrtv\\'\"?", "\a\b\33\f\n\r\t\v\\'\"?", strict=True))


def converted(value: Value, type: str) -> Value:
    """Return `value` as C++ converts it to `type`; the number is unknown if the type has no arithmetic.

    ArithmeticError: a floating-point number is out of the range of `type`.
    """
    number = value.number
    if number is None or not promoted(type):
        return Value(type, None)
    if type == "bool":
        return Value(type, int(number != 0))
    if type not in INTEGERS:
        return Value(type, _rounded(number, type))
    if isinstance(number, float) and not fits(number := math.trunc(number), type):
        raise OverflowError(f"overflows {type}")
    return Value(type, _wrapped(number, type))


def fits(number: int, type: str) -> bool:
    """Whether an integer type has this number."""
    bits, signed = _BITS[type]
    return -(1 << bits - 1) <= number < 1 << bits - 1 if signed else 0 <= number < 1 << bits


def promoted(type: str) -> str:
    """The type with which C++ computes; "" for one without arithmetic."""
    return type if type in RANKS or type in _FLOATS else "int" if type in _BITS else ""


def _common(left: str, right: str) -> str:
    """The type to which C++ converts two operands; "" if one has no arithmetic."""
    left, right = promoted(left), promoted(right)
    if not left or not right:
        return ""
    if left in _FLOATS or right in _FLOATS:
        return "double" if "double" in (left, right) else "float"
    if {left, right} == {"unsigned long", "long long"}:  # long long does not hold every unsigned long
        return "unsigned long long"
    return max(left, right, key=RANKS.index)


def _wrapped(number: int, type: str) -> int:
    bits, signed = INTEGERS[type]
    number %= 1 << bits
    return number - (1 << bits) if signed and number >> (bits - 1) else number


def _rounded(number: int | float | Fraction, type: str) -> float:
    """The nearest number of a floating-point type."""
    near = float(number)
    if type == "float":
        if near != number and struct.pack("<d", near)[0] % 2 == 0:  # an odd last bit makes the second rounding exact
            near = math.nextafter(near, math.inf if near < number else -math.inf)
        near = ctypes.c_float(near).value
    if not math.isfinite(near):
        raise OverflowError(f"overflows {type}")
    return near


def _result(operation: str, type: str, left: int | float, right: int | float) -> int | float:
    """Apply `operation` to two numbers of `type`. ArithmeticError: C++ does not define the result."""
    if operation in _COMPARISONS:
        return int(_COMPARISONS[operation](left, right))
    if operation in _SHIFTS:
        if not 0 <= right < INTEGERS[type][0]:
            raise ArithmeticError(f"shifts {type} by {right} bits")
        return _wrapped(left << right if operation == "<<" else left >> right, type)
    if operation in _OPERATIONS:
        number = _OPERATIONS[operation](left, right)
    elif right == 0:
        raise ZeroDivisionError("divides by zero")
    elif type in _FLOATS:
        number = left / right
    else:  # the quotient is cut off towards zero
        number = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    if type in _FLOATS:
        return _rounded(number, type)
    if INTEGERS[type][1] and not fits(number, type):
        raise OverflowError(f"overflows {type}")
    return _wrapped(left - number * right if operation == "%" else number, type)


def _truth(value: Value) -> Truth:
    return None if value.number is None else value.number != 0


def condition(tokens: Tokens, value_of: Callable[[str], Value]) -> Truth:
    """Whether an #if with `tokens`, in which macros are expanded, is taken; None if that is unknown.

    It is also unknown if the directive is an error: the compiler then names its line.
    """
    try:
        return _truth(Reader(tokens, value_of).read())
    except (Unreadable, ArithmeticError):
        return None


class Unreadable(Exception):
    """What is written is not an expression of the operators that `Reader` knows."""


class Reader:
    """Reads one expression. `value_of` says what a name means, `type_of` what tokens mean as a type; "" if they do not.

    Without `type_of` the expression is that of an #if.
    """

    def __init__(
        self, tokens: Tokens, value_of: Callable[[str], Value], type_of: Callable[[Tokens], str] | None = None
    ) -> None:
        self._tokens = [*(_WORDS.get(token, token) for token in tokens), "", ""]
        self._close = partners(self._tokens)
        self._value_of, self._type_of = value_of, type_of or (lambda tokens: "")
        self._is_directive = type_of is None
        self._truth_type = "long" if self._is_directive else "bool"
        self._at = 0
        self._unevaluated = 0  # how many operators leave out the part that is read now

    def read(self) -> Value:
        """Return the value. Unreadable: it is not an expression of numbers. ArithmeticError: C++ gives it no value."""
        value = self._conditional()
        if self._tokens[self._at]:
            raise Unreadable
        return value

    def _conditional(self) -> Value:
        condition = self._binary(1)
        if self._tokens[self._at] != "?":
            return condition
        self._at += 1
        truth = _truth(condition)
        first = self._read_if(truth is True, self._conditional)
        self._expect(":")
        second = self._read_if(truth is False, self._conditional)
        type = first.type if first.type == second.type else _common(first.type, second.type)
        return Value(type, None) if truth is None else self._converted(first if truth else second, type)

    def _binary(self, lowest: int) -> Value:
        """The operators that bind at least as tightly as `lowest`."""
        left = self._unary()
        while True:
            operation = self._tokens[self._at]
            if operation in ("<", ">") and self._tokens[self._at + 1] == operation:
                operation *= 2  # two tokens, as brackets of templates are
            level = _LEVELS.get(operation, 0)
            if level < lowest:
                return left
            self._at += 2 if operation in _SHIFTS else 1
            if operation in ("&&", "||"):
                needs = operation == "&&"
                right = self._read_if(_truth(left) is needs, lambda level=level: self._binary(level + 1))
                truths = _truth(left), _truth(right)
                left = self._bool(every(*truths) if needs else negated(every(*map(negated, truths))))
            else:
                left = self._combined(operation, left, self._binary(level + 1))

    def _combined(self, operation: str, left: Value, right: Value) -> Value:
        type = _common(left.type, right.type)
        if not type or (type in _FLOATS and operation in ("%", *_SHIFTS, *_BITWISE)):
            return UNKNOWN
        type = promoted(left.type) if operation in _SHIFTS else type
        result = self._truth_type if operation in _COMPARISONS else type
        if left.number is None or right.number is None:
            return Value(result, None)
        x, y = converted(left, type).number, right.number if operation in _SHIFTS else converted(right, type).number
        return self._made(lambda: Value(result, _result(operation, type, x, y)), result)

    def _unary(self) -> Value:
        token = self._tokens[self._at]
        self._at += 1
        if token == "!":
            return self._bool(negated(_truth(self._unary())))
        if token in ("+", "-"):
            operand = self._unary()
            type, number = promoted(operand.type), operand.number
            if token == "+" or number is None:
                return Value(type, number)
            return Value(type, -number) if type in _FLOATS else self._combined("-", Value("int", 0), operand)
        if token == "~":
            return self._combined("^", self._unary(), Value("int", -1))
        if token == "(":
            type = self._type_in_brackets()
            return self._converted(self._unary(), type) if type else self._in_brackets()
        if token == "sizeof" and not self._is_directive:
            return self._size()
        if token == "static_cast":
            end = after_angle(self._tokens, self._close, self._at, len(self._tokens))
            type, self._at = self._type_of(self._tokens[self._at + 1 : end - 1]), end
            self._expect("(")
            return self._converted(self._in_brackets(), type)
        return self._literal(token) if token[:1] in {*"'.0123456789"} else self._name(token)

    def _size(self) -> Value:
        before, type = self._at, ""
        if self._tokens[self._at] == "(":
            self._at += 1
            type = self._type_in_brackets()
        if not type:
            self._at = before
            type = self._read_if(False, self._unary).type
        return Value("unsigned long", SIZES.get(type))

    def _expect(self, token: str) -> None:
        if self._tokens[self._at] != token:
            raise Unreadable
        self._at += 1

    def _in_brackets(self) -> Value:
        """The expression in the bracket that opens before this token."""
        end = self._close.get(self._at - 1)
        value = self._conditional()
        if self._at != end:
            raise Unreadable
        self._at += 1
        return value

    def _type_in_brackets(self) -> str:
        """The type in the bracket that opens before this token; "" if another thing is in it, which is not read."""
        end = self._close.get(self._at - 1, self._at)
        if type := self._type_of(self._tokens[self._at : end]):
            self._at = end + 1
        return type

    def _read_if(self, evaluated: bool, read: Callable[[], Value]) -> Value:
        self._unevaluated += not evaluated
        value = read()
        self._unevaluated -= not evaluated
        return value

    def _made(self, make: Callable[[], Value], type: str) -> Value:
        try:
            return make()
        except ArithmeticError:
            if self._unevaluated:
                return Value(type, None)
            raise

    def _converted(self, value: Value, type: str) -> Value:
        return self._made(lambda: converted(value, type), type)

    def _bool(self, truth: Truth) -> Value:
        return Value(self._truth_type, None if truth is None else int(truth))

    def _name(self, first: str) -> Value:
        start = self._at - 1
        self._at += first == "::"
        while self._tokens[self._at] == "::":
            self._at += 2
        words = self._tokens[start : self._at]
        if not words or not words[-1].isidentifier():
            raise Unreadable
        after = self._tokens[self._at]
        if after in ("(", "{") and (type := self._type_of(words)):
            self._at += 1
            if self._close.get(self._at - 1) == self._at:  # `int()` is 0
                self._at += 1
                return self._converted(Value("int", 0), type)
            return self._converted(self._in_brackets(), type)
        value = self._value_of("".join(words).removeprefix("::"))
        while self._tokens[self._at] in ("(", "[", "{", ".", "->"):  # a call, an element, a member
            self._at = self._close.get(self._at, self._at + 1) + 1
            value = UNKNOWN
        return value

    def _literal(self, text: str) -> Value:
        if match := _CHARACTER.fullmatch(text):
            return self._character(*match.groups())
        text = text.replace("'", "").lower()
        if match := _INTEGER.fullmatch(text):
            return self._made(lambda: self._integer(*match.groups()), "")
        if not (match := _FLOAT.fullmatch(text)) or self._is_directive:
            raise Unreadable
        digits, suffix = match.groups()
        if suffix == "l":  # long double
            return UNKNOWN
        type = "float" if suffix else "double"
        number = float.fromhex(digits) if "x" in digits else float(digits)
        exact = Fraction(digits) if suffix and "x" not in digits and 0 < number < math.inf else number
        return self._made(lambda: Value(type, _rounded(exact, type)), type)

    def _character(self, plain: str, escaped: str, octal: str, hexadecimal: str) -> Value:
        code = int(octal, 8) if octal else int(hexadecimal, 16) if hexadecimal else ord(plain or _ESCAPES[escaped])
        if code > 255:
            raise Unreadable
        return Value("long" if self._is_directive else "char", _wrapped(code, "char"))

    def _integer(self, digits: str, suffix: str) -> Value:
        """The first type that holds it, among those that its base and its suffix allow."""
        is_decimal = digits[0] != "0"
        number = int(digits, 8 if digits.isdigit() and not is_decimal else 0)
        longs = 1 if self._is_directive else suffix.count("l")
        for rank, type in enumerate(RANKS[2 * longs :]):
            is_unsigned = rank % 2 == 1
            if fits(number, type) and (is_unsigned if "u" in suffix else not (is_unsigned and is_decimal)):
                return Value(type, number)
        raise OverflowError("has a number that no integer type holds")
