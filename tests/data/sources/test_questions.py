"""Questions about images of one's own, from tables."""

import pytest
from easy import draw_easy_vqa

from vlm.data.records import Question
from vlm.data.sources.easy_vqa import EasyVQA
from vlm.data.sources.questions import QuestionTable
from vlm.errors import UserError


def questions(root, text, name="questions.csv", **options):
    (root / name).write_text(text)
    fractions = {"val_fraction": 0.0, "test_fraction": 0.0}
    return QuestionTable(root=str(root), path=name, **fractions | options)


def test_all_questions_about_an_image_are_one_record(root):
    text = "image,question,answer,kind\na.png,what is it?,a cat,object\nb.png,how many?,two,count\n"
    text += "a.png,how many?,one,count\n"
    split = questions(root, text, kind_column="kind").split("train")
    assert [record.id for record in split.records()] == ["a.png", "b.png"]
    assert split.record(0)["questions"] == [
        Question("what is it?", "a cat", "object"),
        Question("how many?", "one", "count"),
    ]
    assert split.record(0).texts == ["what is it? a cat", "how many? one"]
    assert split.record(0).image().getpixel((0, 0)) == (255, 0, 0)


def test_splits_and_the_most_questions_of_an_epoch(root):
    rows = "".join(f"a.png,q{n}?,x,train\n" for n in range(9))
    source = questions(root, f"image,question,answer,split\n{rows}b.png,q?,y,val\n", questions_per_image=2)
    train, val = source.split("train"), source.split("val")
    assert len(train.record(0)["questions"]) == 2 and len(val.record(0)["questions"]) == 1
    assert train.record(0, 0)["questions"] != train.record(0, 3)["questions"]


def test_a_question_without_an_answer_is_named_and_left_out(root):
    source = questions(root, "image,question,answer\na.png,what?,red\na.png,who?,\n")
    assert source.split("train").record(0)["questions"] == [Question("what?", "red")]
    assert source.skipped == [f"{root / 'questions.csv'}, line 3: no question and answer"]
    with pytest.raises(UserError, match=r"no image with a question and answer .*line 2: no question and answer"):
        questions(root, "image,question,answer\na.png,what?,\n")


def test_faults_name_file_and_column(root):
    with pytest.raises(UserError, match=r"questions\.csv: no column 'answer' .*answer_column"):
        questions(root, "image,question,reply\na.png,what?,red\n")
    with pytest.raises(UserError, match=r"questions\.jsonl, line 1: image, question and answer must be text"):
        questions(root, '{"image": "a.png", "question": "what?", "answer": 3}\n', "questions.jsonl")
    with pytest.raises(UserError, match="two splits"):
        questions(root, "image,question,answer,split\na.png,q?,x,train\na.png,r?,y,test\n")


def test_a_question_about_several_images_has_them_in_order(root):
    text = "image,question,answer\na.png | b.png,what differs?,the colour\nb.png|a.png,what differs?,nothing\n"
    text += "./a.png|b.png,which is red?,the first\n"
    source = questions(root, text, image_separator="|")
    records = list(source.split("train").records())
    assert [record.id for record in records] == ["a.png b.png", "b.png a.png"]
    assert [question.answer for question in records[0]["questions"]] == ["the colour", "the first"]
    a, b = (image.tobytes() for image in records[0].images())
    assert [image.tobytes() for image in records[1].images()] == [b, a]
    assert records[0].read_stamp() != records[1].read_stamp()
    assert source.uncaptioned() == [str(root / "c.png")]
    with pytest.raises(UserError, match=r"images are missing, such as .*no\.png"):
        questions(root, "image,question,answer\na.png|no.png,what?,x\n", image_separator="|")


def test_easy_vqa_has_kinds_and_names_what_is_wrong(tmp_path):
    source = EasyVQA(root=str(draw_easy_vqa(tmp_path, images=2)))
    _, record = source.split("test").records()
    asked = [Question("is it red?", "no", "yes_no"), Question("what shape is it?", "circle", "shape")]
    assert record["questions"] == [*asked, Question("what color is it?", "blue", "color")]
    assert record.image().getpixel((0, 0)) == (0, 0, 255) and source.splits == ("train", "test")
    (tmp_path / "test" / "questions.json").write_text('[["is it red?", "yes", "0"]]')
    with pytest.raises(UserError, match=r"test/questions\.json, entry 1: is not \[question, answer, number"):
        EasyVQA(root=str(tmp_path))
    (tmp_path / "test" / "questions.json").unlink()
    with pytest.raises(UserError, match=r"test/questions\.json: no such file; set data\.root"):
        EasyVQA(root=str(tmp_path))
