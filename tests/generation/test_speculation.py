"""What a speculation may be asked for; what it does: tests/model and tests/cli."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_raw.errors import UsageError
from qwen_raw.generation.speculation import MOST_GUESSES, Speculation


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "one of the two"),
        ({"draft": "a", "ngram": 3}, "one of the two"),
        ({"draft": 5}, "draft is 5, expected a model as load takes it"),
        ({"ngram": 3.5}, r"ngram is 3.5 \(float\), expected an integer"),
        ({"ngram": 0}, "n-grams of 0 ids: at least 1"),
        ({"ngram": 3, "guesses": "4"}, r"guesses is '4' \(str\), expected an integer"),
        ({"ngram": 3, "guesses": MOST_GUESSES + 1}, f"1 to {MOST_GUESSES} are possible"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Speculation(**values)


def test_paths_and_numpy_integers_are_welcome() -> None:
    assert Speculation(Path("folder")).draft == Path("folder")
    assert Speculation(ngram=np.int64(3)) == Speculation(ngram=3)  # type: ignore[arg-type]
