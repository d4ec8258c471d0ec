"""Every key of config.json, with other valid values: transformers' results, or a refusal that names the key."""

from pathlib import Path

import pytest
import torch
from config_keys import FAMILIES, cases, change_config, load_folder, save_family

from vlm.errors import UserError

SEED = 51
SAMPLE, PAIRS = 2, 20  # changes of each family in the slow tests; pairs of changes under -m nightly


@torch.no_grad()
def verdict(folder: Path, name: str, changes: dict, number: int) -> str:
    """What becomes of a change: "equal", "refused", "theirs refused", or a fault."""
    family = FAMILIES[name]
    try:
        theirs = save_family(folder, family, changes, number)
        truth, compute = family.compute(theirs, change_config(family.config, changes))
    except Exception:  # of many kinds
        return "theirs refused"
    if not truth.isfinite().all():
        return "theirs refused"
    try:
        found = compute(load_folder(folder))
    except UserError as fault:
        named = any(path.rpartition(".")[2] in str(fault) for path in changes)
        return "refused" if named else f"FAULT: refused without the key: {fault}"
    except Exception as fault:
        return f"FAULT: {type(fault).__name__}: {fault}"
    if found.shape != truth.shape:
        return f"FAULT: shape {tuple(found.shape)}, theirs {tuple(truth.shape)}"
    gap, spread = (found - truth).abs().max().item(), truth.std().item()
    return "equal" if gap <= 1e-4 * max(spread, 0.1) else f"FAULT: differs by {gap:.1e} of deviation {spread:.2f}"


def faults_of(folder: Path, name: str, count: int) -> list[str]:
    """The faults among some changes; the config without a change has to be equal."""
    found = [(changes, verdict(folder, name, changes, at)) for at, changes in cases(FAMILIES[name], SEED, count)]
    assert found[0] == ({}, "equal")
    return [f"{changes}: {one}" for changes, one in found if one.startswith("FAULT")]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sample_of_keys(tmp_path: Path, name: str) -> None:
    assert not faults_of(tmp_path / "theirs", name, SAMPLE)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_every_key(tmp_path: Path, name: str) -> None:
    """All values of each key, then pairs of keys: about 9,700 folders in 15 minutes of one core."""
    assert not faults_of(tmp_path / "theirs", name, len(FAMILIES[name].changes()) + PAIRS)
