"""Tables of chosen and rejected answers, in the forms that TRL reads."""

import json
from pathlib import Path
from typing import Any

import pytest
from caption_data import NO_HOLD_OUT, picture

from vlm.data.records import Preference
from vlm.data.sources.preferences import PreferenceTable

PROMPT, CHOSEN, REJECTED = [{"role": "user", "content": "what?"}], "A cat.", "A dog."
SYSTEM = {"role": "system", "content": "be nice"}


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "image"} if text == "IMAGE" else {"type": "text", "text": text} for text in texts]


def read(root: Path, row: dict[str, Any], *, needs: tuple[str, ...] = ("image", "pairs")) -> Preference:
    """The pair of a table of one row, of JSON lines and of Parquet."""
    pairs = []
    (root / "rows.jsonl").write_text(json.dumps(row) + "\n")
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([row]), root / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        source = PreferenceTable(path=str(root / name), root=str(root), needs=needs, **NO_HOLD_OUT)
        (record,) = source.split("train").records()
        assert ("image" in record) == ("images" in row or "image" in row)
        pairs += record["pairs"]
    assert pairs[0] == pairs[1]
    return pairs[0]


FORMS: dict[str, tuple[dict[str, Any], Preference]] = {
    "texts": (
        {"prompt": "what?", "chosen": CHOSEN, "rejected": REJECTED},
        Preference((("user", "what?"),), CHOSEN, REJECTED),
    ),
    "messages": (
        {"prompt": [SYSTEM, *PROMPT], "chosen": answer(CHOSEN), "rejected": answer(REJECTED)},
        Preference((("system", "be nice"), ("user", "what?")), CHOSEN, REJECTED),
    ),
    "implicit prompt": (
        {"chosen": [*PROMPT, *answer(CHOSEN)], "rejected": [*PROMPT, *answer(REJECTED)]},
        Preference((("user", "what?"),), CHOSEN, REJECTED),
    ),
    "prompt that the conversations repeat": (
        {"prompt": "what?", "chosen": [*PROMPT, *answer(CHOSEN)], "rejected": [*PROMPT, *answer(REJECTED)]},
        Preference((("user", "what?"),), CHOSEN, REJECTED),
    ),
    "captions": ({"image": "0.png", "chosen": CHOSEN, "rejected": REJECTED}, Preference((), CHOSEN, REJECTED)),
    "images in parts": (
        {
            "images": ["0.png", "1.png"],
            "prompt": [{"role": "user", "content": parts("compare", "IMAGE", "and", "IMAGE")}],
            "chosen": [{"role": "assistant", "content": parts(CHOSEN)}],
            "rejected": [{"role": "assistant", "content": parts(REJECTED)}],
        },
        Preference((("user", "compare  and"),), CHOSEN, REJECTED, ((8, 12),)),
    ),
}


@pytest.mark.parametrize(("row", "pair"), FORMS.values(), ids=FORMS)
def test_a_pair_is_read_in_each_form(tmp_path: Path, row: dict[str, Any], pair: Preference) -> None:
    for number in range(2):
        picture(tmp_path / f"{number}.png")
    assert read(tmp_path, row, needs=("pairs",)) == pair


def test_pairs_about_an_image_are_one_record_and_repeated_ones_are_named(tmp_path: Path) -> None:
    picture(tmp_path / "0.png")
    row = {"image": "0.png", "prompt": "what?", "chosen": CHOSEN, "rejected": REJECTED}
    rows = [row, row | {"rejected": "A bird."}, row]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    source = PreferenceTable(path=str(tmp_path / "rows.json"), root=str(tmp_path), **NO_HOLD_OUT)
    (record,) = source.split("train").records()
    assert [pair.rejected for pair in record["pairs"]] == [REJECTED, "A bird."]
    (line,) = source.repeated
    assert "object 3: repeats a pair of answers of 0.png" in line and REJECTED in line


def test_a_row_without_prompt_and_image_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": f"what {n}?", "chosen": CHOSEN, "rejected": REJECTED} for n in range(200)]
    rows[7] = {"chosen": CHOSEN, "rejected": REJECTED}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = PreferenceTable(path=str(tmp_path / "rows.jsonl"), needs=("pairs",))
    (line,) = source.skipped
    assert line.endswith("line 8: has neither a prompt nor an image")
