"""Parses, compares and merges arguments of `vllm serve`."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    path: str
    """Keys into a configuration that follow the flag: "mode" for "--compilation-config.mode"; mostly ""."""
    words: tuple[str, ...]
    """As given, the flag first."""

    @property
    def value(self) -> str:
        """The value as text: after "=", or the words after the flag; "" for a bare flag, "false" for its --no- form."""
        level = _LEVEL.fullmatch(self.words[0])
        if level is not None:
            return level[1]
        if self.words[0].startswith("--no-"):
            return "false"
        _, equals, tail = self.words[0].partition("=")
        return tail if equals else " ".join(self.words[1:])


@dataclass(frozen=True, init=False)
class ServeArguments:
    """Arguments of `vllm serve`, or of the router before several servers, in order. Flags are asked for by their long
    form: "--tensor-parallel-size" also finds "-tp".
    """

    words: tuple[str, ...]
    """As a command line has them, flag and value apart ("--kv-cache-dtype", "fp8")."""
    arguments: tuple[Argument, ...] = field(compare=False, repr=False)
    values: Mapping[str, str] = field(compare=False, repr=False)
    """Each flag with its value; of a flag that is repeated the last.

    A configuration given key by key ("--eplb-config.use_async false") is one argument, the JSON object that vLLM makes
    of its keys: it takes the place of one that is given whole.
    """

    def __init__(self, *words: str) -> None:
        """Group `words` into flags with their values; a negative number is a value.

        Raises:
            InputError: a word before the first flag: `vllm serve` takes only the model there.
        """
        arguments = _parse(words)
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "values", _values(arguments))

    def __bool__(self) -> bool:
        return bool(self.words)

    def __contains__(self, flag: str) -> bool:
        return flag in self.values

    def __add__(self, other: ServeArguments) -> ServeArguments:
        return ServeArguments(*self.words, *other.words)

    def without(self, *flags: str) -> ServeArguments:
        """Return the arguments less those of `flags`."""
        return ServeArguments(*(word for each in self.arguments if each.flag not in flags for word in each.words))

    def overridden_by(self, other: ServeArguments) -> ServeArguments:
        """Return the arguments less those whose flags `other` has too, then `other`."""
        return self.without(*other.values) + other

    def value(self, flag: str) -> str | None:
        """Return the value of `flag`, "" for a bare flag, "false" for its --no- form; None when it is absent."""
        return self.values.get(flag)

    def is_on(self, flag: str) -> bool:
        """Return whether `flag` is given, and not in its --no- form."""
        return self.values.get(flag, "false") != "false"

    def count(self, flag: str) -> int | None:
        """Return the whole number given for `flag`; None when it is absent.

        Raises:
            InputError: it is not a whole number of at least 1.
        """
        if flag not in self.values:
            return None
        number = read_integer(self.values[flag], flag=flag)
        if number < 1:
            raise InputError(f"{flag}: got {number}, expected at least 1")
        return number

    def json_object(self, flag: str) -> dict[str, Any] | None:
        """Return the JSON object given for `flag`; None when it is absent or something else."""
        try:
            found = json.loads(self.values.get(flag, ""))
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def drain_timeout_s(self) -> float:
        """Return how long a server may take to finish its requests, in seconds; 0, as in vLLM, where no flag says.

        Raises:
            InputError: the user's --shutdown-timeout is not a number.
        """
        text = self.values.get("--shutdown-timeout", "0")
        if not text.isdecimal():
            raise InputError(f"--shutdown-timeout: got {text!r:.80}, expected a whole number of seconds")
        return float(text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Have pydantic read and describe the JSON form, a list of words."""
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(lambda words: cls(*words), handler(tuple[str, ...]))


def argument_lines(words: Sequence[str], width: int) -> list[str]:
    """Return a flag and its values, quoted, in lines of at most `width` characters, but for a value that is longer."""
    lines = [shlex.quote(words[0])]
    for value in map(shlex.quote, words[1:]):
        if len(lines[-1]) + 1 + len(value) <= width:
            lines[-1] += f" {value}"
        else:
            lines.append(f"    {value}")
    return lines


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


def _parse(words: tuple[str, ...]) -> tuple[Argument, ...]:
    starts = [index for index, word in enumerate(words) if _is_flag(word)]
    if words and starts[:1] != [0]:
        raise InputError(
            f"vllm arguments: got {words[0]!r:.80}, expected a flag such as --seed first",
            hint="after -- come arguments of vllm serve; the model is given by --model before it",
        )
    spans = itertools.pairwise([*starts, len(words)])
    return tuple(Argument(*_canonical(words[start]), words[start:end]) for start, end in spans)


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit() and word[1] != "."


def _canonical(word: str) -> tuple[str, str]:
    """Return the long form of a flag, and the keys that follow it; these keep their underscores."""
    name = word.partition("=")[0]
    if not name.startswith("--"):
        if _LEVEL.fullmatch(name):
            return _SHORT["-O"], ""
        short, _, path = name.partition(".")
        return _SHORT.get(short, short), path
    name, _, path = name.partition(".")
    name = name.replace("_", "-")
    name = _SHORT.get(name, name)
    return "--" + name.removeprefix("--").removeprefix("no-"), path


def _values(arguments: tuple[Argument, ...]) -> dict[str, str]:
    values: dict[str, str] = {}
    by_key: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        if argument.path:
            _set_nested(by_key.setdefault(argument.flag, {}), argument.path.split("."), argument.value)
        else:
            values[argument.flag] = argument.value
    return values | {flag: json.dumps(config) for flag, config in by_key.items()}


def _set_nested(config: dict[str, Any], path: list[str], text: str) -> None:
    """Set the value at a path of keys, as vLLM reads it: JSON where it is that, else a text."""
    for key in path[:-1]:
        if not isinstance(config.get(key), dict):
            config[key] = {}
        config = config[key]
    try:
        config[path[-1]] = json.loads(text)
    except (ValueError, RecursionError):
        config[path[-1]] = text


NO_ARGUMENTS = ServeArguments()
