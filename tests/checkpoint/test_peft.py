"""Adapters of the peft library: exported and read; logits equal those that peft computed (`benchmarks/references`)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from translators import saved_t5

from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run as command
from vlm.errors import UserError
from vlm.models.pretrained.place import join_adapters, split_adapters

FILES = Path(__file__).parent / "files" / "peft"
LOGITS = json.loads((FILES / "logits.json").read_text())
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves a random model when a test first needs it."""
    folder = tmp_path_factory.mktemp("bases")

    def save(name: str) -> Path:
        if not (folder / name).exists():
            peft_models.save_base(name, folder / name)
        return folder / name

    return save


def true_logits(name: str, kind: str) -> torch.Tensor:
    return torch.tensor(LOGITS[name][kind])


def add_to_modules(model: torch.nn.Module, folder: Path) -> None:
    """Adds exported adapters to the modules that they name, and replaces those of modules_to_save."""
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    ends = config["target_modules"]
    adapted = set()
    for name, a in tensors.items():
        if "lora_" not in name:
            path = name.removeprefix("base_model.model.")
            assert path.rpartition(".")[0] in config["modules_to_save"]
            model.get_parameter(path).data = a
        if not name.endswith(".lora_A.weight"):
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        update = tensors[name.replace("lora_A", "lora_B")] @ a * (config["lora_alpha"] / config["r"])
        module = model.get_submodule(path)
        module.weight.data += update.t() if config["fan_in_fan_out"] else update
        adapted.add(path)
    selected = {
        path for path, module in model.named_modules() if any(path == end or path.endswith(f".{end}") for end in ends)
    }
    assert selected == adapted


@pytest.mark.sample(plain=2, slow=4)
@torch.no_grad()
@pytest.mark.parametrize("name", peft_models.NAMES)
@pytest.mark.parametrize("kind", ["out", "saved"])
def test_exported_adapters_compute_what_ours_do(bases: Any, tmp_path: Path, name: str, kind: str) -> None:
    base = bases(name)
    peft_models.save_adapters(base, tmp_path / "own.ckpt", peft_models.SAVED[name] if kind == "saved" else ())
    assert command(["export", str(tmp_path / "out"), "-c", str(tmp_path / "own.ckpt"), "--to", "peft"]) == 0
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(base.resolve()) and config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    theirs = peft_models.load_theirs(base)
    ours = peft_models.our_logits(load_model(read(tmp_path / "own.ckpt")), theirs)
    add_to_modules(theirs, tmp_path / "out")
    logits = peft_models.last_logits(theirs)
    torch.testing.assert_close(logits, ours, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[::16], true_logits(name, kind), rtol=0, atol=1e-3)
    again = load_model(read(join_adapters(base, tmp_path / "out")))
    torch.testing.assert_close(peft_models.our_logits(again, theirs), ours, rtol=0, atol=1e-5)
    assert f"{type(theirs).__name__}.from_pretrained" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.sample(plain=2, slow=4)
@torch.no_grad()
@pytest.mark.parametrize("name", peft_models.NAMES)
def test_adapters_of_peft_are_merged(bases: Any, name: str) -> None:
    """With rslora, modules_to_save, targets by list, pattern and all-linear, and layers stored transposed."""
    base = bases(name)
    theirs = peft_models.load_theirs(base)
    ours = load_model(read(join_adapters(base, FILES / name)))
    torch.testing.assert_close(peft_models.our_logits(ours, theirs)[::16], true_logits(name, "in"), rtol=0, atol=1e-3)


@torch.no_grad()
def test_commands_take_adapters(bases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapters = bases("llama"), ["--adapters", str(FILES / "llama")]
    assert command(["export", str(tmp_path / "out"), "-c", str(base), *adapters]) == 0
    logits = peft_models.last_logits(peft_models.load_theirs(tmp_path / "out"))
    torch.testing.assert_close(logits[::16], true_logits("llama", "in"), rtol=0, atol=1e-3)
    assert command(["info", "-c", str(base), *adapters]) == 0
    texts = []
    for place in ([str(base)], [str(base), *adapters], [str(tmp_path / "out")]):
        capsys.readouterr()
        assert command(["generate", "--prompt", "a red", "-c", *place, "--max-tokens", "8", "--device", "cpu"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[1] == texts[2] != texts[0]
    assert command(["import", str(base), *adapters, "--out", str(tmp_path / "merged.ckpt")]) == 0
    merged = load_model(read(join_adapters(base, FILES / "llama"))).state_dict()
    for name, tensor in load_model(read(tmp_path / "merged.ckpt")).state_dict().items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("use_dora", True), ("lora_bias", True), ("bias", "all"), ("peft_type", "LOHA"), ("fan_in_fan_out", True)),
        *(("rank_pattern", {"q_proj": 4}), ("alpha_pattern", {"q_proj": 4}), ("layers_to_transform", [0])),
        *(("init_lora_weights", "pissa"), ("layer_replication", [[0, 1]]), ("trainable_token_indices", [1])),
        *(("target_parameters", ["x"]), ("r", 0), ("lora_alpha", "8"), ("target_modules", 3), ("of_tomorrow", 1)),
    ],
)
def test_unsupported_keys_are_named(bases: Any, tmp_path: Path, key: str, value: object) -> None:
    shutil.copytree(FILES / "llama", tmp_path / "changed")
    config = json.loads((FILES / "llama" / CONFIG).read_text()) | {key: value}
    (tmp_path / "changed" / CONFIG).write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{CONFIG}: {key} is "):
        read(join_adapters(bases("llama"), tmp_path / "changed"))


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (f"{Q}.lora_A.weight", torch.ones(3, 24), "no matrix of rank 2"),
        (f"{Q}.lora_A.weight", torch.ones(2, 5), "changes a matrix"),
        (f"{Q}.lora_B.weight", None, "is missing"),
        (f"{Q}.lora_magnitude_vector", torch.ones(24), "no place"),
        (f"{Q}.weight", torch.ones(24, 24), "nor in modules_to_save"),
        ("base_model.model.lm_head.weight", torch.ones(2, 24), "that of"),
        (f"{Q.replace('q_proj', 'k_proj')}.lora_A.weight", torch.ones(2, 24), "target_modules"),
        (f"{Q.replace('layers.0', 'layers.9')}.lora_A.weight", torch.ones(2, 24), "no place"),
        ("lm_head.weight", torch.ones(2, 24), "no place"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    bases: Any, tmp_path: Path, name: str, tensor: torch.Tensor | None, words: str
) -> None:
    shutil.copytree(FILES / "llama", tmp_path / "changed")
    tensors = load_file(FILES / "llama" / WEIGHTS)
    tensors = {key: value for key, value in tensors.items() if key != name}
    save_file(tensors | ({} if tensor is None else {name: tensor}), tmp_path / "changed" / WEIGHTS)
    with pytest.raises(UserError, match=words) as caught:
        read(join_adapters(bases("llama"), tmp_path / "changed"))
    assert name in str(caught.value)


def test_what_cannot_be_exported_or_read_is_refused(
    bases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, own = bases("llama"), str(tmp_path / "own.ckpt")
    t5 = tmp_path / "t5"
    saved_t5(t5)
    peft_models.save_adapters(t5, tmp_path / "shared.ckpt", saved=["decoder.token_embed"])
    peft_models.save_adapters(base, tmp_path / "own.ckpt")
    cases = {
        "has no adapters; train with model/adapt=lora": ["-c", str(base), "--to", "peft"],
        "decoder.token_embed.weight: was trained": ["-c", str(tmp_path / "shared.ckpt"), "--to", "peft"],
        "is for Hugging Face folders": ["-c", own, "--adapters", str(FILES / "llama")],
        "has no adapter_config.json": ["-c", str(base), "--adapters", str(tmp_path)],
    }
    for words, options in cases.items():
        assert command(["export", str(tmp_path / "out"), *options]) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_an_embedding_that_peft_would_separate_from_its_head_is_refused(bases: Any, tmp_path: Path) -> None:
    shutil.copytree(FILES / "gpt2", tmp_path / "changed")
    tensors = load_file(FILES / "gpt2" / WEIGHTS)
    head = "base_model.model.lm_head.weight"
    for changed, words in (({}, "wte.weight is in modules_to_save without"), ({head: tensors[head] + 1}, "differ")):
        others = {name: tensor for name, tensor in tensors.items() if name != head}
        save_file(others | changed, tmp_path / "changed" / WEIGHTS)
        with pytest.raises(UserError, match=words):
            read(join_adapters(bases("gpt2"), tmp_path / "changed"))


def test_names_with_a_plus_are_split_at_the_folders(tmp_path: Path) -> None:
    base, adapters = tmp_path / "a+b", tmp_path / "c+d"
    for folder, name in ((base, "config.json"), (adapters, CONFIG)):
        folder.mkdir()
        (folder / name).write_text("{}")
    assert split_adapters(join_adapters(base, adapters)) == (base, adapters)
    assert split_adapters(base) is None


@pytest.mark.slow
def test_training_starts_from_merged_adapters(
    bases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters on top of merged ones are stored without them, and found again from another folder."""
    base = bases("smolvlm")
    shutil.copytree(FILES / "smolvlm", tmp_path / "adapters")
    monkeypatch.chdir(tmp_path)
    words = ["train", "model=pretrained", f"model.path={base}", "task=captioning", "data=shapes"]
    words += ["data.source.train_scenes=16", "data.source.val_scenes=4", "data.source.test_scenes=4", "test=false"]
    words += ["data.batch_size=4", "data.num_workers=0", "trainer=cpu", "trainer.max_steps=1", "optim.lr=1e-9"]
    words += ["callbacks.progress=null", "task.val_captions=2", "task.max_tokens=4", "model/adapt=lora", "runs=runs"]
    assert command([*words, "model.adapters=elsewhere"]) == 2
    assert "model.adapters=elsewhere: has no adapter_config.json" in capsys.readouterr().err
    bench = [*words[1:], "test=true", "--steps", "1"]
    assert command(["bench", *bench, "--adapters", "adapters"]) == 0
    assert "step " in capsys.readouterr().out
    assert command([*words, "model.adapters=adapters"]) == 0
    (run,) = (tmp_path / "runs").glob("*/*")
    monkeypatch.chdir("/")
    before, merged = load_model(read(base)).state_dict(), load_model(read(join_adapters(base, FILES / "smolvlm")))
    trained = load_model(read(run)).state_dict()
    assert any(not torch.equal(tensor, trained[name]) for name, tensor in before.items())
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-6)
    assert command(["export", str(tmp_path / "out"), "-c", str(run), "--to", "peft"]) == 2
    assert "is no folder of a Hugging Face model; use --to huggingface" in capsys.readouterr().err


@pytest.mark.slow
def test_modules_are_trained_beside_adapters_and_exported(
    bases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = bases("smolvlm")
    monkeypatch.chdir(tmp_path)
    words = ["train", "model=pretrained", f"model.path={base}", "task=captioning", "data=shapes", "test=false"]
    words += ["data.source.train_scenes=16", "data.source.val_scenes=4", "data.source.test_scenes=4", "runs=runs"]
    words += ["data.batch_size=4", "data.num_workers=0", "trainer=cpu", "trainer.max_steps=2", "optim.lr=0.01"]
    words += ["callbacks.progress=null", "task.val_captions=2", "task.max_tokens=4", "model/adapt=lora"]
    cases = {
        "encoder.projektor is not a module of the model; did you mean encoder.projector": "encoder.projektor",
        "encoder.backbone.norm is frozen by task.freeze": "encoder.backbone.norm",
    }
    for message, name in cases.items():
        assert command([*words, f"model.adapt.modules_to_save=[{name}]", "task.freeze=[encoder.backbone]"]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert command([*words, "model.adapt.modules_to_save=[encoder.projector]"]) == 0
    (run,) = (path.parent for path in (tmp_path / "runs").glob("*/*/checkpoints"))
    assert command(["export", str(tmp_path / "out"), "-c", str(run), "--to", "peft"]) == 0
    config, tensors = json.loads((tmp_path / "out" / CONFIG).read_text()), load_file(tmp_path / "out" / WEIGHTS)
    assert config["modules_to_save"] == ["model.connector.modality_projection.proj"]
    trained = tensors["base_model.model.model.connector.modality_projection.proj.weight"]
    assert not torch.equal(trained, read(base)["state_dict"]["model.encoder.projector.fc.weight"])
    assert not any("lora" in name and "modality_projection" in name for name in tensors)
    again = read(join_adapters(base, tmp_path / "out"))["state_dict"]
    for name, tensor in read(run)["state_dict"].items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-6)
