"""Conversion of text to SI units and back; the only module that contains powers of ten and of 1024.

In YAML and on the command line a dimensional number has a unit (``900 GB/s``, ``80 GiB``, ``5 us``); in code it is a
float in SI units. ``k M G T P`` are powers of 1000 and ``Ki Mi Gi Ti`` powers of 1024; ``B`` is a byte and ``b`` a bit.
Numbers are parsed as ``Decimal``, so that ``5 us`` is exactly ``5e-06``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema

from paleo.errors import SpecError

_DECIMAL = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4}


def _prefixed(symbol: str, base: str = "1", binary: bool = False) -> dict[str, Decimal]:
    table = {prefix + symbol: Decimal(base) * Decimal(10) ** power for prefix, power in _DECIMAL.items()}
    if binary:
        table |= {prefix + symbol: Decimal(base) * Decimal(1024) ** power for prefix, power in _BINARY.items()}
    return table


_SECONDS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_BYTES = _prefixed("B", binary=True)
_BITS = _prefixed("b", "0.125")
#: Factors to SI by dimension and unit. Error messages show the example of the dimension in ``_DIMENSIONS``.
UNIT_FACTORS: dict[str, dict[str, Decimal]] = {
    "time": _SECONDS,
    "bytes": _BYTES,
    "bandwidth": {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()},
    "flops": _prefixed("FLOP"),
    "flops_per_s": {f"{unit}/s": factor for unit, factor in (_prefixed("FLOP") | _prefixed("OP")).items()},
    "frequency": _prefixed("Hz"),
    "power": _prefixed("W"),
    "price": _prefixed("USD"),
    "price_per_s": {f"USD/{unit}": 1 / factor for unit, factor in _SECONDS.items()},
    "price_per_energy": {"USD/kWh": 1 / Decimal(3600000)},
    "failures": {"/nodeday": 1 / Decimal(86400), "/knodeday": 1 / Decimal(86400000)},
    "count": _prefixed("") | {"B": Decimal(10) ** 9},  # numbers of tokens and parameters: 15T, 8B
}
#: Dimension -> example in messages, and smallest and largest plausible value in SI units.
_DIMENSIONS = {
    "time": ("5 us", 1e-15, 1e10),
    "bytes": ("80 GiB", 1.0, 1e21),
    "bandwidth": ("900 GB/s", 1.0, 1e18),
    "flops": ("4.1 GFLOP", 0.0, math.inf),
    "flops_per_s": ("312 TFLOP/s", 1e3, 1e24),
    "frequency": ("1410 MHz", 1.0, 1e15),
    "power": ("400 W", 1e-6, 1e12),
    "price": ("350000 USD", 1e-6, 1e15),
    "price_per_s": ("2.5 USD/h", 1e-15, 1e9),
    "price_per_energy": ("0.12 USD/kWh", 1e-15, 1.0),
    "failures": ("4/knodeday", 1e-15, 1e6),
    "count": ("15T", 0.0, math.inf),
}
_MISSPELT = {"FLOPS": "FLOP/s", "FLOPs": "FLOP", "OPS": "OP/s", "Bps": "B/s", "bps": "b/s", "bit/s": "b/s"}
_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s].*?)?\s*\Z")


def parse_quantity(text: object, dimension: str) -> float:
    """Parse a number with its unit, such as ``40 GB/s``, to SI units.

    Parameters
    ----------
    text : object
        For example ``5 us`` or ``400 Gb/s``.
    dimension : str
        Key of `UNIT_FACTORS`, such as ``time``.

    Returns
    -------
    float
        The number in SI units.

    Raises
    ------
    SpecError
        If the unit is missing or unknown, or the number is not finite.

    Examples
    --------
    >>> parse_quantity("5 us", "time"), parse_quantity("400 Gb/s", "bandwidth"), parse_quantity("80GiB", "bytes")
    (5e-06, 50000000000.0, 85899345920.0)
    """
    units, example = UNIT_FACTORS[dimension], _DIMENSIONS[dimension][0]
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise SpecError(f"{text!r} is not a quantity; write it like {example!r}")
    match = _NUMBER.match(text) if isinstance(text, str) and len(text) <= 64 else None
    if match is None and isinstance(text, str):
        raise SpecError(f"{text[:64]!r} is not a number with a unit; write it like {example!r}")
    unit = (match.group(2) or "") if match else ""
    if unit not in units:
        raise SpecError(_unit_message(text, unit, dimension))
    try:
        value = float(Decimal(match.group(1) if match else str(text)) * units[unit])
    except (ArithmeticError, ValueError):  # too large for Decimal, for a float, or for Python's limit on digits
        value = math.inf
    if not math.isfinite(value):
        quoted = text if isinstance(text, str | float) else "this"
        raise SpecError(f"{quoted!r} is not a finite number; write it like {example!r}")
    return value


def parse_whole_number(text: str, most: int) -> int | None:
    """Parse a text of digits as a whole number.

    Parameters
    ----------
    text : str
        The text.
    most : int
        Largest number.

    Returns
    -------
    int, optional
        The number; None for anything else, however long it is.

    Examples
    --------
    >>> parse_whole_number("42", 100), parse_whole_number("9" * 5000, 100), parse_whole_number("x", 100)
    (42, None, None)
    """
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > len(str(most)) + 8:
        return None
    number = int(digits)
    return number if number <= most else None


#: Largest number below which all whole numbers are exact as floats.
_EXACT = 2**53


def checked_count(name: str, value: object, least: int = 1, most: int = _EXACT) -> int:
    """Check that a value is a whole number in a range, and return it.

    Parameters
    ----------
    name : str
        Name of the value in the message.
    value : object
        The number, Python's or numpy's.
    least, most : int
        Ends of the range.

    Returns
    -------
    int
        The value.

    Raises
    ------
    SpecError
        If it is no whole number, or beyond the range.

    Examples
    --------
    >>> checked_count("--gpus", 8)
    8
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise SpecError(f"{name} {_quoted(value)}: expected a whole number from {least:,} to {most:,}")
    return number


def checked_number(name: str, value: object, least: float, most: float) -> float:
    """Check that a value is a number in a range, and return it as a float.

    Parameters
    ----------
    name : str
        Name of the value in the message.
    value : object
        The number, Python's or numpy's.
    least, most : float
        Ends of the range.

    Returns
    -------
    float
        The value.

    Raises
    ------
    SpecError
        If it is no number, or beyond the range.

    Examples
    --------
    >>> checked_number("--prefix-hit", 0.5, 0.0, 1.0)
    0.5
    """
    number: Any = value
    if isinstance(value, Real) and not isinstance(value, bool) and least <= number <= most:
        return float(number)
    raise SpecError(f"{name} {_quoted(value)}: expected a number from {least:g} to {most:g}")


def _quoted(value: object) -> str:
    """Return the text of a value for an error message; Python cannot print integers of thousands of digits."""
    return "of thousands of digits" if isinstance(value, int) and value.bit_length() > 256 else f"{value!r:.60}"


#: Names of dimensions in messages, if they differ from the key.
_WORDS = {"flops_per_s": "FLOP a second", "price_per_s": "a price by time", "price_per_energy": "a price of energy"}


def _unit_message(text: object, unit: str, dimension: str) -> str:
    example = _DIMENSIONS[dimension][0]
    if not unit:
        return f"{text!r} has no unit; write it like {example!r}"
    for wrong, right in _MISSPELT.items():
        if unit.endswith(wrong) and unit[: -len(wrong)] + right in UNIT_FACTORS[dimension]:
            return f"{text!r}: the unit {unit!r} is written {unit[: -len(wrong)] + right!r} here"
    other_dimensions = [name for name, table in UNIT_FACTORS.items() if unit in table]
    expected = _WORDS.get(dimension, dimension)
    problem = f"is not a unit of {expected}"
    if other_dimensions:
        problem = f"is a unit of {_WORDS.get(other_dimensions[0], other_dimensions[0])}, not of {expected}"
    return f"{text!r}: {unit!r} {problem}; write it like {example!r}"


@dataclass(frozen=True, slots=True)
class Quantity:
    """Pydantic type of a spec field with a unit: text such as ``900 GB/s`` becomes a float in SI units, 9e11.

    A value outside the plausible range of its dimension is refused. Fields have types such as ``BytesPerSecond``.
    """

    dimension: str
    positive: bool = False

    def parse_text(self, value: object) -> float:
        """Parse a text with its unit, and check the range.

        Parameters
        ----------
        value : object
            The text.

        Returns
        -------
        float
            The number in SI units.

        Raises
        ------
        SpecError
            If the text is not valid or out of range.
        """
        return self.check_range(parse_quantity(value, self.dimension), value)

    def check_range(self, number: float, quoted: object) -> float:
        """Check that a number lies in the plausible range of the dimension, and return the number.

        Parameters
        ----------
        number : float
            The number in SI units.
        quoted : object
            Text of the value in the message.

        Returns
        -------
        float
            The number.

        Raises
        ------
        SpecError
            If it is out of range.
        """
        _, least, most = _DIMENSIONS[self.dimension]
        if number < 0 or (self.positive and number == 0):
            raise SpecError(f"{quoted!r} must be {'above zero' if self.positive else 'zero or more'}")
        if 0 < number < least:
            raise SpecError(f"{quoted!r} is implausibly small: it is less than {self._bound(least)}")
        if number > most:
            raise SpecError(f"{quoted!r} is implausibly large: it is more than {self._bound(most)}")
        return number

    def _bound(self, number: float) -> str:
        """Write a bound of the range in the SI unit, or in the first unit of the dimension if none is SI."""
        units = UNIT_FACTORS[self.dimension]
        unit = next((unit for unit, factor in units.items() if factor == 1), next(iter(units)))
        return f"{number / float(units[unit]):g} {unit}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.parse_text, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        example = _DIMENSIONS[self.dimension][0]
        return {"type": "string", "description": f"{self.dimension} with its unit", "examples": [example]}


Seconds = Annotated[float, Quantity("time")]
Bytes = Annotated[float, Quantity("bytes", positive=True)]
BytesPerSecond = Annotated[float, Quantity("bandwidth", positive=True)]
FlopsPerSecond = Annotated[float, Quantity("flops_per_s", positive=True)]
Hertz = Annotated[float, Quantity("frequency", positive=True)]
Watts = Annotated[float, Quantity("power", positive=True)]
Dollars = Annotated[float, Quantity("price")]
PricePerSecond = Annotated[float, Quantity("price_per_s")]
PricePerEnergy = Annotated[float, Quantity("price_per_energy")]
FailuresPerSecond = Annotated[float, Quantity("failures")]

_STEPS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def format_quantity(value: float, unit: str, *, digits: int = 3) -> str:
    """Format a number with a unit prefix.

    Parameters
    ----------
    value : float
        The number in SI units.
    unit : str
        Unit without prefix.
    digits : int, optional
        Significant digits.

    Returns
    -------
    str
        For example ``312 TFLOP/s``.

    Examples
    --------
    >>> format_quantity(3.12e14, "FLOP/s"), format_quantity(25557032, ""), format_quantity(0.0, "B")
    ('312 TFLOP/s', '25.6 M', '0 B')
    """
    for factor, prefix in _STEPS:
        if abs(value) >= factor:
            return f"{_digits(value / factor, digits)} {prefix}{unit}".rstrip()
    return f"{_digits(value, digits)} {unit}".rstrip()


#: Units in which times are printed: upper limit, seconds of one unit, symbol.
_TIME_UNITS = (
    (1e-6, 1e-9, "ns"),
    (1e-3, 1e-6, "us"),
    (1.0, 1e-3, "ms"),
    (90.0, 1.0, "s"),
    (5400.0, 60.0, "min"),
    (172800.0, 3600.0, "h"),
    (math.inf, 86400.0, "days"),
)


def format_duration(seconds: float, *, digits: int = 3, like: float | None = None) -> str:
    """Format a time with a readable unit.

    Parameters
    ----------
    seconds : float
        The time [s].
    digits : int, optional
        Significant digits.
    like : float, optional
        Another time [s] whose unit is used.

    Returns
    -------
    str
        For example ``12.3 ms``.

    Examples
    --------
    >>> [format_duration(seconds) for seconds in (4.2e-6, 0.0123, 95.0, 7200.0, 3e6)]
    ['4.2 us', '12.3 ms', '1.58 min', '2 h', '34.7 days']
    >>> format_duration(95.0, like=81.8), format_duration(1166.0, like=25.4)
    ('95 s', '1,166 s')
    """
    if not math.isfinite(seconds):
        return "never"
    size = abs(seconds if like is None else like)
    factor, unit = next((factor, unit) for limit, factor, unit in _TIME_UNITS if size < limit)
    return f"{_digits(seconds / factor, digits)} {unit}"


def common_unit_time(column: Iterable[float]) -> float | None:
    """Choose the time whose unit (s, ms, us) a whole table column is printed in.

    `format_duration` takes it as the time whose unit the others share.

    Parameters
    ----------
    column : iterable of float
        Times [s].

    Returns
    -------
    float, optional
        The shortest time. None for an empty column, or if the longest time is over a thousand times longer: each time
        then gets a unit of its own.

    Examples
    --------
    >>> common_unit_time([95.0, 81.8]), common_unit_time([1e-3, 2.0]), common_unit_time([])
    (81.8, None, None)
    """
    times = [seconds for seconds in column if 0.0 < seconds < math.inf]
    return min(times) if times and max(times) < KILO * min(times) else None


def time_unit(longest: float) -> tuple[float, str]:
    """Choose the unit (s, ms or us) for the time axis of a plot.

    Parameters
    ----------
    longest : float
        End of the axis [s].

    Returns
    -------
    tuple[float, str]
        Seconds of one unit, and its symbol.

    Examples
    --------
    >>> time_unit(12.0), time_unit(0.3), time_unit(4e-5)
    ((1.0, 's'), (0.001, 'ms'), (1e-06, 'us'))
    """
    return next(((factor, unit) for factor, unit in ((1.0, "s"), (1e-3, "ms")) if longest >= factor), (1e-6, "us"))


def format_dollars(value: float) -> str:
    """Format an amount of money in USD, with three digits below 100 USD.

    Parameters
    ----------
    value : float
        Amount [USD].

    Returns
    -------
    str
        Text such as ``1,234 USD`` or ``0.034 USD``.
    """
    return f"{value:,.0f} USD" if value >= 100 else f"{value:,.3g} USD"


def format_percent(share: float) -> str:
    """Format a fraction as a percentage without decimals.

    Parameters
    ----------
    share : float
        Fraction.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> format_percent(0.4567)
    '46 %'
    """
    return f"{100 * share:.0f} %"


def comma_separated(text: str) -> list[str]:
    """Split a text at commas, without empty entries.

    Parameters
    ----------
    text : str
        The text.

    Returns
    -------
    list of str
        Entries without surrounding spaces.

    Examples
    --------
    >>> comma_separated("bsp, async,")
    ['bsp', 'async']
    """
    return [entry for entry in (part.strip() for part in text.split(",")) if entry]


def with_noun(value: float, noun: str) -> str:
    """Format a count with its noun, singular or plural: ``3 nodes``.

    Parameters
    ----------
    value : float
        Number.
    noun : str
        Singular noun.

    Returns
    -------
    str
        For example ``4,096 samples``.

    Examples
    --------
    >>> with_noun(1, "GPU"), with_noun(4096, "sample"), with_noun(0.5, "epoch"), with_noun(1.5e13, "token")
    ('1 GPU', '4,096 samples', '0.5 epochs', '15 trillion tokens')
    """
    for factor, word in ((TERA, "trillion"), (GIGA, "billion")):
        if value >= factor:
            return f"{_digits(value / factor, 3)} {word} {noun}s"
    digits = f"{value:,.0f}" if float(value).is_integer() else f"{value:,g}"
    return f"{digits} {noun}" if value == 1 else f"{digits} {noun}s"


def format_gibibytes(value: float) -> str:
    """Format a memory size in powers of 1024.

    Parameters
    ----------
    value : float
        Bytes.

    Returns
    -------
    str
        For example ``80.0 GiB``.

    Examples
    --------
    >>> format_gibibytes(85899345920.0)
    '80.0 GiB'
    """
    for power, prefix in ((3, "Gi"), (2, "Mi"), (1, "Ki")):
        if abs(value) >= 1024**power:
            return f"{value / 1024**power:.1f} {prefix}B"
    return f"{value:.0f} B"


def _digits(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


#: Factors for measured tables in scaled units (see ``validate``), so that no other module contains a power of ten.
MICROSECOND, MILLISECOND = 1e-6, 1e-3
KILO, MEGA, GIGA, TERA = 1e3, 1e6, 1e9, 1e12
GIBIBYTE = float(1024**3)
MEBIBYTE = float(1024**2)
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
SECONDS_PER_YEAR = 365.25 * DAY
