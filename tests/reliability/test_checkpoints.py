"""Checkpoints that are written whole or not at all, and never lost to a damaged one."""

import shutil
import signal
from pathlib import Path

import pytest
from fork_server import ForkServer
from journey import only_run
from small import command

from vlm.checkpoint import load as ckpt

# Each step of a save, as the operating system sees it: (function, its how-manieth call in a save, before or after it).
MOMENTS = [("tempfile.mkstemp", 1, "after"), ("torch.save", 1, "after"), ("os.fsync", 1, "before")]
MOMENTS += [("os.chmod", 1, "after"), ("os.link", 1, "after"), ("os.replace", 1, "after")]
MOMENTS += [("os.replace", 2, "before"), ("os.replace", 2, "after"), ("os.fsync", 2, "after")]

DIE = """
import os, signal, tempfile, torch
from vlm.checkpoint import file as save
saves, calls, write, function = 0, 0, save.write, {name}
def counted(path, *args, **kwargs):
    global saves, calls
    if str(path).endswith("last.ckpt"):
        saves, calls = saves + 1, 0
    return write(path, *args, **kwargs)
def dying(*args, **kwargs):
    global calls
    calls += 1
    here = saves == 3 and calls == {count}
    if here and {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    done = function(*args, **kwargs)
    if here:
        os.kill(os.getpid(), signal.SIGKILL)
    return done
save.write = counted
{name} = dying
"""


@pytest.fixture(scope="module")
def whole(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("whole")
    assert forks.run(command("classification", "trainer.max_epochs=1"), cwd=cwd).status == 0
    return only_run(cwd / "runs")


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "when"), MOMENTS)
def test_a_kill_at_any_step_of_a_save_loses_nothing(name, count, when, forks: ForkServer, tmp_path: Path) -> None:
    """The third save of `last.ckpt` is the first to keep two; it is killed there, with no usable TMPDIR."""
    patch = DIE.format(name=name, count=count, before=when == "before")
    args = command("classification", "trainer.max_epochs=1")
    ended = forks.run(args, cwd=tmp_path, patch=patch, env={"TMPDIR": str(tmp_path / "nowhere")})
    assert ended.status == -signal.SIGKILL, ended.output
    folder = only_run(tmp_path / "runs")
    for path in folder.glob("checkpoints/*.ckpt"):
        ckpt.read(path)
    # The loaded one is at most a save behind; stopping it at once leaves what the start itself has done.
    stop = "import os\nimport lightning as L\nL.Trainer.fit = lambda *args, **options: os._exit(7)"
    ended = forks.run(["resume=last"], cwd=tmp_path, patch=stop)
    assert "resuming" in ended.output and ("step 4" in ended.output or "step 6" in ended.output), ended.output
    assert files(folder) <= {"last.ckpt", "previous.ckpt", "best.ckpt"}
    assert not list(folder.glob("*.tmp"))


@pytest.mark.slow
def test_a_damaged_newest_is_named_and_the_one_before_is_used(forks: ForkServer, whole: Path, tmp_path: Path) -> None:
    from compare import check_same

    folder = tmp_path / "runs" / "classification" / "2000"
    shutil.copytree(whole, folder)
    damage(folder / "checkpoints" / "last.ckpt")
    ended = forks.run(["resume=last"], cwd=tmp_path)
    assert ended.status == 0 and "skipped: " in ended.output and "last.ckpt: is damaged" in ended.output, ended.output
    assert "resuming" in ended.output
    ckpt.read(folder / "checkpoints" / "previous.ckpt")  # the damaged one did not take its place
    check_same(folder, whole)


@pytest.mark.slow
def test_a_damaged_one_given_by_name_is_refused(forks: ForkServer, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "last.ckpt")
    ended = forks.run(["resume=run/checkpoints/last.ckpt"], cwd=tmp_path)
    assert ended.status == 2 and "last.ckpt: is damaged" in ended.output and "Traceback" not in ended.output
    damage(tmp_path / "run" / "checkpoints" / "previous.ckpt")
    ended = forks.run(["resume=run"], cwd=tmp_path)
    assert ended.status == 2 and "last.ckpt" in ended.output and "previous.ckpt" in ended.output


def damage(path: Path) -> None:
    """Turns one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.slow
def test_two_are_kept_and_the_folder_of_temporary_files_does_not_matter(forks: ForkServer, tmp_path: Path) -> None:
    cwd = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path  # another file system than the run's
    args = command("language_modeling", "trainer.max_epochs=1")
    assert forks.run(args, cwd=tmp_path, env={"TMPDIR": str(cwd)}).status == 0
    folder = only_run(tmp_path / "runs")
    assert files(folder) == {"last.ckpt", "previous.ckpt", "best.ckpt"}
    paths = (folder / "checkpoints" / f"{name}.ckpt" for name in ("previous", "last"))
    previous, last = map(ckpt.read, paths)
    assert previous["global_step"] == last["global_step"] == 8  # before and after the last validation
    scores = [checkpoint["callbacks"]["Checkpoints"]["best_score"] for checkpoint in (previous, last)]
    assert scores[0] is None and scores[1] is not None


@pytest.mark.slow
def test_a_checkpoint_says_nothing_of_the_machine(forks: ForkServer, tmp_path: Path) -> None:
    """Neither its bytes nor its values hold a folder, a name of a user or machine, or anything of the environment."""
    cwd = tmp_path / "folder_of_xerxes"
    cwd.mkdir()
    secret = {"USER": "xerxes", "LOGNAME": "xerxes", "HOME": "/home/xerxes", "HOSTNAME": "susa", "API_TOKEN": "tok3n"}
    assert forks.run(command("captioning", "trainer.max_epochs=1"), cwd=cwd, env=secret).status == 0
    private = ["xerxes", "susa", "tok3n", str(Path(ckpt.__file__).parents[2]), str(tmp_path), "Linux-"]
    for path in only_run(cwd / "runs").glob("checkpoints/*.ckpt"):
        content = path.read_bytes() + "\n".join(texts(ckpt.read(path))).encode()
        found = [text for text in private if text.encode() in content]
        assert not found


def texts(value) -> list[str]:
    """Every text in nested containers."""
    if isinstance(value, dict):
        return [text for item in value.items() for child in item for text in texts(child)]
    if isinstance(value, list | tuple | set):
        return [text for child in value for text in texts(child)]
    if isinstance(value, bytes):
        return [value.decode(errors="replace")]
    return [value] if isinstance(value, str) else []
