"""The fit of bench.scaling recovers what its points were made from."""

import pytest

from bench.scaling import DEGREES, Fit, Point, fit
from qwen_raw.errors import QwenRawError

TRUE = Fit(weight_us=17000.0, serial_us=420.0, reduce_us=1.5, reduces=160)


def points(*degrees: int) -> list[Point]:
    return [Point(tp, TRUE.us(tp), TRUE.without_sums(tp)) for tp in degrees]


@pytest.mark.parametrize("degrees", [(1, 2), (2, 4), DEGREES])
def test_points_of_several_degrees(degrees: tuple[int, ...]) -> None:
    found = fit(points(*degrees), 80)
    for name in ("weight_us", "serial_us", "reduce_us"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert [found.us(tp) for tp in DEGREES] == pytest.approx([TRUE.us(tp) for tp in DEGREES])
    assert found.us(1) == found.without_sums(1) and found.us(8) > found.without_sums(8)


def test_one_degree_takes_what_does_not_shrink_from_elsewhere() -> None:
    found = fit(points(2), 80, ("fp8", TRUE.serial_us))
    assert (found.weight_us, found.reduce_us) == pytest.approx((TRUE.weight_us, TRUE.reduce_us))
    assert (found.serial_us, found.serial_from) == (TRUE.serial_us, "fp8")
    with pytest.raises(QwenRawError, match="one degree alone"):
        fit(points(2), 80)


def test_one_gpu_has_no_sums() -> None:
    found = fit(points(1), 80, ("fp8", TRUE.serial_us))
    assert (found.weight_us, found.reduce_us) == (pytest.approx(TRUE.weight_us), 0.0)
