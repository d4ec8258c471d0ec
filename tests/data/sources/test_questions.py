"""Questions about images of one's own, from tables."""

import pytest
from captioned import NO_HOLD_OUT, refusal
from easy import draw_easy_vqa

from vlm.data.records import Question
from vlm.data.sources.questions import EasyVQA, QuestionTable
from vlm.errors import UserError


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


def test_a_question_without_an_answer_is_named_and_left_out(root):
    source = questions(root, "image,question,answer\na.png,what?,red\na.png,who?,\n")
    assert source.split("train").record(0)["questions"] == [Question("what?", "red")]
    assert source.skipped == [f"{root / 'questions.csv'}, line 3: no question and answer"]
    with pytest.raises(UserError, match=r"no image with a question and answer .*line 2: no question and answer"):
        questions(root, "image,question,answer\na.png,what?,\n")


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
