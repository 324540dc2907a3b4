"""A product with a copy of a matrix in oneDNN's order is that with the matrix."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_optimizer.ops import onednn_product

WEIGHT = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))


# The bias changes the call: it is an argument of the same operation.
@pytest.mark.parametrize("bias", [None, torch.arange(96.0)], ids=["no bias", "bias"])
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_the_product_is_that_of_the_matrix(bias: torch.Tensor | None) -> None:
    copy = onednn_product.packed(WEIGHT)
    assert copy is not None
    x = torch.randn(17, 64, generator=torch.Generator().manual_seed(1))
    want = torch.nn.functional.linear(x.double(), WEIGHT.double(), None if bias is None else bias.double())
    with torch.inference_mode():
        assert (onednn_product.product(x, copy, bias) - want).abs().max() < 1e-4


def test_there_is_no_copy_for_a_type_that_onednn_does_not_multiply() -> None:
    assert onednn_product.packed(WEIGHT.half()) is None


def test_another_torch_has_no_copy_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert onednn_product.packed(WEIGHT) is None
    assert "twice the time" in caplog.text
