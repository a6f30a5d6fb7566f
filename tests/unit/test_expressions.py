"""Arithmetic of model files."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paleo.errors import SpecError
from paleo.specs.loading import evaluate_model_expression

NAMES: dict[str, Any] = {"hidden": 768, "heads": 12, "rate": 0.5, "kind": "wide", "causal": True, "zero": 0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("=4 * hidden", 3072),
        ("=hidden // heads", 64),
        ("=hidden / heads", 64),  # a whole number stays one
        ("=7 / 2", 3.5),
        ("=7 % 4", 3),
        ("=-hidden + 1", -767),
        ("=2 * (heads - 2)", 20),
        ("=min(hidden, heads, 5)", 5),
        ("=max(hidden, 1000)", 1000),
        ("=ceil(hidden / 100)", 8),
        ("=round(2.6)", 3),
        ("=heads > 10", True),
        ("=heads == 12", True),
        ("=heads != 12", False),
        ("=kind", "wide"),
        ("=causal", True),
        ("=rate", 0.5),
        ("= 1 ", 1),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert evaluate_model_expression(text, NAMES) == value
    assert type(evaluate_model_expression(text, NAMES)) is type(value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("=hiden", "nearest: 'hidden'"),
        ("=1 +", "is not an arithmetic expression"),
        ("=", "is not an arithmetic expression"),
        ("=kind + 1", "not a number"),
        ("=hidden ** 2", "is not allowed"),
        ("=hidden & 1", "is not allowed"),
        ("=~hidden", "is not allowed"),
        ("=[1, 2]", "is not allowed"),
        ("=hidden.real", "is not allowed"),
        ("=hidden[0]", "is not allowed"),
        ("='a' * 9", "is not allowed"),
        ("=lambda: 1", "is not allowed"),
        ("=open('x')", "is not allowed"),
        ("=__import__('os')", "is not allowed"),
        ("=min(1, key=2)", "is not allowed"),
        ("=1 < 2 < 3", "is not allowed"),
        ("=min()", "is not an arithmetic expression"),
        ("=ceil(1, 2)", "is not an arithmetic expression"),
        ("=1 // zero", "divides by zero"),
        ("=1 % zero", "divides by zero"),
        ("=1 / zero", "divides by zero"),
        ("=1e300 * 1e300", "far beyond"),
        ("=999999999 * 999999999", "far beyond"),
        ("=-999999999 * 999999999", "far beyond"),
        ("=1" + "+1" * 200, "characters"),
        ("=" + "9" * 190, "far beyond"),
        ("=1; 2", "is not an arithmetic expression"),
        ("=a := 1", "is not an arithmetic expression"),
        ("=kind < 1", "is not an arithmetic expression"),
    ],
)
def test_what_is_no_arithmetic(text: str, word: str) -> None:
    with pytest.raises(SpecError, match=word):
        evaluate_model_expression(text, NAMES)


@pytest.mark.slow
@given(st.text(max_size=60))
def test_any_text_is_a_value_or_a_spec_error(text: str) -> None:
    try:
        value = evaluate_model_expression(f"={text}", NAMES)
    except SpecError:
        return
    assert isinstance(value, int | float | str | bool)


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6))
def test_arithmetic_is_that_of_whole_numbers(a: int, b: int) -> None:
    names = {"a": a, "b": b}
    assert evaluate_model_expression("=a // b * b + a % b", names) == a
    assert evaluate_model_expression("=a * b", names) == a * b
    assert evaluate_model_expression("=(a * b) / b", names) == a


@pytest.mark.parametrize("text", ["=round(5,-99999999)", "=round(5,99999999)", "=round(1e14,-10**9)"])
def test_rounding_to_a_far_digit_is_refused_at_once(text: str) -> None:
    with pytest.raises(SpecError):
        evaluate_model_expression(text, {})


def test_rounding_to_a_near_digit() -> None:
    assert evaluate_model_expression("=round(1234, -2)", {}) == 1200
    assert evaluate_model_expression("=round(2.6)", {}) == 3
