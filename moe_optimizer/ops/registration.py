"""Registers an op with torch: its two forms, what they compute, and what a graph is traced with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_NAMESPACE = "moe_optimizer"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")

Inputs = TypeVar("Inputs")


def register_op(
    name: str,
    schema: str,
    *,
    parse: Callable[[tuple[Any, ...]], Inputs],
    check: Callable[[Inputs, Tensor | None], None],
    run: Callable[[Inputs, Tensor], None],
) -> None:
    """Register `name`, which returns a new tensor, and `name`_out, which writes into its last argument.

    The result has shape, dtype and device of the first argument, and contiguous rows. Both forms check their inputs,
    also while a graph is traced.

    Args:
        name: of the op.
        schema: its inputs as torch writes them, the tensor that the result is like first.
        parse: turns the arguments, in the schema's order, into what `check` and `run` take.
        check: raises TensorContractError for inputs, or inputs with an output, that break the contract.
        run: computes checked inputs into an output.
    """

    def new(*arguments: Any) -> Tensor:
        inputs = parse(arguments)
        check(inputs, None)
        out = _result_for(arguments[0])
        run(inputs, out)
        return out

    def new_in_trace(*arguments: Any) -> Tensor:
        check(parse(arguments), None)
        return _result_for(arguments[0])

    def into(*arguments: Any) -> None:
        inputs, out = parse(arguments[:-1]), arguments[-1]
        check(inputs, out)
        run(inputs, out)

    def into_in_trace(*arguments: Any) -> None:
        check(parse(arguments[:-1]), arguments[-1])

    _LIBRARY.define(f"{name}({schema}) -> Tensor")
    _LIBRARY.define(f"{name}_out({schema}, Tensor(a!) out) -> ()")
    _LIBRARY.impl(name, new, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{name}_out", into, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", new_in_trace, lib=_LIBRARY)
    torch.library.register_fake(f"{_NAMESPACE}::{name}_out", into_in_trace, lib=_LIBRARY)


def register_writing_op(
    name: str,
    schema: str,
    *,
    parse: Callable[..., Inputs],
    check: Callable[[Inputs], None],
    run: Callable[[Inputs], None],
) -> None:
    """Register an op that returns nothing and writes the arguments that its schema marks.

    Args:
        name: of the op.
        schema: its arguments as torch writes them.
        parse: turns the arguments, in the schema's order, into what `check` and `run` take.
        check: raises TensorContractError for what breaks the contract, also while a graph is traced.
        run: computes checked inputs.
    """

    def real(*arguments: Any) -> None:
        inputs = parse(*arguments)
        check(inputs)
        run(inputs)

    def in_trace(*arguments: Any) -> None:
        check(parse(*arguments))

    _LIBRARY.define(f"{name}({schema}) -> ()")
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", in_trace, lib=_LIBRARY)


def _result_for(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
