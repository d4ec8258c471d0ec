"""Options of decoding: the user's, then the checkpoint's own, then plain ones."""

import pytest
from tiny_checkpoints import FILES

from vlm.cli.main import run
from vlm.decoding.constraints import Rules
from vlm.errors import UserError
from vlm.inference.options import DecodingOptions, check_stored_decoding
from vlm.inference.writing import note_width

STORED = {"beam": 4, "length_penalty": 2.0, "max_tokens": 9, "early_stopping": True, "end_counts": True}


def search(stored, **chosen):
    options = DecodingOptions(**chosen).resolve(stored)
    return options.build_decoding(Rules(), sample=bool(options.sample))


def test_plain_where_nothing_is_said():
    found = search({})
    assert (found.beam, found.length_penalty, found.sampling, found.early_stopping) == (1, 1.0, None, "never")


def test_the_checkpoint_fills_in_what_the_user_leaves_open():
    found = search(STORED, length_penalty=0.5)
    assert (found.beam, found.length_penalty, found.max_tokens, found.early_stopping) == (4, 0.5, 9, True)
    assert search(STORED, beam=1).beam == 1


def test_drawing_and_searching_exclude_each_other():
    drawn = search(STORED, sample=True, temperature=0.7, results=2)
    assert drawn.beam == 1 and drawn.sampling.temperature == 0.7
    sampling = {"sample": True, "top_k": 50}
    assert search(sampling).sampling.top_k == 50
    assert search(sampling, beam=3).sampling is None
    assert search(sampling, sample=False).sampling is None
    assert search(STORED, sample=False).beam == 1 and search(STORED, sample=False, beam=3).beam == 3


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        ({"top_p": 0.5}, "--top-p: applies only to sampling; add --sample"),
        ({"temperature": 0.5, "sample": False}, "--temperature: applies only to sampling"),
        ({"min_p": 0.5, "beam": 3}, "--min-p: applies only to sampling"),
        ({"length_penalty": 2.0}, "--length-penalty: applies only to beam search; add --beam N"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(chosen, line):
    with pytest.raises(UserError, match=line):
        search({}, **chosen)
    assert DecodingOptions(top_p=0.5).resolve({}, samples_by_default=True).build_sampling().top_p == 0.5


@pytest.mark.parametrize("stored", [{"beams": 4}, {"beam": "4"}, {"early_stopping": "soon"}, {"ban": ["x"]}])
def test_options_that_are_none_are_refused(stored):
    assert check_stored_decoding(STORED) == STORED
    with pytest.raises(ValueError, match="unsupported decoding option"):
        check_stored_decoding(stored)


@pytest.mark.parametrize(
    ("option", "value", "most"),
    [("--beam", "10000", 1024), ("--results", "10000", 1024), ("--max-tokens", "9" * 9, 2**20)],
)
@pytest.mark.parametrize("command", [["caption", "image.png"], ["generate", "--prompt", "A"], ["translate"]])
def test_more_than_a_search_can_hold_is_refused_at_once(command, option, value, most, capsys):
    assert run([*command, "-c", str(FILES / "captioning.ckpt"), option, value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: Invalid value for '{option}': ") and str(most) in line


@pytest.mark.parametrize(
    ("chosen", "noted"), [({"beam": 127}, 0), ({"beam": 128}, 1), ({"sample": True, "results": 128}, 1)]
)
def test_a_search_that_takes_long_is_noted(chosen, noted):
    lines = list(note_width(search({}, **chosen).columns))
    assert [line.startswith("note: 128 texts per input") for line in lines] == [True] * noted


@pytest.mark.parametrize("penalty", [101.0, -101.0, 1e300, float("nan")])
def test_a_length_penalty_that_no_power_of_a_length_can_take_is_refused(penalty):
    with pytest.raises(UserError, match=r"--length-penalty .* is invalid; it must be between -100 and 100"):
        search({}, beam=2, length_penalty=penalty)
