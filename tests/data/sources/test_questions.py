"""Questions about images of one's own, from tables."""

import json

import pytest
from caption_data import NO_HOLD_OUT, png_of, refusal
from easy_vqa_data import draw_easy_vqa

from vlm.data.records import Question, select_last_questions
from vlm.data.sources.questions import Conversations, EasyVQA, QuestionTable


def questions(root, text, name="questions.csv", **options):
    (root / name).write_text(text)
    return QuestionTable(root=str(root), path=name, **NO_HOLD_OUT | options)


def test_all_questions_about_an_image_are_one_record(root):
    text = "image,question,answer,kind\na.png,what is it?,a cat,object\nb.png,how many?,two,count\n"
    one, other = questions(root, text + "a.png,how many?,one,count\n", kind_column="kind").split("train").records()
    assert (one.id, other.id) == ("a.png", "b.png")
    assert one["questions"] == [Question("what is it?", "a cat", "object"), Question("how many?", "one", "count")]
    assert one.texts == ["what is it? a cat", "how many? one"]
    assert one.image().getpixel((0, 0)) == (255, 0, 0)


def test_a_question_about_several_images_has_them_in_order(root):
    text = "image,question,answer\na.png | b.png,what differs?,the colour\nb.png|a.png,what differs?,nothing\n"
    source = questions(root, text + "./a.png|b.png,which is red?,the first\n", image_separator="|")
    one, other = source.split("train").records()
    assert (one.id, other.id) == ("a.png b.png", "b.png a.png")
    assert [question.answer for question in one["questions"]] == ["the colour", "the first"]
    assert one.images() == other.images()[::-1] and one.read_stamp() != other.read_stamp()
    assert source.find_uncaptioned_images() == [str(root / "c.png")]
    missing = "image,question,answer\na.png|no.png,what?,x\n"
    assert (
        "no.png" in refusal(questions, root, missing, image_separator="|").partition("images are missing, such as")[2]
    )


def test_easy_vqa_has_kinds_and_names_what_is_wrong(tmp_path):
    source = EasyVQA(root=str(draw_easy_vqa(tmp_path, images=2)))
    _, record = source.split("test").records()
    asked = [Question("is it red?", "no", "yes_no"), Question("what shape is it?", "circle", "shape")]
    assert record["questions"] == [*asked, Question("what color is it?", "blue", "color")]
    assert record.image().getpixel((0, 0)) == (0, 0, 255) and source.splits == ("train", "test")
    file = tmp_path / "test" / "questions.json"
    file.write_text('[["is it red?", "yes", "0"]]')
    message = refusal(EasyVQA, root=str(tmp_path))
    assert message.startswith(f"{file}: 1 of 1") and "entry 1: is not [question, answer, image number]" in message
    file.unlink()
    assert f"{file}: no such file; set data.root" in refusal(EasyVQA, root=str(tmp_path))


SAID = ["what is it?", "a cat", "and its colour?", "red"]
ASKED = [
    Question("what is it?", "a cat"),
    Question("and its colour?", "red", before=(("user", "what is it?"), ("assistant", "a cat"))),
]
LLAVA = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(SAID)]
LLAVA[0]["value"] = "<image>\nwhat is it?"
MESSAGES = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(SAID)]
PARTS = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in MESSAGES]
PARTS[0]["content"].insert(0, {"type": "image"})
TEXTS = [{"user": SAID[n], "assistant": SAID[n + 1], "source": "x"} for n in (0, 2)]
FORMS = {"llava": {"conversations": LLAVA}, "messages": {"messages": MESSAGES}, "parts": {"messages": PARTS}}
FORMS |= {"texts": {"texts": TEXTS}}


def read(root, *rows, name="chats.jsonl", **options):
    text = "".join(json.dumps(row) + "\n" for row in rows) if name.endswith("l") else json.dumps(rows)
    (root / name).write_text(text)
    return Conversations(root=str(root), path=name, **NO_HOLD_OUT, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("images", [{"image": "a.png"}, {"images": ["a.png"]}])
def test_each_form_gives_the_same_turns(root, form, images):
    source = read(root, images | FORMS[form], name="chats.json")
    record = source.split("train").record(0)
    assert record["questions"] == ASKED
    assert select_last_questions(record["questions"]) == ASKED[1:]
    assert record.image().getpixel((0, 0)) == (255, 0, 0)


def test_conversations_of_the_same_images_are_one_record(root):
    one, other = {"images": ["a.png", "b.png"]}, {"image": "c.png"}
    source = read(root, one | FORMS["texts"], other | FORMS["texts"], one | {"texts": TEXTS[:1]}, one | {"texts": []})
    first, second = source.split("train").records()
    assert (first.id, second.id) == ("a.png b.png", "c.png")
    assert len(first.images()) == 2 and len(second.images()) == 1
    assert [*map(str, first["questions"])] == ["what is it? a cat", "and its colour? red", "what is it? a cat"]
    assert source.skipped == [f"{root / 'chats.jsonl'}, line 4: no answer in the conversation"]


def test_text_alone_is_left_out_and_the_words_of_the_system_are_kept(root):
    system = {"role": "system", "content": "Be short."}
    source = read(root, FORMS["texts"], {"image": "a.png", "messages": [system, *MESSAGES[:2]]})
    assert source.skipped == [f"{root / 'chats.jsonl'}, line 1: names no image"]
    (question,) = source.split("train").record(0)["questions"]
    assert question.turns == (("system", "Be short."), ("user", SAID[0]), ("assistant", SAID[1]))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("bare", [True, False])
def test_a_table_holds_several_images_a_row(tmp_path, suffix, bare):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [["red", "blue"], ["green"]]
    cells = [[png_of(color) if bare else {"bytes": png_of(color), "path": None} for color in row] for row in rows]
    table, path = pa.table({"images": cells, "texts": [TEXTS, TEXTS[:1]]}), tmp_path / f"chats.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    records = list(Conversations(path=str(path), **NO_HOLD_OUT).split("train").records())
    colors = [[image.getpixel((0, 0)) for image in record.images()] for record in records]
    assert colors == [[(255, 0, 0), (0, 0, 255)], [(0, 128, 0)]]
    assert [record["questions"] for record in records] == [ASKED, ASKED[:1]]
    assert records[0].read_file() == png_of("red")


def test_a_question_may_have_the_answers_of_several_people(root):
    row = {"image": "a.png", "question": "what?", "answer": ["dog", "cat", "cat"]}
    (root / "q.jsonl").write_text(json.dumps(row))
    source = QuestionTable(root=str(root), path="q.jsonl", **NO_HOLD_OUT)
    (question,) = source.split("train").record(0)["questions"]
    assert question == Question("what?", "cat", answers=("dog", "cat", "cat"))
    assert question.accepts("dog") and not question.accepts("bird")


def test_marks_of_rows_without_an_image_and_of_answers_are_not_counted(root):
    """LLaVA's mix has rows with a null or empty image; an answer may be about the mark itself."""
    rows = [{"image": image, "conversations": LLAVA} for image in (None, "", [])]
    answer = {"from": "gpt", "value": "The <image> tag."}
    source = read(root, {"image": "a.png", "conversations": [LLAVA[0], answer]}, *rows)
    assert [line.kind for line in source.skipped] == ["no image"] * 3
    assert len(source.split("train").record(0)["questions"]) == 1


def test_empty_answers_inside_conversations_are_counted(root):
    user, answer, empty = ({"from": "human", "value": "what?"}, *({"from": "gpt", "value": v} for v in ("a dog", " ")))
    rows = [{"image": "a.png", "conversations": turns} for turns in ([user, answer], [user, empty, user, answer])]
    rows.append({"image": "a.png", "conversations": [user, answer, user, empty, user, empty]})
    rows.append({"image": "a.png", "conversations": [user, empty]})  # without any answer, it is skipped as a whole
    source = read(root, *rows)
    (note,) = source.notes
    assert "3 assistant turns without text (the first: line 2); an empty turn is left out" in note
    assert [line.partition(": ")[2] for line in source.skipped] == ["no answer in the conversation"]
