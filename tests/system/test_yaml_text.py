import pytest

from oscine.system.yaml_text import YamlError, parse_yaml


def test_a_key_that_is_there_twice_is_an_error_at_its_line() -> None:
    with pytest.raises(YamlError, match=r"^line 4: b is there twice$"):
        parse_yaml("a:\n- b: 1\n  c: 2\n  b: 1\n")


def test_a_key_may_override_a_merged_one() -> None:
    text = "c: &c {x: 1, y: 1}\nb: {<<: *c, x: 2}\n1: one\n'1': text"
    assert parse_yaml(text) == {"c": {"x": 1, "y": 1}, "b": {"y": 1, "x": 2}, 1: "one", "1": "text"}
