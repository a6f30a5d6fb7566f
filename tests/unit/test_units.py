"""Text to SI and back."""

from __future__ import annotations

import math
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from paleo.errors import SpecError
from paleo.units import (
    UNIT_FACTORS,
    Bytes,
    BytesPerSecond,
    Seconds,
    format_duration,
    format_gibibytes,
    format_quantity,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("5 us", "time", 5e-6),
        ("5µs", "time", 5e-6),
        ("0.3 ms", "time", 3e-4),
        ("2 h", "time", 7200.0),
        ("1.5d", "time", 129600.0),
        ("100MB", "bytes", 1e8),
        ("64 KiB", "bytes", 65536.0),
        ("1_000 B", "bytes", 1000.0),
        (".5 GB", "bytes", 5e8),
        ("400 Gb/s", "bandwidth", 50e9),
        ("3.35 TB/s", "bandwidth", 3.35e12),
        ("900 GiB/s", "bandwidth", 900 * 2**30),
        ("989 TFLOP/s", "flops_per_s", 989e12),
        ("624 TOP/s", "flops_per_s", 624e12),
        ("4.1 GFLOP", "flops", 4.1e9),
        ("1410 MHz", "frequency", 1.41e9),
        ("1.2 kW", "power", 1200.0),
        ("36 USD/h", "price_per_s", 0.01),
        ("0.36 USD/kWh", "price_per_energy", 1e-7),
        ("300G", "count", 3e11),
        (8, "count", 8.0),
        ("1e3 s", "time", 1000.0),
        ("+5 s", "time", 5.0),
        ("-5 s", "time", -5.0),
    ],
)
def test_quantities(text: object, dimension: str, value: float) -> None:
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-15)


def test_decimals_are_exact() -> None:
    """5 · 1e-6 in binary floating point is 4.9999999999999996e-06."""
    assert parse_quantity("5 us", "time") == 5e-06
    assert parse_quantity("0.1 GB", "bytes") == 1e8
    assert parse_quantity("1.1 ms", "time") == 0.0011


@pytest.mark.parametrize(
    ("text", "dimension", "word"),
    [
        ("900", "bandwidth", "has no unit; write it like '900 GB/s'"),
        (900, "bandwidth", "has no unit"),
        ("312 TFLOPS", "flops_per_s", "is written 'TFLOP/s' here"),
        ("900 GBps", "bandwidth", "is written 'GB/s' here"),
        ("400 Gbps", "bandwidth", "is written 'Gb/s' here"),
        ("400 Gbit/s", "bandwidth", "is written 'Gb/s' here"),
        ("2 GFLOPs", "flops", "is written 'GFLOP' here"),
        ("5 us", "bytes", "is a unit of time, not of bytes"),
        ("5 parsecs", "time", "is not a unit of time"),
        ("5 US", "time", "is not a unit of time"),
        ("80 gib", "bytes", "is not a unit of bytes"),
        ("", "time", "is not a number with a unit"),
        ("us", "time", "is not a number with a unit"),
        ("1 2 s", "time", "is not a number with a unit"),
        ("1e s", "time", "is not a unit of time"),
        ("nan s", "time", "is not a number with a unit"),
        ("1e999 s", "time", "is not a finite number"),
        ("1" * 100 + " s", "time", "is not a number with a unit"),
        (True, "count", "is not a quantity"),
        (None, "time", "is not a quantity"),
        ([1], "time", "is not a quantity"),
        (float("nan"), "count", "is not a finite number"),
        (float("inf"), "count", "is not a finite number"),
    ],
)
def test_what_is_no_quantity(text: object, dimension: str, word: str) -> None:
    with pytest.raises(SpecError, match=word.replace("(", r"\(")):
        parse_quantity(text, dimension)


class Model(BaseModel):
    time: Annotated[Seconds, "seconds"]
    size: Bytes
    rate: BytesPerSecond


def test_fields_take_text_alone_and_refuse_what_cannot_be() -> None:
    made = Model.model_validate({"time": "0 s", "size": "1 KiB", "rate": "1 B/s"})
    assert (made.time, made.size, made.rate) == (0.0, 1024.0, 1.0)
    for key, value in (("time", "-1 s"), ("size", "0 B"), ("rate", "-5 GB/s"), ("rate", 5)):
        with pytest.raises(ValidationError, match=key):
            Model.model_validate({"time": "0 s", "size": "1 KiB", "rate": "1 B/s"} | {key: value})


@given(st.decimals(min_value=0, max_value=10**9, places=6), st.sampled_from(sorted(UNIT_FACTORS)), st.data())
def test_a_space_before_the_unit_and_its_size_do_not_matter(
    number: object, dimension: str, data: st.DataObject
) -> None:
    unit = data.draw(st.sampled_from(sorted(UNIT_FACTORS[dimension])))
    value = parse_quantity(f"{number}{unit}", dimension)
    assert value == parse_quantity(f" {number}  {unit} ", dimension)
    assert value == pytest.approx(float(str(number)) * float(UNIT_FACTORS[dimension][unit]), rel=1e-12)


@given(st.floats(min_value=1e-9, max_value=1e20))
def test_engineering_text_reads_back(value: float) -> None:
    text = format_quantity(value, "B", digits=6)
    assert parse_quantity(text, "bytes") == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ns"), (2e-9, "2 ns"), (1.5e-3, "1.5 ms"), (1.0, "1 s"), (89.0, "89 s"), (90.0, "1.5 min"),
     (5400.0, "1.5 h"), (86400.0 * 3, "3 days"), (math.inf, "never"), (math.nan, "never")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_sizes() -> None:
    assert format_gibibytes(2.0**30 * 1.5) == "1.5 GiB"
    assert format_gibibytes(512.0) == "512 B"
    assert format_quantity(999.0, "B/s") == "999 B/s"
    assert format_quantity(1e18, "FLOP") == "1 EFLOP"
    assert format_quantity(-2e6, "") == "-2 M"


@pytest.mark.parametrize(
    "text", ["9e999999GB", "1e99999999999 GB", "9" * 50 + "e300 GB", 10**5000, float("inf")], ids=list("abcde")
)
def test_a_number_beyond_a_float_is_refused(text: object) -> None:
    with pytest.raises(SpecError, match=r"finite|no unit"):
        parse_quantity(text, "bytes" if isinstance(text, str) else "count")


class Machine(BaseModel):
    bandwidth: BytesPerSecond | None = None
    latency: Seconds = 0.0


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("bandwidth", "1e-300 GB/s", "implausibly small: it is less than 1 B/s"),
        ("bandwidth", "1e30 GB/s", r"implausibly large: it is more than 1e\+18 B/s"),
        ("latency", "1e30 h", "implausibly large"),
        ("bandwidth", "-1 GB/s", "above zero"),
    ],
)
def test_figures_that_no_machine_has_are_refused(field: str, text: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Machine.model_validate({field: text})
    assert Machine.model_validate({"latency": "0 s", "bandwidth": "3.35 TB/s"}).bandwidth == 3.35e12


def test_the_json_schema_of_a_quantity_is_text_with_an_example() -> None:
    schema = Machine.model_json_schema()["properties"]["latency"]
    assert (schema["type"], schema["examples"]) == ("string", ["5 us"])
