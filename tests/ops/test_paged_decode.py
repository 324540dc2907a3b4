"""The op of few new tokens' attention to a paged cache: its contract, and plain torch where no kernel is."""

from __future__ import annotations

import pytest
import torch

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import paged_decode
from moe_optimizer.ops.kernel_arguments import PagedDecode
from moe_optimizer.ops.paged_decode import why_no_kernel
from tests.decode_cases import assert_attended, make_decode_case


def attend(call: PagedDecode, out: torch.Tensor | None = None) -> torch.Tensor:
    new = {"new_keys": call.new_keys, "new_values": call.new_values, "slots": call.slots}
    return paged_decode(call.q, call.cache, call.block_table, call.lengths, scale=call.scale, out=out, **new)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("size", [32, 64])
def test_without_a_gpu_plain_torch_computes(layout, size):
    call = make_decode_case([40, 0, 17], heads=6, kv_heads=2, size=size, layout=layout)
    attend(call, call.out)
    assert_attended(call)
    assert torch.equal(attend(call), call.out)


def test_the_scale_is_the_callers():
    call = make_decode_case([40], sharpness=7.0)
    attend(call, call.out)
    assert_attended(call)


def test_new_keys_are_stored_and_seen():
    call = make_decode_case([40, 0, 17], heads=6, kv_heads=2, new=True)
    attend(call, call.out)
    assert_attended(call)
    assert call.new_keys is not None
    assert torch.equal(call.cache[int(call.block_table[2, 1]), :, 0, :64], call.new_keys[2])


def test_no_request_is_an_empty_result():
    call = make_decode_case([4])
    none = call._replace(q=call.q[:0], block_table=call.block_table[:0], lengths=call.lengths[:0])
    assert attend(none).shape == (0, *call.q.shape[1:])


CALL = make_decode_case([40, 3], heads=6, kv_heads=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": CALL.q[0]}, "q dimensions"),
        ({"q": CALL.q.double()}, "q dtype"),
        ({"q": CALL.q[:, :5]}, r"cache dim 1 \(K\): got 2, expected a divisor of 5"),
        ({"cache": CALL.cache[..., :64]}, "cache dim 3: got 64, expected 128"),
        ({"cache": CALL.cache.float()}, "cache dtype"),
        ({"cache": CALL.cache.transpose(2, 3).contiguous().transpose(2, 3)}, "cache stride of the last dimension"),
        ({"block_table": CALL.block_table.long()}, "block_table dtype"),
        ({"block_table": CALL.block_table[:1]}, r"block_table dim 0 \(T\)"),
        ({"lengths": CALL.lengths.long()}, "lengths dtype"),
        ({"out": CALL.out[..., :32]}, r"out dim 2 \(d\)"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, "got \\['slots'\\], expected all or none"),
        ({"new_keys": torch.zeros(2, 3, 64)}, "new_keys"),
        ({"lengths": torch.tensor([10**6, 3], dtype=torch.int32)}, "context_lengths: got 1000000"),
    ],
)
def test_what_breaks_the_contract_is_named(change, message):
    call = CALL._replace(**change)
    with pytest.raises(TensorContractError, match=message):
        attend(call, call.out)


def test_the_registered_op_passes_torchs_checks():
    for new in (False, True):
        call = make_decode_case([20, 5], new=new)
        torch.library.opcheck(torch.ops.moe_optimizer.paged_decode_out.default, tuple(call))


def test_the_kernel_is_for_gpus():
    assert "runs on a GPU" in (why_no_kernel(CALL) or "")
