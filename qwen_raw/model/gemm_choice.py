"""Which library multiplies a prompt: our kernels, or cuBLASLt where it is installed and faster (docs/prefill.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qwen_raw.config import ModelConfig
from qwen_raw.device import Device
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.kernels.cublaslt import CublasLt, load_library, version, version_text
from qwen_raw.kernels.lt_products import LtProducts, Takes, always, by_table, chosen
from qwen_raw.kernels.products import Products, Sm90Products
from qwen_raw.model.rank import Rank

GEMM = ("auto", "own", "cublaslt")


def choose_gemm(rank: Rank, gemm: str, library: Any = None) -> Rank:
    """The rank with products as `gemm` says. `library`: cuBLASLt; None: what is installed.

    "auto" takes cuBLASLt where the table says that it is faster, if it is there. Raises UsageError for "cublaslt" where
    nothing could use it, QwenRawError where it is not installed.
    """
    own = rank.prefill.products
    if gemm == "own":
        return rank
    if not isinstance(own, Sm90Products):
        if gemm == "cublaslt":
            raise UsageError("gemm cublaslt takes the place of Hopper's products only: this model and GPU have others")
        return rank
    dev, c, rows = rank.device, rank.shard.local, rank.prefill.chunk
    takes: Takes = always if gemm == "cublaslt" else by_table(own.codes is not None)
    if not chosen(takes, c, rows):
        return rank
    products = _with_cublaslt(dev, c, rows, own, takes, library, gemm)
    return replace(rank, prefill=replace(rank.prefill, products=products))


def _with_cublaslt(
    dev: Device, c: ModelConfig, rows: int, own: Sm90Products, takes: Takes, library: Any, gemm: str
) -> Products:
    try:
        lt = CublasLt.create(dev, load_library() if library is None else library)
        if own.codes is not None and not lt.takes_fp8:
            raise QwenRawError(
                f"cuBLASLt {version_text(version(lt.lib))} takes no scale a row of e4m3: 12.9 does, or gemm own"
            )
    except QwenRawError:
        if gemm == "auto":
            return own
        raise
    return LtProducts.create(dev, own, lt, takes, c, rows, strict=gemm == "cublaslt")
