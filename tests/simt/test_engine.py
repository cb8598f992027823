"""tests/model/test_device_runner.py's golden logits again, on the simulator's stricter ways to run a kernel."""

from model.test_device_runner import golden, test_logits_equal_golden

__all__ = ["golden", "test_logits_equal_golden"]
