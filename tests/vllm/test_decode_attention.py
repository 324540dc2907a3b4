"""vLLM's own attention layers with our forward in them, on the CPU.

Mocks of what needs a GPU: plain torch takes the kernel's place, a recorder FlashAttention's, and times are given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError, UnsupportedError
from moe_optimizer.vllm_plugin.session import PluginSession

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.decode_cases import assert_attended, make_decode_case  # noqa: E402 - they need torch
from tests.decode_layers import (  # noqa: E402
    attend,
    install,
    make_layer,
    make_model,
    metadata_of,
    planned,
    server_config,
)

MOST = 4


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who computed, one after the other: "ours" or "FlashAttention", and where vLLM stored keys, "stored".

    Ours is faster up to `MOST` requests.
    """
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from moe_optimizer.ops.paged_decode import plain
    from moe_optimizer.vllm_plugin.attention import decode_attention, impl, speeds

    found: list[str] = []

    def run_kernel(call: Any) -> None:
        found.append("ours")
        call.out.copy_(plain(call))

    def forward(self: Any, *arguments: Any) -> Any:
        found.append("FlashAttention")
        return arguments[6]

    def do_kv_cache_update(*_: Any) -> None:
        found.append("stored")

    monkeypatch.setattr(FlashAttentionImpl, "do_kv_cache_update", do_kv_cache_update)
    for module in (decode_attention, impl):
        monkeypatch.setattr(module, "run_kernel", run_kernel)
    monkeypatch.setattr(decode_attention, "why_no_kernel", lambda _: None)
    monkeypatch.setattr(FlashAttentionImpl, "forward", forward)
    monkeypatch.setattr(speeds, "times", lambda *_: timed(up_to=MOST))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return found


def timed(*, up_to: int) -> tuple[Any, ...]:
    """Ours is faster at every length up to so many requests."""
    from moe_optimizer.vllm_plugin.attention.speeds import TOKENS, Timed

    return tuple(Timed(n, length, n / (up_to or 0.5) * 0.97, 1.0) for n in TOKENS for length in (512, 4096))


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    """A plan that has the pass."""
    return planned(tmp_path, monkeypatch)


def test_decode_steps_of_few_requests_reach_the_kernel_and_others_stay_vllms(session, computed):
    layers = [make_layer(), make_layer()]
    entry = install(session, make_model(layers))
    assert (entry.applied, entry.ran, entry.why_not) == (True, False, "")
    assert "8 heads on 2 of 64, 2 layers: ours up to 4" in entry.found
    for tokens in range(1, MOST + 2):
        for layer in layers:
            call = make_decode_case([30 * tokens, 0, 17, 1, 5][:tokens], heads=8, kv_heads=2, new=True)
            computed.clear()
            assert attend(layer, call, metadata_of(call)) is call.out
            assert computed == (["ours"] if tokens <= MOST else ["stored", "FlashAttention"])
            if tokens <= MOST:
                assert_attended(call)  # with the new keys, which the kernel has stored
    assert entry.ran


def test_keys_that_another_op_has_stored_are_left_as_they_are(session, computed):
    layer = make_layer()
    install(session, make_model([layer]))
    call = make_decode_case([40, 9], heads=8, kv_heads=2)
    computed.clear()
    attend(layer, call, metadata_of(call))
    assert computed == ["ours"]
    assert_attended(call)
    # Nothing of a step is left for the next one.
    step = make_decode_case([40], heads=8, kv_heads=2, new=True)
    attend(layer, step, metadata_of(step))
    attend(layer, call, metadata_of(call))
    assert_attended(call)


@pytest.mark.parametrize(("graphs", "who"), [("NONE", ["ours"]), ("FULL", ["ours"]), ("PIECEWISE", ["stored", "ours"])])
def test_keys_are_left_to_the_kernel_only_where_both_ops_run_or_are_captured_together(session, computed, graphs, who):
    layer = make_layer()
    install(session, make_model([layer]))
    call = make_decode_case([40, 9], heads=8, kv_heads=2, new=True)
    before = call.cache.clone()
    computed.clear()
    attend(layer, call, metadata_of(call), graphs=graphs)
    assert computed == who
    assert torch.equal(call.cache, before) == (graphs == "PIECEWISE")  # the recorder stores nothing


def test_rows_beyond_the_steps_tokens_are_not_read_or_written(session, computed):
    layer = make_layer()
    install(session, make_model([layer]))
    computed.clear()
    call = make_decode_case([40, 9, 3], heads=8, kv_heads=2)
    fewer = call._replace(q=call.q[:2], block_table=call.block_table[:2], lengths=call.lengths[:2], out=call.out[:2])
    attend(layer, call, metadata_of(fewer))
    assert computed == ["ours"]
    assert_attended(fewer)
    assert call.out[2].isnan().all()


@pytest.mark.parametrize(
    "changed",
    [
        {"max_query_len": 2}, {"causal": False}, {"causal": torch.ones(2)}, {"sliding_window": (127, 0)},
        {"use_cascade": True}, {"rswa_prefix_lens": torch.zeros(2)}, {"mm_prefix_query_range_tensor": torch.zeros(2)},
        {"mm_prefix_range_tensor": torch.zeros(2)}, {"num_actual_tokens": 0},
        {"num_actual_tokens": 1},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_any_other_step_is_vllms(session, computed, changed):
    layer = make_layer()
    install(session, make_model([layer]))
    call = make_decode_case([40, 9], heads=8, kv_heads=2, new=True)
    computed.clear()
    attend(layer, call, metadata_of(call, **changed))
    assert computed == ["stored", "FlashAttention"]


def test_the_profiling_run_which_has_no_metadata_is_vllms(session, computed):
    layer = make_layer()
    install(session, make_model([layer]))
    computed.clear()
    attend(layer, make_decode_case([4], heads=8, kv_heads=2), None)
    assert computed == ["FlashAttention"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"speculative_config": object()}, "speculation"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"cudagraph_mode": "FULL"}, "cudagraph_mode FULL"),
    ],
)
def test_servers_whose_steps_are_others_are_refused(session, computed, changed, reason):
    entry = install(session, make_model([make_layer()]), server_config(**changed))
    assert reason in entry.why_not
    assert not entry.applied


@pytest.mark.parametrize("variable", ["VLLM_BATCH_INVARIANT", "VLLM_USE_BREAKABLE_CUDAGRAPH"])
def test_modes_of_vllm_by_its_environment_are_refused(session, computed, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert variable in install(session, make_model([make_layer()])).why_not


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_graphs_of_decode_steps_alone_are_served(session, computed, mode):
    assert install(session, make_model([make_layer()]), server_config(cudagraph_mode=mode)).applied


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sliding_window": (127, 0)}, "sliding window"),
        ({"alibi_slopes": torch.ones(8)}, "ALiBi"),
        ({"sinks": torch.zeros(8)}, "sinks"),
        ({"logits_soft_cap": 30.0}, "soft cap"),
        ({"kv_sharing_target_layer_name": "0"}, "another layer's cache"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"dcp_world_size": 2}, "context parallelism"),
        ({"pcp_world_size": 2}, "context parallelism"),
    ],
)
def test_layers_that_the_kernel_does_not_compute_stay_as_they_are(session, computed, changed, reason):
    other, plain = make_layer(**changed), make_layer()
    stock = other.impl
    entry = install(session, make_model([other, plain]))
    assert other.impl is stock
    assert plain.impl is not stock
    assert type(plain.impl).__name__ == "DecodeAttentionImpl"
    assert reason in entry.found
    alone = install(session, make_model([make_layer(**changed)]))
    assert reason in alone.why_not


def test_caches_in_another_dtype_and_other_backends_are_refused(session, computed):
    half, other = make_layer(), make_layer()
    half.kv_cache_torch_dtype = torch.float16
    other.impl = object()
    reason = install(session, make_model([half, other])).why_not
    assert "float16" in reason
    assert "the backend is object" in reason


def test_a_model_without_such_layers_is_refused(session, computed):
    assert "no attention layers" in install(session, make_model([])).why_not


def test_what_the_kernel_refuses_in_a_step_is_computed_by_vllm_and_said(session, computed, monkeypatch):
    from moe_optimizer.vllm_plugin.attention import impl

    layer = make_layer()
    entry = install(session, make_model([layer]))

    def refuse(_: Any) -> None:
        raise UnsupportedError("keys of a block: got 24")

    monkeypatch.setattr(impl, "run_kernel", refuse)
    call = make_decode_case([40], heads=8, kv_heads=2, new=True)
    computed.clear()
    for _ in range(2):
        attend(layer, call, metadata_of(call))
    assert computed == ["stored", "FlashAttention"] * 2
    assert "fallback: keys of a block" in entry.why_not
    assert not entry.ran


def test_a_wrong_kernel_leaves_every_layer_as_it_was(session, computed, monkeypatch):
    from moe_optimizer.ops.paged_decode import plain
    from moe_optimizer.vllm_plugin.attention import decode_attention

    monkeypatch.setattr(decode_attention, "run_kernel", lambda call: call.out.copy_(plain(call) * 1.1))
    layer = make_layer()
    stock = layer.impl
    entry = install(session, make_model([layer]))
    assert "differs from plain torch by" in entry.why_not
    assert layer.impl is stock


def test_a_kernel_that_stores_keys_elsewhere_leaves_every_layer_as_it_was(session, computed, monkeypatch):
    from moe_optimizer.ops.paged_decode import plain
    from moe_optimizer.vllm_plugin.attention import decode_attention

    def run_kernel(call: Any) -> None:
        call.out.copy_(plain(call))
        call.cache[0, 0, 0, 0] += 1

    monkeypatch.setattr(decode_attention, "run_kernel", run_kernel)
    layer = make_layer()
    stock = layer.impl
    assert "stores other keys" in install(session, make_model([layer])).why_not
    assert layer.impl is stock


def test_where_it_is_not_faster_the_pass_is_not_applied_and_says_the_times(session, computed, monkeypatch):
    from moe_optimizer.vllm_plugin.attention import speeds

    monkeypatch.setattr(speeds, "times", lambda *_: timed(up_to=0))
    layer = make_layer()
    stock = layer.impl
    entry = install(session, make_model([layer]))
    assert not entry.applied
    assert "1.0 at 1 x 512" in entry.why_not
    assert layer.impl is stock


def test_it_has_to_be_faster_at_every_length():
    from moe_optimizer.vllm_plugin.attention.speeds import Timed, faster_up_to, lengths

    fast, slow = (0.97, 1.0), (0.98, 1.0)
    assert faster_up_to([Timed(1, 512, *fast), Timed(1, 4096, *fast), Timed(2, 512, *fast), Timed(2, 4096, *slow)]) == 1
    assert faster_up_to([Timed(1, 512, *fast), Timed(1, 4096, *slow)]) == 0
    assert faster_up_to([]) == 0
    assert lengths(40960) == (512, 4096, 32768)
    assert lengths(8192) == (512, 4096, 8192)
    assert lengths(300) == (300,)


def test_requests_of_a_timed_call_have_blocks_of_their_own(monkeypatch):
    from moe_optimizer.vllm_plugin.attention import speeds

    class Pool:
        """Of 2048 blocks of 16 keys; ours is faster at everything."""

        def __init__(self, *_: Any) -> None: ...

        def keys_of_each(self, tokens: int) -> int:
            return 2048 // tokens * 16

        def timed(self, tokens: int, length: int) -> Any:
            return speeds.Timed(tokens, length, 1.0, 2.0)

    monkeypatch.setattr(speeds, "Pool", Pool)
    found = [(each.tokens, each.length) for each in speeds.times(make_layer(), server_config())]
    assert found == [
        (1, 512), (1, 4096), (1, 32768), (2, 512), (2, 4096), (2, 16384), (4, 512), (4, 4096), (4, 8192),
        (8, 512), (8, 4096),
    ]  # fmt: skip


def test_what_is_required_and_cannot_be_ends_the_start(computed, tmp_path, monkeypatch):
    session = planned(tmp_path, monkeypatch, required=True)
    with pytest.raises(RequiredNotAppliedError, match="KV connector"):
        install(session, make_model([make_layer()]), server_config(kv_transfer_config=object()))


def test_this_vllms_source_is_known():
    from moe_optimizer.vllm_plugin.attention.decode_attention import RELIED_ON
    from moe_optimizer.vllm_plugin.compat import why_changed

    assert why_changed(RELIED_ON) == ""
