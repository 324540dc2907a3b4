"""Registers an op with torch: its two forms, what they compute, and what a graph is traced with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_NAMESPACE = "moe_optimizer"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_MOST_KINDS = 4096
"""Chosen: more kinds of calls than a process makes of an op; beyond, they are forgotten and checked again."""

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
        check: raises TensorContractError for inputs, or inputs with an output, that break the contract. It looks at
            shapes, strides, dtypes, devices and plain values only: a call that is like one which passed has passed.
        run: computes checked inputs into an output.
    """
    passed: set[tuple[Any, ...]] = set()

    def checked(arguments: tuple[Any, ...], out: Tensor | None) -> Inputs:
        inputs = parse(arguments)
        kind = tuple([_kind(each) for each in (*arguments, out)])
        if kind not in passed:
            check(inputs, out)
            if len(passed) >= _MOST_KINDS:
                passed.clear()
            passed.add(kind)
        return inputs

    def new(*arguments: Any) -> Tensor:
        inputs = checked(arguments, None)
        out = _result_for(arguments[0])
        run(inputs, out)
        return out

    def new_in_trace(*arguments: Any) -> Tensor:
        check(parse(arguments), None)
        return _result_for(arguments[0])

    def into(*arguments: Any) -> None:
        out = arguments[-1]
        run(checked(arguments[:-1], out), out)

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


def register_result_op(
    name: str,
    schema: str,
    *,
    check: Callable[..., None],
    run: Callable[..., Tensor],
    result: Callable[..., Tensor],
) -> None:
    """Register an op that returns a new tensor, which what computes it makes itself.

    Args:
        name: of the op.
        schema: its arguments as torch writes them.
        check: raises TensorContractError for arguments that break the contract, also while a graph is traced.
        run: returns the result of checked arguments.
        result: returns a tensor like that one, without values.
    """

    def real(*arguments: Any) -> Tensor:
        check(*arguments)
        return run(*arguments)

    def in_trace(*arguments: Any) -> Tensor:
        check(*arguments)
        return result(*arguments)

    _LIBRARY.define(f"{name}({schema}) -> Tensor")
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", in_trace, lib=_LIBRARY)


def _kind(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.shape, argument.stride(), argument.dtype, argument.device


def _result_for(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
