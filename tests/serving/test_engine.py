"""The engine behind `vlm serve`: inputs join what runs, each gets its own answer, and a fault stays with its input."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from tiny_checkpoints import FILES, IMAGES, ROOT
from used import used

from vlm.cli.main import run
from vlm.data.images.image import load_image
from vlm.errors import UserError
from vlm.inference.options import DecodingOptions, ModelOptions
from vlm.inference.predictor import load_predictor
from vlm.nn.step.replay import StepperPool
from vlm.serving.engine import Engine, Full
from vlm.serving.serve import make_engine


def engine(task: str, *, rows: int = 4, most: int = 1000, **options) -> Engine:
    path = ROOT / "data" / "sample" / "captioner.ckpt" if task == "captioning" else FILES / f"{task}.ckpt"
    model = ModelOptions(checkpoint=str(path), device="cpu", precision="fp32")
    return make_engine(model.load(load_predictor), DecodingOptions(**options), rows=rows, most=most)


@pytest.fixture(scope="module")
def captions() -> Engine:
    return engine("captioning")


@pytest.mark.parametrize("options", [{}, {"beam": 3, "results": 2}], ids=["greedy", "beams"])
def test_each_of_many_clients_gets_its_own_caption(captions, options):
    """Clients come at different times, so that most of their images join a batch that runs."""
    ours = engine("captioning", **options) if options else captions
    images = [load_image(path) for path in IMAGES]
    truth = used(ours.predictor, images, **options)
    pixels = [ours.predictor.pixels(image) for image in images]

    def client(number: int) -> list:
        time.sleep(number % 5 / 100)
        order = [(number + step) % len(images) for step in range(1 + number % 3)]
        jobs = ours.submit([pixels[place] for place in order])
        return [(place, job.answer.result(60)) for place, job in zip(order, jobs, strict=True)]

    with ThreadPoolExecutor(8) as pool:
        answers = [one for got in pool.map(client, range(24)) for one in got]
    assert len(answers) == sum(1 + number % 3 for number in range(24))
    for place, answer in answers:
        pairs = zip(answer, truth[place], strict=True) if options else [(answer, truth[place])]
        for one, other in pairs:
            assert one.text == other.text and one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert ours.waiting == 0


def test_those_that_wait_run_together(captions, monkeypatch):
    """One runs while 20 come: they begin as a batch of all rows, and do not take its one row in turn."""
    pixels = captions.predictor.pixels(load_image(IMAGES[0]))
    real, sizes, begun, go = captions.predictor.encode, [], Event(), Event()

    def encode(batch):
        sizes.append(len(batch))
        begun.set()
        go.wait(10)
        return real(batch)

    monkeypatch.setattr(captions.predictor, "encode", encode)
    first = captions.submit([pixels])
    assert begun.wait(10)
    others = captions.submit([pixels] * 20)
    go.set()
    texts = {job.answer.result(60).text for job in first + others}
    assert len(texts) == 1 and sizes[:2] == [1, 4] and sum(sizes) == 21


def test_inputs_join_a_batch_that_runs(captions, monkeypatch):
    """More wait than there are rows, and one batch takes them all as its rows fall free, a few at a time."""
    ours = engine("captioning", rows=24)
    begun, real = [], StepperPool.begin
    monkeypatch.setattr(StepperPool, "begin", lambda *args, **sizes: begun.append(1) or real(*args, **sizes))
    pixels = [captions.predictor.pixels(load_image(path)) for path in IMAGES]
    jobs = ours.submit([pixels[number**2 % 7 % len(pixels)] for number in range(120)])
    assert len({job.answer.result(60).text for job in jobs}) > 1
    assert len(begun) == 1


def test_a_full_queue_takes_all_or_none(captions, monkeypatch):
    monkeypatch.setattr(captions, "most", 2)
    pixels = captions.predictor.pixels(load_image(IMAGES[0]))
    with pytest.raises(Full):
        captions.submit([pixels] * 3)
    assert captions.waiting == 0 and captions.submit([pixels])[0].answer.result(60).text


def test_the_engine_outlives_a_fault(captions):
    broken = captions.submit([load_image(IMAGES[0])])[0]  # not as the model takes it
    with pytest.raises(TypeError):
        broken.answer.result(60)
    assert captions.submit([captions.predictor.pixels(load_image(IMAGES[0]))])[0].answer.result(60).text


def test_a_fault_before_any_input_is_taken_fails_all_that_wait(captions, monkeypatch):
    def broken(*args, **options):
        raise MemoryError
        yield

    with monkeypatch.context() as patch:
        patch.setattr(captions.predictor, "decoded", broken)
        jobs = captions.submit([captions.predictor.pixels(load_image(IMAGES[0]))] * 9)
        for job in jobs:
            with pytest.raises(MemoryError):
                job.answer.result(10)
    assert captions.submit([captions.predictor.pixels(load_image(IMAGES[0]))])[0].answer.result(60).text


@pytest.mark.parametrize("options", [["--min-tokens", "40"], ["--require", "red " * 40]])
def test_more_tokens_than_a_text_has_room_for_are_refused_at_the_start(options, capsys):
    assert run(["serve", "-c", str(ROOT / "data" / "sample" / "captioner.ckpt"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {options[0]}: ")


@pytest.mark.parametrize(
    "task", ["classification", *(pytest.param(task, marks=pytest.mark.slow) for task in ("translation", "tagging"))]
)
def test_other_tasks_answer_as_from_python(task):
    ours = engine(task)
    inputs = [load_image(path) for path in IMAGES] if task == "classification" else ["a red circle", "a blue cross"]
    answers = [job.answer.result(60) for job in ours.submit(inputs)]
    for one, other in zip(answers, used(ours.predictor, inputs), strict=True):
        assert getattr(one, "name", None) == getattr(other, "name", None)
        assert getattr(one, "text", None) == getattr(other, "text", None) and type(one) is type(other)


def test_an_input_at_fault_keeps_no_other_from_its_answer():
    ours = engine("masked_language_modeling")
    good, bad, other = ours.submit(["a [MASK] circle", "no gap", "a red [MASK]"])
    assert good.answer.result(60) == used(ours.predictor, ["a [MASK] circle"])[0] and other.answer.result(60)
    with pytest.raises(UserError):
        bad.answer.result(60)


@pytest.mark.parametrize(
    ("task", "need"), [("image_questions", "question"), ("contrastive", "label"), ("photo_translation", "image")]
)
def test_what_is_not_served_is_refused(task, need):
    with pytest.raises(UserError, match=rf"takes more than its input \({need}\)"):
        engine(task)
    with pytest.raises(UserError, match="leave others out"):
        engine("classification", beam=2)


def test_without_the_extra_a_line_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run(["serve", "-c", str(FILES / "captioning.ckpt")]) == 2
    assert capsys.readouterr().err == 'error: vlm serve: needs uvicorn; pip install "vlm-lightning[serve]"\n'
