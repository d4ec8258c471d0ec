"""Texts of one line."""

from vlm.data.text.lines import one_line


def test_any_white_space_but_plain_spaces_becomes_one_space():
    assert one_line("a  b") == "a  b"
    for space in (chr(code) for code in range(0x110000) if chr(code).isspace() and chr(code) != " "):
        assert one_line(f"{space} a {space}\n{space} b{space}") == "a b"


def test_a_translation_keeps_its_no_break_spaces():
    assert one_line("\t « Oui\u00a0! »\r\n—\u202fNon\u00a0\n", keep_no_break=True) == "« Oui\u00a0! » —\u202fNon\u00a0"
