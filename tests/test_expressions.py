"""Constraints of TOML files: what they may hold, what they give, and that nothing else ever comes out of them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerneltune.errors import UserError
from kerneltune.expressions import parse_expression

NAMES = {"BLOCK_N": 64, "kv_len": 4096, "dtype": "bf16", "causal": True, "sm_count": 132}


def value(text: str) -> bool:
    return parse_expression(text, NAMES, "x.toml: where[1].rule")(NAMES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("BLOCK_N <= kv_len", True),
        ("BLOCK_N in (16, 32)", False),
        ("BLOCK_N in [64]", True),
        ('dtype == "bf16" and not BLOCK_N > 64', True),
        ("cdiv(kv_len, 1000) == 5", True),
        ("min(BLOCK_N, 3, 2) + max(1, 2) == 4", True),
        ("1 < BLOCK_N < 65", True),
        ("1 < BLOCK_N < 64", False),
        ("-BLOCK_N % 7 == 6", True),
        ("2 ** 10 == 1024 and kv_len // 3 == 1365 and kv_len / 8192 == 0.5", True),
        ("causal", True),
        ("not causal or True", True),
        ('dtype not in ("fp16", "fp32")', True),
        ("  BLOCK_N\n == 64 ", True),
    ],
)
def test_gives(text: str, expected: bool) -> None:
    assert value(text) is expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("BLOK_N < 3", "unknown name 'BLOK_N' in 'BLOK_N < 3': did you mean 'BLOCK_N'?"),
        ("wholly_other < 3", "expected one of BLOCK_N, kv_len, dtype, causal, sm_count"),
        ("kv_len.real > 3", "Attribute is not allowed"),
        ("().__class__ == 1", "Attribute is not allowed"),
        ("kv_len[0] > 3", "Subscript is not allowed"),
        ("open('x') == 1", "only min, max, cdiv can be called"),
        ("min(1, 2)(3) == 1", "only min, max, cdiv can be called"),
        ("min(1, 2, key=kv_len) == 1", "takes no named arguments"),
        ("min(*(1, 2)) == 1", "Starred is not allowed"),
        ("(lambda: 1) == 1", "Lambda is not allowed"),
        ("(a := 3) == 3", "NamedExpr is not allowed"),
        ("f'{kv_len}' == 'x'", "JoinedStr is not allowed"),
        ("[i for i in (1, 2)] == 3", "ListComp is not allowed"),
        ("{1: 2} == 3", "Dict is not allowed"),
        ("1 if causal else 2", "IfExp is not allowed"),
        ("kv_len is 3", "Is is not allowed"),
        ("kv_len << 3 == 1", "LShift is not allowed"),
        ("kv_len == None", "None is not allowed"),
        ("kv_len == b'x'", "literal b'x' is not allowed"),
        ("kv_len == 1j", "literal 1j is not allowed"),
        ("kv_len < 1e999", "a number is too large"),
        ("kv_len < 99999999999999999999", "a number is too large"),
        ("kv_len + 1", "is not true or false"),
        ("min(1, 2)", "is not true or false"),
        ("min", "is not true or false"),
        ("'yes'", "is not true or false"),
        ("causal or 3", "is not true or false"),
        ("a = 3", "is not an expression"),
        ("causal; causal", "is not an expression"),
        ("import os", "is not an expression"),
        ("", "is not an expression"),
        ("kv_len <", "is not an expression"),
        ("causal\x00", "is not an expression"),
        ("(" * 400 + "causal" + ")" * 400, "is not an expression"),
        ("not " * 100 + "causal", "nested more than"),
        ("causal or " * 200 + "causal", "at most 1000 characters"),
    ],
)
def test_refuses(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_expression(text, NAMES, "x.toml: where[1].rule")
    message = str(caught.value)
    assert message.startswith("x.toml: where[1].rule: ")
    assert "\n" not in message
    assert says in message


@pytest.mark.parametrize("given", [3, None, ["causal"], {}])
def test_refuses_what_is_not_a_text(given: object) -> None:
    with pytest.raises(UserError, match="expected an expression in quotes"):
        parse_expression(given, NAMES, "x.toml: where[1].rule")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kv_len % 0 == 1", "modulo by zero"),
        ("cdiv(kv_len, 0) == 1", "zero"),
        ("kv_len < dtype", "not supported"),
        ("dtype * 1000000000 == dtype", "expected a number"),
        ("'%1000000000d' % kv_len == dtype", "expected a number"),
        ("(1, 2) * 99999 == 1", "expected a number"),
        ("9 ** 9 ** 9 == 1", "expected an exponent from 0 to 63"),
        ("kv_len ** 62 == 1", "too large"),
        ("kv_len ** -1 == 1", "expected an exponent from 0 to 63"),
        ("kv_len in dtype", "string"),
        ("min(()) == 1", "empty"),
        ("max(kv_len) == 1", "not iterable"),
    ],
)
def test_says_what_cannot_be_evaluated(text: str, says: str) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match="cannot be evaluated") as caught:
        value(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 1


def test_a_number_is_not_an_answer() -> None:
    for text in ("kv_len", "kv_len and causal", "not kv_len", "causal and (kv_len or causal)"):
        with pytest.raises(UserError, match=r"kv_len is 4096, expected true or false"):
            value(text)


WORDS = (
    """min max cdiv ( ) , [ ] and or not in == < ** * % // / - 1 0 9999999 'a' lambda : := . if else for f'' { } is #"""
)
PIECES = st.sampled_from([*NAMES, *WORDS.split(), "\n"])


@settings(max_examples=600, deadline=1000)
@given(st.one_of(st.lists(PIECES, max_size=14).map(" ".join), st.text(max_size=60)))
def test_only_a_truth_value_or_a_user_error_comes_out(text: str) -> None:
    try:
        result: bool | str = value(text)
    except UserError as error:
        result = str(error)
    assert isinstance(result, bool) or (isinstance(result, str) and "\n" not in result)
