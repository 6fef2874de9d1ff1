import pytest

from oscine.system.yaml_text import YamlError, parse_yaml


def test_a_key_that_is_there_twice_is_an_error_at_its_line() -> None:
    with pytest.raises(YamlError, match=r"^line 4: b is there twice$"):
        parse_yaml("a:\n- b: 1\n  c: 2\n  b: 1\n")


def test_a_key_may_override_a_merged_one() -> None:
    text = "c: &c {x: 1, y: 1}\nb: {<<: *c, x: 2}\n1: one\n'1': text"
    assert parse_yaml(text) == {"c": {"x": 1, "y": 1}, "b": {"y": 1, "x": 2}, 1: "one", "1": "text"}


def test_a_text_with_colons_is_no_number_to_the_base_60() -> None:
    assert parse_yaml("a: 1:2:3\nb: 64:1024:512\nc: -1:2.5\nd: 12\ne: 1.5e+3\nf: 0x1f") == {
        **{"a": "1:2:3", "b": "64:1024:512", "c": "-1:2.5"},
        **{"d": 12, "e": 1500.0, "f": 31},
    }
