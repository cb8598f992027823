"""fp8 weights may cost 1 % of perplexity: the tiny model on the validation text, on NumPy and on a GPU."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.dtypes import e4m3_to_f32, quantize_rows_e4m3
from loaders.resolve import open_model, open_tokenizer
from qwen_raw.errors import UsageError
from qwen_raw.observe.perplexity import Logits, perplexity
from qwen_raw.reference import KVCache, ReferenceModel

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "tests" / "golden" / "validation.txt"
LIMIT = 0.01
SHORT = 2049  # tokens on the CPU: seconds


@pytest.fixture(scope="module")
def model() -> Any:
    return open_model("tiny-shakespeare")


@pytest.fixture(scope="module")
def ids(model: Any) -> list[int]:
    return open_tokenizer(model).encode(TEXT.read_text())


@pytest.fixture(scope="module")
def in_bf16(model: Any, ids: list[int]) -> float:
    return perplexity(forward(ReferenceModel(model.config, model, activations="bf16")), ids[:SHORT]).value


def test_the_losses_that_the_models_readme_gives(in_bf16: float, ids: list[int]) -> None:
    said = (ROOT / "loaders" / "builtin" / "README.md").read_text()
    draft = open_model("tiny-shakespeare-draft")
    second = perplexity(forward(ReferenceModel(draft.config, draft, activations="bf16")), ids[:SHORT]).value
    for nats, found in zip(re.findall(r"(\d\.\d{3}) (?:nats a token )?\(", said), (in_bf16, second), strict=True):
        assert float(nats) == pytest.approx(math.log(found), abs=2e-3)
    assert [float(value) for value in re.findall(r"\((?:a perplexity of )?(\d\d\.\d\d)\)", said)] == pytest.approx(
        [in_bf16, second], rel=2e-3
    )


def forward(model: ReferenceModel) -> Logits:
    return lambda ids: model.forward(ids, KVCache(model.config, len(ids)))


def test_fp8_costs_less_than_the_limit(model: Any, ids: list[int], in_bf16: float) -> None:
    fp8 = ReferenceModel(model.config, model, quantize=True, activations="bf16")
    assert abs(perplexity(forward(fp8), ids[:SHORT]).value / in_bf16 - 1) < LIMIT


def test_a_coarser_format_costs_more_than_the_limit(model: Any, ids: list[int], in_bf16: float) -> None:
    """The same with one bit of mantissa in place of three: what the limit can tell apart."""
    coarse = ReferenceModel(model.config, model, activations="bf16")
    for layer in coarse.layers:
        for name in ("qkv", "o", "gate_up", "down"):
            codes, scale = quantize_rows_e4m3(getattr(layer, name))
            setattr(layer, name, e4m3_to_f32(codes & np.uint8(0xFC)) * scale[:, None])
    assert perplexity(forward(coarse), ids[:SHORT]).value / in_bf16 - 1 > LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_fp8_costs_less_than_the_limit_on_a_gpu(
    cuda_device: Any, model: Any, ids: list[int], in_bf16: float, path: str
) -> None:
    """The whole text; and bf16 there is what it is on NumPy."""
    from qwen_raw.model.runner import DeviceRunner

    found = {}
    for dtype in ("bf16", "fp8"):
        runner = DeviceRunner(
            cuda_device, model, dtype=dtype, max_model_len=513, text_vocab=model.config.V, owns_device=False
        )
        logits = runner.logits if path == "prefill" else runner.decode_logits
        found[dtype] = perplexity(logits, ids).value
        if dtype == "bf16":
            assert abs(perplexity(logits, ids[:SHORT]).value / in_bf16 - 1) < 1e-3
        runner.close()
    assert abs(found["fp8"] / found["bf16"] - 1) < LIMIT, found


def spy(V: int, seen: list[list[int]]) -> Callable[[Any], Any]:
    """Logits that make the next token twice as likely as each other one if it is the last one's successor."""

    def logits(ids: Any) -> Any:
        seen.append(list(ids))
        out = np.zeros((len(ids), V), np.float32)
        out[np.arange(len(ids)), (np.asarray(ids) + 1) % V] = math.log(2)
        return out

    return logits


@pytest.mark.parametrize("window", [1, 3, 9, 10, 512])
def test_every_token_but_the_first_is_predicted_once(window: int) -> None:
    seen: list[list[int]] = []
    ids = [4, 5, 6, 7, 0, 1, 2, 3, 4, 6]  # 8 of 9 follow
    found = perplexity(spy(8, seen), ids, window)
    assert [token for part in seen for token in part] == ids[:-1] and max(map(len, seen)) <= window
    assert found.tokens == 9 and found.nll == pytest.approx((8 * math.log(9 / 2) + math.log(9)) / 9)


def test_one_token_has_no_perplexity() -> None:
    with pytest.raises(UsageError, match="two tokens"):
        perplexity(spy(8, []), [3])
