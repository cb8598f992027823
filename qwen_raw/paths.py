"""Where the kernels' sources are: in the installed package, or beside it in a checkout."""

from pathlib import Path

from qwen_raw.errors import QwenRawError


def cuda_src() -> Path:
    """The folder with the .cu files and include/: qwen_raw/cuda_src when installed, ../cuda_src in a checkout."""
    package = Path(__file__).resolve().parent
    candidates = (package / "cuda_src", package.parent / "cuda_src")
    for folder in candidates:
        if (folder / "include" / "common.cuh").is_file():
            return folder
    raise QwenRawError(
        f"the kernel sources are missing: looked in {' and '.join(map(str, candidates))}; reinstall qwen-raw"
    )
