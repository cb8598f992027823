"""cuBLASLt as a path of prefill: its products and the kernels behind them; which of the two computes what.

On a GPU with the library itself; in the simulator with one that computes the same in NumPy, from what it was told.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, assert_close, bf16_input, make_linear, silu
from kernels.test_gemm_sm90 import tokens

from loaders.dtypes import bf16_to_f32, e4m3_to_f32, f32_to_bf16
from qwen_raw.device import BF16, E4M3, F32
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels import cublaslt, gemm_bf16_sm90, gemm_fp8_sm90, lt_products
from qwen_raw.kernels.cublaslt import CublasLt
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.lt_products import LtProducts, always
from qwen_raw.kernels.products import Sm90Products
from qwen_raw.kernels.qkv_finish import qkv_finish
from qwen_raw.kernels.swiglu import swiglu

DTYPES = {0: np.float32, 14: np.uint16, 28: np.uint8}
E4M3_CUT = 2.0**-9  # what an e4m3 tensor core cuts off sums


class FakeLibrary:
    """cuBLASLt's C functions on the host's memory; objects are numbers, addresses are read as what they were told."""

    def __init__(self, version: int = 130100, algorithms: int = 1) -> None:
        self.algorithms = algorithms
        self.objects: list[dict[Any, Any]] = [{}]
        self.cublasLtGetVersion = lambda: version
        self.products = 0

    def _create(self, out: Any, **fields: Any) -> int:
        self.objects.append(fields)
        out._obj.value = len(self.objects) - 1
        return 0

    def cublasLtCreate(self, out: Any) -> int:
        return self._create(out)

    def cublasLtMatmulDescCreate(self, out: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._create(out)

    def cublasLtMatrixLayoutCreate(self, out: Any, kind: int, rows: Any, columns: Any, ld: Any) -> int:
        return self._create(out, dtype=DTYPES[kind], rows=rows.value, columns=columns.value, ld=ld.value)

    def cublasLtMatmulPreferenceCreate(self, out: Any) -> int:
        return self._create(out)

    def cublasLtMatmulPreferenceDestroy(self, pref: Any) -> int:
        return 0

    def cublasLtMatmulDescSetAttribute(self, desc: Any, key: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.objects[desc.value][key] = value._obj.value
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, desc: Any, *rest: Any) -> int:
        assert self.objects[rest[4].value] == {1: cublaslt.WORKSPACE} and rest[5] == 1
        rest[-1]._obj.value = self.algorithms
        return 0

    def _matrix(self, pointer: Any, layout: Any) -> np.ndarray[Any, Any]:
        """[columns, rows]: what is column-major there is row-major here."""
        at = self.objects[layout.value]
        dtype = np.dtype(at["dtype"])
        assert at["ld"] == at["rows"]
        nbytes = at["rows"] * at["columns"] * dtype.itemsize
        flat = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer.value), dtype)
        return flat.reshape(at["columns"], at["rows"])

    def _scaled(self, codes: np.ndarray[Any, Any], scale: int) -> np.ndarray[Any, Any]:
        by_row = np.frombuffer((ctypes.c_float * len(codes)).from_address(scale), F32)
        return e4m3_to_f32(codes) * by_row[:, None]

    def cublasLtMatmul(self, handle: Any, desc: Any, alpha: Any, a: Any, la: Any, b: Any, lb: Any, *rest: Any) -> int:
        beta, c, lc, d, ld = rest[:5]
        told = self.objects[desc.value]
        w, x, out = self._matrix(a, la), self._matrix(b, lb), self._matrix(d, ld)
        assert told[3] == 1 and alpha._obj.value == 1 and c.value == d.value and lc.value == ld.value
        if w.dtype == np.uint8:
            assert told[31] == told[32] == 3 and told[25] == 1
            w, x = self._scaled(w, told[17]), self._scaled(x, told[18])
        else:
            w, x = bf16_to_f32(w), bf16_to_f32(x)
        y = x.astype(np.float64) @ w.T.astype(np.float64)
        self.products += 1
        if out.dtype == np.float32:
            out[:] = (y + beta._obj.value * out).astype(np.float32)
        else:
            assert beta._obj.value == 0
            out[:] = f32_to_bf16(y.astype(np.float32))
        return 0


def library(dev: Any) -> Any:
    """The library itself on a GPU, or its stand-in."""
    if dev.kind == "sim":
        return FakeLibrary()
    try:
        return cublaslt.load_library()
    except QwenRawError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[False, True], ids=["bf16", "fp8"])
def products(request: Any, dev: Any) -> LtProducts:
    """cuBLASLt for everything."""
    if dev.kind == "cuda" and dev.arch != "sm_90a":
        pytest.skip(f"{dev.arch}: takes the place of Hopper's products")
    lt = CublasLt.create(dev, library(dev))
    if request.param and not lt.takes_fp8:
        pytest.skip("this cuBLASLt takes no scale a row")
    module = gemm_fp8_sm90 if request.param else gemm_bf16_sm90
    room = (dev.empty((4096,), E4M3), dev.empty((64,), F32)) if request.param else (None, None)
    return LtProducts(Sm90Products(module.create(dev), *room), lt, always, dev.empty((1 << 16,), BF16))


def cut(products: LtProducts, dev: Any, rel: float) -> float:
    return rel + (E4M3_CUT if products.own.gemm.fp8 and dev.kind == "cuda" else 0.0)


T, N, K = 33, 144, 272


def test_add_and_store(dev: Any, rng: np.random.Generator, products: LtProducts) -> None:
    fp8 = products.own.gemm.fp8
    x, X = tokens(dev, rng, T, K, fp8)
    h0 = rng.standard_normal((T, N)).astype(np.float32)
    for _ in range(2):  # two weights of one shape: each with its own scales
        w, W = make_linear(dev, rng, N, K, fp8)
        h, c = dev.array(h0), dev.empty((T, N), BF16)
        c.fill(POISON)
        products.add(dev, h, x, w)
        products.store(dev, c, x, w)
        assert_close(h.download(), h0 + X @ W.T, rel=cut(products, dev, 1e-5), what="h")
        assert_close(bf16_to_f32(c.download()), X @ W.T, rel=cut(products, dev, 4e-3), what="c")


def test_swiglu(dev: Any, rng: np.random.Generator, products: LtProducts) -> None:
    x, X = tokens(dev, rng, T, K, products.own.gemm.fp8)
    (gate, G), (up, U) = (make_linear(dev, rng, N, K, products.own.gemm.fp8) for _ in range(2))
    act = dev.empty((T, N), BF16)
    act.fill(POISON)
    products.swiglu(dev, act, x, gate, up)
    want = silu(X @ G.T) * (X @ U.T)
    assert_close(bf16_to_f32(act.download()), want, rel=cut(products, dev, 1.5e-2), what="act")


@pytest.mark.parametrize("HD", [64, 128])
def test_qkv_as_ours(dev: Any, rng: np.random.Generator, products: LtProducts, HD: int) -> None:
    """What our kernel writes, but for a rounding to bf16 between the product and the bias; padding is left alone."""
    H, KV, max_len, pos0, real = 2, 1, 48, 5, T - 4
    w, _ = make_linear(dev, rng, (H + 2 * KV) * HD, K, products.own.gemm.fp8)
    x, _ = tokens(dev, rng, T, K, products.own.gemm.fp8)
    bias = dev.array(rng.standard_normal(w.N).astype(np.float32))
    angle = rng.uniform(0, 6, (max_len, HD // 2))
    rope = dev.array(np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32))
    span = dev.array(np.array([pos0, real], np.int32))
    results = []
    for each in (products, products.own):
        q, k, v = dev.empty((T, H, HD), BF16), dev.zeros((KV, max_len, HD), BF16), dev.zeros((KV, max_len, HD), BF16)
        q.fill(POISON)
        each.qkv(dev, q, k, v, x, w, bias, rope, span)
        assert (q.download()[real:] == POISON | POISON << 8).all() and not k.download()[:, pos0 + real :].any()
        results.append([q.download()[:real], k.download(), v.download()])
    for name, theirs, ours in zip("qkv", *results, strict=True):
        assert_close(bf16_to_f32(theirs), bf16_to_f32(ours), rel=1.2e-2, what=name)


def test_qkv_finish_rounds_once(dev: Any, rng: np.random.Generator) -> None:
    """Bias and rotation in fp32, exactly rounded: every bit of k but for contraction; v is y + bias."""
    HD, max_len = 64, 9
    y, Y = bf16_input(rng, 3, 3 * HD)
    bias = rng.standard_normal(3 * HD).astype(np.float32)
    angle = rng.uniform(0, 6, (max_len, HD // 2))
    rope = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    q, k, v = dev.zeros((3, 1, HD), BF16), dev.zeros((1, max_len, HD), BF16), dev.zeros((1, max_len, HD), BF16)
    span = dev.array(np.array([4, 2], np.int32))
    qkv_finish(dev, q, k, v, dev.array(y), dev.array(bias), dev.array(rope), span)
    sums = (Y + bias).reshape(3, 3, HD)
    np.testing.assert_array_equal(v.download()[0, 4:6], f32_to_bf16(sums[:2, 2].astype(np.float32)))
    c, s = rope[4:6, :, 0].astype(np.float64), rope[4:6, :, 1].astype(np.float64)
    first, second = sums[:2, 1, : HD // 2], sums[:2, 1, HD // 2 :]
    want = np.concatenate([first * c - second * s, second * c + first * s], 1)
    assert_close(bf16_to_f32(k.download())[0, 4:6], want, rel=4e-3, what="k")
    assert not k.download()[0, 6:].any() and not q.download()[2].any()


def test_swiglu_alone(dev: Any, rng: np.random.Generator) -> None:
    (g, G), (u, U) = (bf16_input(rng, 5, 1032) for _ in range(2))
    act = dev.empty((5, 1032), BF16)
    act.fill(POISON)
    swiglu(dev, act, dev.array(g), dev.array(u))
    assert_close(bf16_to_f32(act.download()), silu(G) * U, rel=4e-3, what="act")


def test_an_old_library_takes_no_scale_a_row(dev: Any) -> None:
    if dev.kind != "sim":
        pytest.skip("with a stand-in")
    lt = CublasLt.create(dev, FakeLibrary(120804))
    assert not lt.takes_fp8
    w = Linear(dev.zeros((16, 16), E4M3), dev.zeros((16,), F32))
    x = lt_products.Tokens(dev.zeros((4, 16), E4M3), dev.zeros((4,), F32))
    with pytest.raises(QwenRawError, match=r"cuBLASLt 12\.8\.4 takes no scale a row: 12\.9 does"):
        lt.store(dev.zeros((4, 16), BF16), x, w)


def test_where_it_has_no_algorithm(dev: Any, rng: np.random.Generator) -> None:
    """Ours computes it if the table chose, and it is an error if cuBLASLt was asked for."""
    if dev.kind != "sim":
        pytest.skip("with a stand-in")
    lt = CublasLt.create(dev, FakeLibrary(algorithms=0))
    own = Sm90Products(gemm_bf16_sm90.create(dev), None, None)
    (x, X), (w, W), h = tokens(dev, rng, T, K, False), make_linear(dev, rng, N, K, False), dev.zeros((T, N), F32)
    with pytest.raises(QwenRawError, match="cuBLASLt has no algorithm for bf16 33 × 144 × 272: gemm own has"):
        LtProducts(own, lt, always, h).add(dev, h, x, w)
    LtProducts(own, lt, always, h, strict=False).add(dev, h, x, w)
    assert_close(h.download(), X @ W.T, rel=1e-5, what="h")


def test_captures_queue_and_load_nothing(dev: Any, rng: np.random.Generator, products: LtProducts) -> None:
    """A shape is planned before; the graph multiplies when it is launched."""
    x, X = tokens(dev, rng, T, K, products.own.gemm.fp8)
    w, W = make_linear(dev, rng, N, K, products.own.gemm.fp8)
    h = dev.zeros((T, N), F32)
    with pytest.raises(QwenRawError, match="loading a library's code"), dev.capture():
        products.add(dev, h, x, w)
    with dev.rehearsing():
        products.add(dev, h, x, w)
    h.fill(0)
    with dev.capture() as capture:
        products.add(dev, h, x, w)
    assert not h.download().any()
    for _ in range(2):
        capture.graph.launch()
    assert_close(h.download(), 2 * X @ W.T, rel=cut(products, dev, 1e-5), what="h")


def test_the_table_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """By the measured number of tokens that is nearest, shape by shape; what has not been measured is ours."""
    rows = [
        {"dtype": "fp8", "op": "add", "N": 64, "K": 32, "tokens": 128, "own_us": 2.0, "cublaslt_us": 3.0},
        {"dtype": "fp8", "op": "add", "N": 64, "K": 32, "tokens": 2048, "own_us": 5.0, "cublaslt_us": 4.0},
        {"dtype": "fp8", "op": "add", "N": 32, "K": 32, "tokens": 128, "own_us": 5.0, "cublaslt_us": 4.9},
        {"dtype": "fp8", "op": "qkv", "N": 64, "K": 32, "tokens": 128, "own_us": 5.0, "cublaslt_us": None},
    ]
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"environment": {}, "rows": rows}))
    monkeypatch.setattr(lt_products, "TABLE", path)
    lt_products.table.cache_clear()
    takes = lt_products.by_table(True)
    assert [takes("add", T, 64, 32) for T in (1, 128, 500, 600, 4096)] == [False, False, False, True, True]
    assert not takes("add", 128, 32, 32), "a tie"
    assert not takes("qkv", 128, 64, 32) and not takes("add", 2048, 64, 48)
    assert not lt_products.by_table(False)("add", 2048, 64, 32)
    lt_products.table.cache_clear()


def test_the_committed_table_is_whole() -> None:
    for row in lt_products.table()["rows"]:
        assert set(row) == {"dtype", "op", "N", "K", "tokens", "own_us", "cublaslt_us"}
        assert row["op"] in ("qkv", "swiglu", "add", "store") and row["own_us"] > 0
