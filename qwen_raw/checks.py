"""Values that users hand in have the type that they must have: a wrong one is a UsageError that says what is right.

NumPy's scalars are welcome and come back as Python's, so that what is reported can be written as JSON.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from qwen_raw.errors import UsageError


def integer(name: str, value: Any) -> int:
    """An integer of any kind, but no bool."""
    if isinstance(value, bool | np.bool_):
        _refuse(name, value, "an integer")
    try:
        return operator.index(value)
    except TypeError:
        _refuse(name, value, "an integer")


def integers(name: str, values: Any) -> list[int]:
    """A sequence of integers of any kind."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        _refuse(name, values, "a list of integers")
    return [integer(f"an element of {name}", value) for value in values]


def number(name: str, value: Any) -> float:
    """An integer or a float of any kind, but no bool."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        _refuse(name, value, "a number")
    try:
        return float(value)
    except (OverflowError, TypeError):  # an int beyond float64, a complex number
        _refuse(name, value, "a number")


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        _refuse(name, value, "True or False")
    return bool(value)


def text(name: str, value: Any) -> str:
    """A str."""
    if not isinstance(value, str):
        _refuse(name, value, "a str")
    return value


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    shown = repr(value)
    if len(shown) > 60:
        shown = f"{shown[:57]}..."
    shown = " ".join(shown.split())
    raise UsageError(f"{name} is {shown} ({type(value).__name__}), expected {expected}")
