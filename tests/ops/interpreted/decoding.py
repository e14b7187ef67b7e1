"""The kernels of a decoding step against plain torch in fp64: odd shapes, NaN in one row, memory that starts as NaN."""

from typing import Any

import pytest
import torch

from ops import decoding_cases as cases
from rebased.ops import use_backend
from rebased.ops.backend import triton_interpreted
from rebased.ops.decoding.gpu import tokens
from tolerances import assert_near

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.recorded("decoding")]
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases.LINEAR, ids=str)
def test_linear(case: Any, dtype: torch.dtype) -> None:
    assert triton_interpreted()
    cases.check_linear(case, dtype, "cpu", "triton")


@pytest.mark.parametrize("case", cases.MLP, ids=str)
def test_mlp(case: Any) -> None:
    cases.check_mlp(case, torch.float32, "cpu", "triton")


@pytest.mark.parametrize("case", cases.CONVOLUTION, ids=str)
def test_gated_convolution(case: Any) -> None:
    cases.check_convolution(case, torch.float32, "cpu", "triton")


@pytest.mark.parametrize("case", cases.POLYNOMIAL, ids=str)
def test_polynomial_attention(case: Any) -> None:
    cases.check_polynomial(case, torch.float32, "cpu", "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(dtype: torch.dtype) -> None:
    cases.check_embedding(dtype, "cpu", "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", cases.VOCABULARIES, ids=str)
def test_tokens(size: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "TILE", 512)
    cases.check_tokens(size, dtype, "cpu", "triton")


def test_a_decoder_of_kernels() -> None:
    """All kernels of a step, one after the other, in a ragged batch with an empty slot."""
    models = pytest.importorskip("rebased.models", reason="a model's config needs pydantic", exc_type=ImportError)
    config = models.preset("lm-paper-text-rebased", d_model=24, vocab_size=50, max_len=32)
    model = models.LanguageModel(config.model_copy(update={"n_layers": 2})).eval()
    logits = []
    for backend, fusion in (("chunked", "none"), ("triton", "auto")):
        decoder = models.Decoder(model, 3, capacity=16, fusion=fusion)
        for slot, prompt in ((0, [1, 2, 3]), (2, [4])):
            decoder.put(slot, prompt, decoder.prefill(prompt[:-1]), models.Sampling(temperature=0.0))
        with use_backend(backend):  # type: ignore[arg-type]
            decoder.fusion = models.Decoder(model, 1, fusion=fusion).fusion
            assert decoder.fusion == ("none" if fusion == "none" else "kernels")
            made = []
            for _ in range(3):
                step = decoder.step()
                made.append(torch.cat([decoder.logits[[0, 2]], step.logprobs[[0, 2], None]], dim=1))
        logits.append(torch.stack(made))
    assert_near(logits[1], logits[0], *(24, 24, 3, 136, 24, 96) * 2, condition=8.0)
