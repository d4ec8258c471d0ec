"""Pages show what texts hold, and obey none of it."""

from vlm.io.page import escape, paragraph, table


def test_control_characters_are_shown_by_their_numbers() -> None:
    assert escape("a\x1b[31m<b>\0\x9b\x7f") == "a\\x1b[31m&lt;b&gt;\\x00\\x9b\\x7f"
    assert paragraph("\x1b") == '<p class="">\\x1b</p>' and "\x1b" not in table(["\x1b"], [["\x1b"]])


def test_letters_of_all_scripts_and_ends_of_lines_stay() -> None:
    text = "知更鳥 \u0915\u094d\u200d\u0937 👩\u200d👧\n\tü"
    assert escape(text) == text and escape('"', quote=True) == "&quot;"
