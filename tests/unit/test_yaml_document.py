from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.errors import InputError
from moe_optimizer.yaml_document import MAX_BYTES, parse_yaml


def test_every_part_knows_its_line():
    document = parse_yaml("a: 1\nb:\n  c:\n    - x\n    - y\n", origin="f")
    assert document.data == {"a": 1, "b": {"c": ["x", "y"]}}
    assert document.line(("b", "c", 1)) == 5
    assert document.line(("b", "c", 1, "missing")) == 5
    assert document.line(("missing",)) == 1


def test_on_and_off_stay_words_while_true_is_a_boolean():
    data = parse_yaml("{a: on, b: off, c: yes, d: No, e: true, f: null, g: 0.5, on: x}", origin="f").data
    assert data == {"a": "on", "b": "off", "c": "yes", "d": "No", "e": True, "f": None, "g": 0.5, "on": "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1]\nb: *x", "f:1: anchors and aliases"),
        ("a: 1\nb: 2\na: 3", "f:3: key `a`"),
        ("a: !!python/object/apply:os.system [id]", "got 'tag:yaml.org,2002:python"),
        ("a: !custom x", "got '!custom'"),
        ("a: 2020-01-01", "f:1: got '2020-01-01'"),
        ("<<: {a: 1}", "f:1: got key '<<'"),
        ("1: x", "f:1: got key '1'"),
        ("? [a, b]\n: x", "f:1: got key 'seq'"),
        ("a: [1", "f:1: not YAML"),
        ("a: 1\n---\nb: 2", "not YAML"),
        ("a: \x00", "f: not YAML"),
        ("", "f: empty"),
        ("[" * 4000, " 16 deep"),
        ("a: " + "9" * 5000, "f:1: got '9999"),
        ("#" * (MAX_BYTES + 1), "too large"),
    ],
)
def test_what_could_surprise_is_refused_with_its_line(text, message):
    with pytest.raises(InputError, match="f") as caught:
        parse_yaml(text, origin="f")
    assert message in str(caught.value)


@given(st.text(max_size=300))
def test_any_text_gives_data_or_an_input_error(text):
    with contextlib.suppress(InputError):
        parse_yaml(text, origin="f")
