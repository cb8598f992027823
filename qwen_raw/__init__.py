"""qwen-raw: Qwen2-architecture inference from hand-written CUDA kernels."""

from typing import Any

from qwen_raw.errors import QwenRawError, UsageError

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Engine",
    "QwenRawError",
    "SamplingParams",
    "Speculation",
    "TextStream",
    "UsageError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    """The other public names live in `qwen_raw.engine`; imported on first use so that `loaders` can import us."""
    if name in __all__:
        from qwen_raw import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'qwen_raw' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
