"""The engine behind `vlm serve`: inputs join what runs, each gets its own answer, and a fault stays with its input."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from threading import Event
from typing import Any

import pytest
from predictions import predict_inputs
from services import CAPTIONER, predictor_of, tiny
from tiny_checkpoints import IMAGES, STORY

from vlm.cli.main import run
from vlm.data.images.image import load_image
from vlm.inference.options import build_options
from vlm.nn.step.replay import StepperPool
from vlm.serving.engine import Engine, Job, QueueFullError


class Ours(Engine):
    """An engine of a task, and options for all its jobs."""

    def __init__(self, task: str, *, rows: int = 4, most: int = 1000, **values: Any) -> None:
        super().__init__(predictor_of(CAPTIONER if task == "captioning" else tiny(task)), rows=rows, max_queued=most)
        self.options = build_options(self.predictor.options, {**values, "batch_size": rows}, use="this")

    def send(self, inputs: list[Any], **values: Any) -> list[Job]:
        """Jobs of inputs that are prepared here."""
        options = replace(self.options, **values)
        return self.submit([self.predictor.prepare(one, options) for one in inputs], options)


@pytest.fixture(scope="module")
def captions() -> Ours:
    return Ours("captioning")


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize("options", [{}, {"beam": 3, "results": 2}], ids=["greedy", "beams"])
def test_each_of_many_clients_gets_its_own_caption(captions, options):
    """Clients come at different times, so that most of their images join a batch that runs."""
    ours = Ours("captioning", **options) if options else captions
    images = [load_image(path) for path in IMAGES]
    truth = predict_inputs(ours.predictor, images, **options)
    pixels = [ours.predictor.pixels(image) for image in images]

    def client(number: int) -> list:
        time.sleep(number % 5 / 100)
        order = [(number + step) % len(images) for step in range(1 + number % 3)]
        jobs = ours.submit([pixels[place] for place in order], ours.options)
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
    first = captions.submit([pixels], captions.options)
    assert begun.wait(10)
    others = captions.submit([pixels] * 20, captions.options)
    go.set()
    texts = {job.answer.result(60).text for job in first + others}
    assert len(texts) == 1 and sizes[:2] == [1, 4] and sum(sizes) == 21


def test_clients_that_were_answered_together_run_together_again(monkeypatch):
    """Each of three sends its next text some time after its answer; one batch holds them again."""
    monkeypatch.setattr("vlm.serving.engine.NEXT_REQUESTS", 30)
    ours, sizes = Ours("language_modeling", max_tokens=3), []
    real = ours.predictor.results

    def results(batches, settings, *, watch):
        def observe_sizes():
            for batch in batches:
                sizes.append(len(batch or ()))
                yield batch

        return real(observe_sizes(), settings, watch=watch)

    def send_next(number: int) -> str:
        jobs[number].answer.result(60)
        time.sleep(0.02 * number)
        return ours.send([f"next {number}"])[0].answer.result(60).text

    monkeypatch.setattr(ours.predictor, "results", results)
    jobs = ours.send(["one", "two", "three"])
    with ThreadPoolExecutor(3) as clients:
        assert all(clients.map(send_next, range(3)))
    assert [size for size in sizes if size] == [3, 3]


@pytest.mark.slow
def test_inputs_join_a_batch_that_runs(captions, monkeypatch):
    """More wait than there are rows, and one batch takes them all as its rows fall free, a few at a time."""
    ours = Ours("captioning", rows=24)
    begun, real = [], StepperPool.begin
    monkeypatch.setattr(StepperPool, "begin", lambda *args, **sizes: begun.append(1) or real(*args, **sizes))
    pixels = [captions.predictor.pixels(load_image(path)) for path in IMAGES]
    jobs = ours.submit([pixels[number**2 % 7 % len(pixels)] for number in range(120)], ours.options)
    assert len({job.answer.result(60).text for job in jobs}) > 1
    assert len(begun) == 1


def test_a_full_queue_takes_all_or_none(captions, monkeypatch):
    monkeypatch.setattr(captions, "max_queued", 2)
    pixels = captions.predictor.pixels(load_image(IMAGES[0]))
    with pytest.raises(QueueFullError):
        captions.submit([pixels] * 3, captions.options)
    assert captions.waiting == 0 and captions.submit([pixels], captions.options)[0].answer.result(60).text


def test_the_engine_outlives_a_fault(captions):
    broken = captions.submit([load_image(IMAGES[0])], captions.options)[0]  # not as the model takes it
    with pytest.raises(TypeError):
        broken.answer.result(60)
    assert captions.send([load_image(IMAGES[0])])[0].answer.result(60).text


def test_a_fault_before_any_input_is_taken_fails_all_that_wait(captions, monkeypatch):
    def broken(*args, **options):
        raise MemoryError
        yield

    with monkeypatch.context() as patch:
        patch.setattr(captions.predictor, "decode_batches", broken)
        jobs = captions.send([load_image(IMAGES[0])] * 9)
        for job in jobs:
            with pytest.raises(MemoryError):
                job.answer.result(10)
    assert captions.send([load_image(IMAGES[0])])[0].answer.result(60).text


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        (CAPTIONER, ["--min-tokens", "40"], ""),
        (CAPTIONER, ["--require", "red " * 40], ""),
        (tiny("classification"), ["--beam", "2"], "not supported by a model for classification"),
        (tiny("classification"), ["--language", "de"], "not supported by a model for classification"),
    ],
)
def test_options_that_do_not_go_with_the_model_are_refused_at_the_start(path, options, said, capsys):
    pytest.importorskip("uvicorn")  # of the extra `serve`
    assert run(["serve", "-c", path, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {options[0]}: {said}")


def test_jobs_with_equal_settings_run_together_and_others_have_their_turn(captions, monkeypatch):
    """Requests with other settings wait until those that run are done, and then are not overtaken for ever."""
    ours, done = Ours("captioning", rows=2), []
    real = ours.predictor.results

    def results(batches, settings, *, watch):
        def note_batches():
            for batch in batches:
                done.extend([settings.prefix] * len(batch or ()))
                yield batch

        return real(note_batches(), settings, watch=watch)

    monkeypatch.setattr(ours.predictor, "results", results)
    image = load_image(IMAGES[0])
    jobs = [job for number in range(12) for job in ours.send([image], prefix=("a", "the")[number % 3 == 0])]
    texts = [job.answer.result(60).text for job in jobs]
    assert all(text.startswith(("a", "the")[number % 3 == 0]) for number, text in enumerate(texts))
    assert done.count("the") == 4 and done.count("a") == 8
    changes = sum(one != other for one, other in pairwise(done))
    assert 1 <= changes <= 7  # one by one, in turn, there would be as many as requests change


def test_what_stands_beside_an_input_keeps_no_request_apart(monkeypatch):
    """Questions differ from request to request, and share a batch."""
    ours, sizes, go = Ours("span_answering", question="what?"), [], Event()
    real = ours.predictor.predict

    def predict(batch, options):
        go.wait(10)
        sizes.append(len(batch))
        return real(batch, options)

    monkeypatch.setattr(ours.predictor, "predict", predict)
    texts = [(STORY, [question]) for question in ("what is left of the cross?", "what is red?", "who?", "where?")]
    jobs = [job for one in texts for job in ours.send([one], question=one[1])]
    go.set()
    answers = [job.answer.result(60) for job in jobs]
    for (text, question), answer in zip(texts, answers, strict=True):
        assert answer == predict_inputs(ours.predictor, [text], question=question)[0]
    assert max(sizes) > 1


def test_a_batch_that_nobody_waits_for_any_more_ends(monkeypatch):
    """The answers of a model that writes nothing come one by one, and the rest is not computed."""
    ours, begun, go, answered = Ours("span_answering", question="what?"), Event(), Event(), []
    real = ours.predictor.answer_question

    def answer_question(*args, **options):
        begun.set()
        go.wait(10)
        answered.append(1)
        return real(*args, **options)

    jobs = ours.send([("a red circle", ["what?"])])  # so that the others make a batch of their own
    jobs[0].answer.result(60)
    monkeypatch.setattr(ours.predictor, "answer_question", answer_question)
    jobs = ours.send([("a red circle", ["what?"])] * 4)
    assert begun.wait(10)
    ours.cancel(jobs)
    go.set()
    assert ours.send([("a blue cross", ["what?"])])[0].answer.result(60) and len(answered) <= 3


def test_texts_that_are_shown_stay_as_they_are(captions):
    """A model may show the list that it goes on to fill."""
    shown, tokens = [], [1]
    job = Job(captions.predictor, None, captions.options, on_tokens=shown.append)
    assert job.report_tokens([tokens])
    tokens.append(2)
    assert job.report_tokens([tokens]) and shown == [[[1]], [[1, 2]]] and len(job.times[0]) == 2


@pytest.mark.parametrize(("command", "package"), [("serve", "h11"), ("serve", "uvicorn"), ("demo", "gradio")])
def test_without_the_extra_a_line_names_it(command, package, monkeypatch, capsys):
    modules = {name: part for name, part in sys.modules.items() if name.startswith((f"{package}.", "vlm.serving."))}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)  # an import sets it; undone at the end
    for name in modules:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert run([command, "-c", tiny("captioning")]) == 2
    line = f'error: vlm {command}: needs {package}; pip install "vlm-lightning[{command}]"\n'
    assert capsys.readouterr().err == line
