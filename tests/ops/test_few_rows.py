"""The product of few rows with a matrix against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_optimizer.ops import few_rows
from moe_optimizer.ops.few_rows import MOST_ROWS
from tests.compiled_kernels import ISAS, needs_kernels

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch before 2.10"),
]

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ERROR_OF_SUM = 2.0**-21
"""Of the sum of the products' magnitudes: float32 lanes of some hundred terms each, far below one rounding per term."""

# Sizes: below a register, odd, several registers and a rest; fewer rows of the matrix than streams, a rest of them,
# more than one task and thread.
SIZES = [(1, 1), (3, 7), (4, 16), (5, 33), (64, 40), (257, 129), (1030, 272)]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_exact(x: Tensor, weight: Tensor, bias: Tensor | None = None, isa: str = "") -> Tensor:
    """Within float32's error of the exact result, rounded once to the dtype."""
    got = few_rows.product(x, weight, bias, isa=isa)
    assert got is not None
    offset = 0 if bias is None else bias.double()
    want = x.double() @ weight.double().T + offset
    scale = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    assert got.dtype == x.dtype
    assert ((got.double() - want).abs() <= ERROR_OF_SUM * scale + 1.01 * ROUNDING[x.dtype] * want.abs()).all()
    return got


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("rows", range(MOST_ROWS + 1))
def test_the_product_is_exact_up_to_rounding(isa: str, dtype: torch.dtype, rows: int) -> None:
    for out_size, in_size in SIZES:
        weight, bias = random(out_size, in_size, dtype=dtype), random(out_size, dtype=dtype)
        x = random(rows, in_size, dtype=dtype)
        assert_exact(x, weight, None, isa)
        assert_exact(x, weight, bias, isa)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, MOST_ROWS), st.integers(0, 150), st.integers(0, 150), st.integers(0, 5),
    st.sampled_from(list(ROUNDING)), st.sampled_from(ISAS or ("",)),
)  # fmt: skip
def test_any_shape_and_distance_of_rows_is_exact(
    rows: int, out_size: int, in_size: int, gap: int, dtype: torch.dtype, isa: str
) -> None:
    x, weight = random(rows, in_size + gap, dtype=dtype), random(out_size, in_size + 2 * gap, dtype=dtype)
    # What lies between the rows must not be read into a sum.
    x[:, in_size:] = weight[:, in_size:] = float("nan")
    assert_exact(x[:, :in_size], weight[:, :in_size], None, isa)


def test_each_row_of_the_matrix_gives_its_own_output() -> None:
    size = 96
    x = torch.arange(1.0, size + 1)[None]
    assert torch.equal(assert_exact(x, torch.eye(size)), x)
    assert torch.equal(assert_exact(x, torch.eye(size), torch.ones(size)), x + 1)


@pytest.mark.parametrize("isa", ISAS)
def test_neither_threads_nor_other_rows_change_a_bit(isa: str) -> None:
    x, weight, threads = random(MOST_ROWS, 520), random(1500, 520), torch.get_num_threads()
    want = assert_exact(x, weight, None, isa)
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            assert torch.equal(assert_exact(x, weight, None, isa), want)
        finally:
            torch.set_num_threads(threads)
    for rows in range(1, MOST_ROWS):
        assert torch.equal(assert_exact(x[:rows], weight, None, isa), want[:rows])


def test_what_is_not_a_number_shows_in_its_own_outputs_alone() -> None:
    x, weight = random(3, 37), random(50, 37)
    x[1, 36] = float("nan")
    weight[7, 0] = float("inf")
    got = few_rows.product(x, weight)
    assert got is not None
    assert got[1].isnan().all()
    finite = got[[0, 2]].isfinite()
    assert not finite[:, 7].any()
    assert finite[:, [n for n in range(50) if n != 7]].all()


def test_what_does_not_fit_is_left_to_torch() -> None:
    x, weight, bias = random(3, 16), random(20, 16), random(20)
    assert few_rows.product(x, weight, bias) is not None
    for wrong in (
        (random(MOST_ROWS + 1, 16), weight, bias),
        (x[0], weight, bias),
        (x[None], weight, bias),
        (x[:, :15], weight, bias),
        (x.T.contiguous().T, weight, bias),
        (x.double(), weight.double(), bias.double()),
        (x.half(), weight, bias),
        (x, weight[0], bias),
        (x, weight.bfloat16(), bias),
        (x, weight.T.contiguous().T, bias),
        (x, weight, bias[:19]),
        (x, weight, bias[:, None]),
        (x, weight, bias.half()),
        (x, weight, random(40)[::2]),
        (x.to("meta"), weight, bias),
    ):
        assert few_rows.product(*wrong) is None


def test_a_compiled_caller_gets_torchs_product() -> None:
    x, weight = random(2, 8), random(4, 8)
    compiled = torch.compile(lambda: few_rows.product(x, weight) is None, backend="eager", fullgraph=True)
    assert compiled()
