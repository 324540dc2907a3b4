"""Names of the CUDA kernels in tables and plans."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from moe_optimizer.ops.cuda_variants import MoeSizes, candidate_variants, variant_named
from moe_optimizer.specs.kernel_speeds import rounds_activations


def sizes(tokens: int, weight_bits: int) -> MoeSizes:
    return MoeSizes(
        num_tokens=tokens, top_k=8, num_experts=128, hidden_size=2048, intermediate_size=768, weight_bits=weight_bits
    )


@pytest.mark.parametrize("weight_bits", [4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 64, 500, 8192])
def test_every_variant_that_may_be_measured_is_found_by_its_name(tokens: int, weight_bits: int) -> None:
    variants = candidate_variants(sizes(tokens, weight_bits), rounded_mxfp4=True)
    assert variants
    assert [variant_named(str(variant)) for variant in variants] == list(variants)
    assert len({str(variant) for variant in variants}) == len(variants)


def test_activations_are_rounded_to_fp8_only_where_the_weights_are_fp8_or_it_is_asked_for() -> None:
    for tokens in (1, 64, 512, 8192):
        for bits in (4, 16):
            assert not any(rounds_activations(str(each)) for each in candidate_variants(sizes(tokens, bits)))
    names = [str(each) for each in candidate_variants(sizes(512, 8))]
    assert {name for name in names if rounds_activations(name)} == {
        name for name in names if name.startswith("grouped-fp8-")
    }
    assert any(map(rounds_activations, names))
    asked = [str(each) for each in candidate_variants(sizes(512, 4), rounded_mxfp4=True)]
    assert {name for name in asked if rounds_activations(name)} == {
        name for name in asked if name.startswith("grouped-mxfp4-")
    }
    assert any(map(rounds_activations, asked))


@pytest.mark.parametrize("name", ["", "stock", "grouped-", "grouped-int4-n16", "grouped-bf16-nx", "direct-chained2"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        variant_named(name)
