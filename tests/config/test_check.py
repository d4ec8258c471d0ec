"""Checking and building, with the classes of the package `strangers` (conftest.py)."""

import pytest

from vlm.config.build import check
from vlm.config.target import find
from vlm.errors import UserError

pytestmark = pytest.mark.usefixtures("strangers")


def node(name, **rest):
    return {"_target_": f"strangers.parts.{name}", **rest}


def faults(config, **options):
    try:
        check(config, **options)
    except UserError as error:
        assert error.status == 2
        return str(error).splitlines()
    return []


def model(**rest):
    return {"model": node("Model", **{"vocab_size": 5, **rest})}


@pytest.mark.parametrize(
    "rest",
    [
        {"encoder": node("Base", dim=1)},
        {"encoder": node("ViT", dim=1, dropout=1)},
        {"encoder": node("make_base", dim=1)},
        {"encoder": None},
        {"like": node("ViT", dim=1)},
        {"size": 3},
        {"size": [3, 4]},
        {"window": [3, 4]},
        {"sizes": [1, 2, 3]},
        {"mode": "min"},
        {"ghost": "whatever it is"},
        {"root": "/x"},
        {"where": "/x"},
        {"names": ["a", "b"]},
        {"names": []},
        {"weights": {"a": 1, "b": 0.5}},
        {"parts": [node("ViT", dim=1), node("Base", dim=2)]},
        {"make": node("Other")},
        {"make": node("ViT", _partial_=True)},
        {"flag": True},
        {"limit": 1},
        {"limit": None},
        {"limit": float("inf")},
        {"late": None},
        {"anything": {"x": [1, "y"]}},
        {"anything": node("Loose", dim=1, what="ever")},
    ],
)
def test_what_fits_passes(rest):
    assert faults(model(**rest)) == []


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ({"dpeth": 1}, "model.dpeth: unknown"),
        ({"modes": "max"}, "model.modes: unknown; did you mean mode?"),
        ({"vocab_size": "5"}, "model.vocab_size: '5' is str, expected int"),
        ({"vocab_size": True}, "model.vocab_size: True is bool, expected int"),
        ({"vocab_size": 5.0}, "model.vocab_size: 5.0 is float, expected int"),
        ({"vocab_size": None}, "model.vocab_size: None, expected int"),
        ({"limit": "1e-3"}, "model.limit: '1e-3' is str, expected float | None"),
        ({"limit": True}, "model.limit: True is bool, expected float | None"),
        ({"flag": 1}, "model.flag: 1 is int, expected bool"),
        ({"names": "abc"}, "model.names: 'abc' is str, expected list[str]"),
        ({"names": ["a", 1]}, "model.names: ['a', 1] is list, expected list[str]"),
        ({"window": [1]}, "model.window: [1] is list, expected tuple[int, int]"),
        ({"window": [1, "2"]}, "model.window: [1, '2'] is list, expected tuple[int, int]"),
        ({"sizes": [1, None]}, "model.sizes: [1, None] is list, expected tuple[int, ...]"),
        ({"weights": {"a": "b"}}, "model.weights: {'a': 'b'} is dict, expected Mapping[str, float]"),
        ({"mode": "mxa"}, "model.mode: 'mxa' is unknown; choose from max, min; did you mean max?"),
        ({"mode": 1}, "model.mode: 1 is int, expected 'max' | 'min'"),
        ({"root": 3}, "model.root: 3 is int, expected Path | None"),
        ({"encoder": "vit"}, "model.encoder: 'vit' is str, expected Base | None"),
        ({"encoder": {"dim": 1}}, "model.encoder: {'dim': 1} is dict, expected Base | None"),
        ({"encoder": node("Other")}, "model.encoder: Other does not fit here, expected Base | None"),
        ({"encoder": node("ViT", _partial_=True)}, "model.encoder: partial does not fit here, expected Base | None"),
        ({"make": node("ViT", dim=1)}, "model.make: ViT does not fit here, expected Callable | None"),
        ({"make": "print"}, "model.make: 'print' is str, expected Callable | None"),
        ({"encoder": node("ViT")}, "model.encoder.dim: missing; ViT needs it"),
        ({"encoder": node("ViT", dim=1, dpeth=2)}, "model.encoder.dpeth: unknown; did you mean depth?"),
        ({"parts": [node("ViT", dim=1), node("ViT", dmi=1, dim=2)]}, "model.parts.1.dmi: unknown; did you mean dim?"),
        (
            {"parts": [node("Other")]},
            "model.parts: [Other] is list, expected Iterable[Base]",
        ),
        ({"_args_": [1]}, "model._args_: unknown"),
        ({"_partial_": "yes"}, "model._partial_: 'yes' is str, expected bool"),
    ],
)
def test_what_does_not_fit_is_named(rest, said):
    assert faults(model(**rest)) == [said]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("os.system", "os.system may not be built; only vlm.*, lightning.*, torch.optim.*, strangers.* may"),
        ("torch.load", "torch.load may not be built; only vlm.*, lightning.*, torch.optim.*, strangers.* may"),
        ("strangers.parts.os.system", "strangers.parts.os.system may not be built; a target is a class of"),
        ("strangers.parts.Path", "strangers.parts.Path may not be built; a target is a class of"),
        ("strangers.parts", "strangers.parts may not be built; a target is a class of"),
        ("strangers.parts.Size", "strangers.parts.Size may not be built; a target is a class of"),
        ("lightning.seed_everything", "lightning.seed_everything may not be built; a target is a class of"),
        ("strangers.parts.__builtins__", "is not a public dotted name"),
        ("strangers..parts", "is not a public dotted name"),
        ("strangers.parts.Vit", "there is no strangers.parts.Vit; did you mean strangers.parts.ViT?"),
        ("strangers.prats.ViT", "there is no strangers.prats.ViT; did you mean strangers.parts.ViT?"),
        ("torch.optim.Adamw", "there is no torch.optim.Adamw; did you mean torch.optim.AdamW?"),
        ("lightning.pytorch.callbacks.EarlyStoping", "did you mean lightning.pytorch.callbacks.EarlyStopping?"),
        (3, "3 may not be built"),
    ],
)
def test_a_target_is_a_known_class(name, said):
    (line,) = faults({"a": {"b": [{"_target_": name}]}})
    assert line.startswith("a.b.0._target_: ")
    assert said in line


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("vlm.models.projector.MLPProjector", "vlm.models.encoder_decoder.MLPProjector"),
        ("vlm.training.step.fsdp.Sharded", "vlm.training.step.fsdp.ShardedStrategy"),
    ],
)
def test_a_class_that_was_moved_or_renamed_is_found_by_its_old_name(old, new, capsys):
    """A user's own YAML file may name the class as an earlier release did."""
    assert find(old) is find(old) is find(new)
    assert capsys.readouterr().err == f"note: {old} has moved to {new}; the old name works in this release only\n"
    with pytest.raises(UserError, match=r"there is no vlm\.models\.projector\.MLPProjektor"):
        find("vlm.models.projector.MLPProjektor")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("strangers.explosive.Quiet", "cannot be imported: ZeroDivisionError: division by zero"),
        ("strangers.needy.Quiet", "needs the package not_installed_anywhere; install it"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(name, said):
    assert faults({"x": {"_target_": name, "b": 1}}) == [f"x._target_: {name} {said}"]


def test_only_what_may_be_built_is_imported(python, tmp_path):
    (tmp_path / "canary.py").write_text("print('imported')\nclass Quiet: ...\n")
    done = python(
        """
        from vlm.config.build import check
        try:
            check({"a": {"_target_": "canary.Quiet"}, "b": {"_target_": "vlm.cli.main.main"}})
        except Exception as fault:
            print(str(fault).count("may not be built"), "vlm.cli.main" in sys.modules)
        """,
        also=tmp_path,
    )
    assert done.stdout == "2 False\n", done.stderr


def test_every_fault_is_reported_at_once():
    config = {
        "a": node("ViT", dmi=1),
        "b": {"c": node("Model", mode="x", flag=2)},
        "seed": "s",
        "free": {"any": "thing"},
    }
    lines = faults(config, types={"seed": int, "name": str | None})
    keys = "a.dmi a.dim b.c.mode b.c.flag b.c.vocab_size seed"
    assert " ".join(line.split(":")[0] for line in lines) == keys


LIMITED, STACK = node("Limited"), node("Stack", dim=1, heads=2)  # whose heads, rate, window and kind are in a TypedDict


@pytest.mark.parametrize(
    ("base", "rest", "said"),
    [
        (LIMITED, {"share": 0.5, "count": 1, "rates": [0, 0.5], "epochs": -1}, None),
        (LIMITED, {"count": None}, None),
        (LIMITED, {"share": 1.5}, "share: 1.5 is out of range, expected float (at least 0 and at most 1)"),
        (LIMITED, {"share": float("nan")}, "share: nan is not finite, expected float (at least 0 and at most 1)"),
        (LIMITED, {"share": "half"}, "share: 'half' is str, expected float"),
        (LIMITED, {"count": 0}, "count: 0 is out of range, expected int (at least 1) | None"),
        (
            LIMITED,
            {"rates": [0, 1]},
            "rates: [0, 1] is out of range, expected tuple[float (at least 0 and below 1), ...]",
        ),
        (LIMITED, {"epochs": 0}, "epochs: 0 is out of range, expected int (at least 1, or -1)"),
        (STACK, {"rate": 0.5, "window": [1, 2], "kind": "min"}, None),
        (STACK, {"window": None}, None),
        (STACK, {"rtae": 0.5}, "rtae: unknown; did you mean rate?"),
        (STACK, {"block": {}}, "block: unknown"),
        (STACK, {"rate": 1}, "rate: 1 is out of range, expected float (at least 0 and below 1)"),
        (STACK, {"rate": None}, "rate: None, expected float"),
        (STACK, {"kind": "mni"}, "kind: 'mni' is unknown; choose from max, min; did you mean min?"),
    ],
)
def test_limits_of_arguments_and_of_options_that_are_passed_on(base, rest, said):
    assert faults({"x": base | rest}) == ([] if said is None else [f"x.{said}"])


def test_options_that_are_passed_on_may_be_required():
    assert faults({"x": node("Stack", dim=1)}) == ["x.heads: missing; Stack needs it"]
    assert faults({"x": node("Stack", dim=1, heads=0)})[0].startswith("x.heads: 0 is out of range")


def test_what_the_program_supplies_is_not_missing_and_may_not_be_given():
    assert faults({"x": node("Limited")}) == []
    assert faults({"x": node("Limited", vocab_size=5)}) == ["x.vocab_size: is set by the program; remove it"]


def test_a_node_may_leave_out_what_the_program_supplies_to_it_by_name():
    config = {"model": node("Model", encoder=node("ViT")), "task": node("ViT")}
    lines = ["model.encoder.dim: missing; ViT needs it", "task.dim: missing; ViT needs it"]
    assert faults(config, injected={"model": ["vocab_size", "dim"]}) == lines


def test_what_the_program_supplies_to_a_part_is_no_argument_of_the_whole_either():
    config = {"x": node("Model", vocab_size=5, anything=node("Limited"), share=1)}
    assert faults(config) == ["x.share: unknown; did you mean where?"]
    config = {"x": node("ViT", dim=1, vocab_size=5, anything=node("Limited"))}
    assert "x.vocab_size: is set by the program; remove it" in faults(config)


def test_every_node_is_looked_at_once(monkeypatch):
    from vlm.config import build as checks

    looked = []
    look = checks._node_faults

    def counted(known, node, raw, injected, look_up):
        looked.append(raw["_target_"].rpartition(".")[2])
        return look(known, node, raw, injected, look_up)

    monkeypatch.setattr(checks, "_node_faults", counted)
    assert faults({"a": node("Model", vocab_size=1, parts=[node("ViT", dim=1)], encoder=node("ViT", dim=1))}) == []
    assert sorted(looked) == ["Model", "ViT", "ViT"]
