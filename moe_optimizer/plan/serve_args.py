"""Arguments of `vllm serve` as data: splitting, comparing and merging lists of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_optimizer.errors import InputError

# vLLM's short forms: a plan must see what they say, whatever they are called.
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-asc": "--api-server-count",
    "-sc": "--speculative-config",
    "-dc": "--diffusion-config",
    "-ac": "--attention-config",
    "-q": "--quantization",
    "-cc": "--compilation-config",
    "-O": "--optimization-level",
    "--device-memory-utilization": "--gpu-memory-utilization",
}
_LEVEL = re.compile(r"-O(\d)")
"""vLLM takes the level in the word itself."""
_INTEGER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
# As vLLM reads them: small letters decimal, capital letters binary.
_FACTORS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


@dataclass(frozen=True, slots=True)
class Argument:
    """One flag with its values."""

    flag: str
    """The long form with dashes, without --no-: "--enable-prefix-caching" for "--no-enable_prefix_caching"."""
    tokens: tuple[str, ...]
    """The words as given, the flag first."""

    @property
    def value(self) -> str:
        """The value as text: after "=", or the words after the flag; "" for a bare flag."""
        level = _LEVEL.fullmatch(self.tokens[0])
        if level is not None:
            return level[1]
        head, equals, tail = self.tokens[0].partition("=")
        return tail if equals and head.startswith("-") else " ".join(self.tokens[1:])


def split_arguments(words: Sequence[str]) -> tuple[Argument, ...]:
    """Group words into flags with their values; a negative number is a value.

    Raises:
        InputError: a word before the first flag: `vllm serve` takes only the model there.
    """
    arguments: list[Argument] = []
    for word in words:
        if _is_flag(word):
            arguments.append(Argument(_canonical(word), (word,)))
        elif not arguments:
            raise InputError(
                f"vllm arguments: got {word!r:.80}, expected a flag such as --seed first",
                hint="after -- come arguments of vllm serve; the model is given by --model before it",
            )
        else:
            last = arguments[-1]
            arguments[-1] = Argument(last.flag, (*last.tokens, word))
    return tuple(arguments)


def without_flags(words: Sequence[str], flags: Iterable[str]) -> tuple[str, ...]:
    """Return `words` less every argument whose flag is in `flags` (long forms)."""
    dropped = frozenset(flags)
    return tuple(
        word for argument in split_arguments(words) if argument.flag not in dropped for word in argument.tokens
    )


def flag_value(words: Sequence[str], flag: str) -> str | None:
    """Return the value of `flag` (long form), the last one when it is repeated; None when it is absent."""
    values = [argument.value for argument in split_arguments(words) if argument.flag == flag]
    return values[-1] if values else None


def read_integer(text: str, *, flag: str) -> int:
    """Read a whole number as vLLM does: 8192, 8k (8000), 8K (8192), 1.5M.

    Raises:
        InputError: it is not one; the message names `flag`.
    """
    match = _INTEGER.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{flag}: got {text!r:.80}, expected a whole number, such as 8192 or 8K")
    number = float(match[1]) * _FACTORS[match[2]] if "." in match[1] else int(match[1][:18]) * _FACTORS[match[2]]
    return int(number)


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit() and word[1] != "."


def _canonical(word: str) -> str:
    name = word.partition("=")[0]
    if not name.startswith("--"):
        if _LEVEL.fullmatch(name):
            return _SHORT["-O"]
        # -cc.mode=3 carries a path in the word itself.
        short, dot, rest = name.partition(".")
        return _SHORT.get(short, short) + dot + rest
    # What follows a dot is a key of a configuration and keeps its underscores.
    name, dot, path = name.partition(".")
    name = name.replace("_", "-")
    name = _SHORT.get(name, name)
    return ("--" + name.removeprefix("--no-") if name.startswith("--no-") else name) + dot + path


def drain_timeout_s(arguments: Sequence[str]) -> float:
    """Return how long a server may take to finish its requests, in seconds; 0, as in vLLM, where no flag says.

    Raises:
        InputError: the user's --shutdown-timeout is not a number.
    """
    text = flag_value(arguments, "--shutdown-timeout")
    if text is None:
        return 0.0
    if not text.isdecimal():
        raise InputError(f"--shutdown-timeout: got {text!r:.80}, expected a whole number of seconds")
    return float(text)
