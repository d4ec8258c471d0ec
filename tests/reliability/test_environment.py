"""Every command in a poor environment: no network, no or a read-only home, the C locale, a checkout of another user's,
a path with spaces and letters that are not ASCII, little room in the folder of temporary files."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forks import ends

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
FEW = ["trainer.max_epochs=-1", "data.batch_size=8", "data.source.train_scenes=64"]
FEW += ["data.source.val_scenes=8", "data.source.test_scenes=8"]
OTHER = 65534  # the number of a user who is not this one
SERVED = """
import json, signal, sys, urllib.request
from serving_commands import listening

package, checkpoint, image = sys.argv[1:]
with listening("serve", "-c", checkpoint, package=package) as (process, port):
    for path, body in (("health", None), ("predict", open(image, "rb").read())):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", body, timeout=60) as answer:
            print(json.dumps(json.load(answer)))
    process.send_signal(signal.SIGTERM)
    sys.exit(process.wait(60))
"""
pytestmark = pytest.mark.slow


@pytest.fixture(params=["read-only home", pytest.param("no home", marks=pytest.mark.nightly)])
def run(request, tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess]]:
    """Runs Python there, as root without the right to write everywhere."""
    rights = 'ip link set lo up; exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    alone = ["unshare", "--net", "sh", "-c", rights, "sh"]  # of addresses there is that of this machine alone
    small, home, code, here = (tmp_path / name for name in ("small", "home", "code", "bilder für 狗"))
    for folder in (small, home, code, here):
        folder.mkdir()
    if shutil.which("setpriv") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this user may not give up its rights and network")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    for name in ("vlm", "conf", "data/sample"):
        shutil.copytree(ROOT / name, code / name)
    shutil.copy(ROOT / "train.py", code)
    for path in (home, code, *code.rglob("*")):
        os.chown(path, OTHER, OTHER)
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "TMPDIR": str(small), "PYTHONPATH": f"{code}:{HELPERS}"}
    environment |= {"HOME": str(home)} if request.param == "read-only home" else {}

    def run(*command: str) -> subprocess.CompletedProcess:
        program = [*alone, sys.executable, *command]
        done = subprocess.run(program, cwd=here, env=environment, capture_output=True, text=True, encoding="utf-8")
        assert "Traceback" not in done.stderr and "atplotlib" not in done.stderr, done.stderr
        return done

    def run_each(commands: list[list[str]]) -> list[tuple[int, str]]:
        """The status of each command, and what it wrote to stderr."""
        return ends(run(str(HELPERS / "forks.py"), json.dumps(commands)).stderr)

    run.code, run.here, run.root, run.each = code, here, tmp_path, run_each  # type: ignore[attr-defined]
    yield run
    subprocess.run(["umount", str(small)], check=True)


def fill(place: Path) -> None:
    """Writes a file as long as there is room."""
    with place.open("wb", buffering=0) as file, pytest.raises(OSError):
        while file.write(bytes(2**12)):
            pass


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.nightly)])  # every third command, or all
def test_every_command_works(run, share: int) -> None:
    captioner = str(run.code / "data" / "sample" / "captioner.ckpt")
    shutil.copytree(run.code / "data" / "sample", run.here / "meine Fotos ü")
    (run.here / "é.json").write_text('[{"image_id": 1, "caption": "ein Hund"}, {"image_id": 2, "caption": "b"}]')
    (run.here / "w.json").write_text('[{"image_id": 1, "caption": "ein Hund"}, {"image_id": 2, "caption": "c"}]')
    train = str(run.code / "train.py")
    commands = [
        [train, "task=classification", "trainer.max_steps=2", *FEW, "runs=läufe"],
        [train, "trainer.max_steps=2", *FEW],
        [train, "resume=last", "trainer.max_steps=4"],
        ["-m", "vlm", "caption", "meine Fotos ü", "-c", captioner, "--out", "texte ü.txt", "--attention", "schau 狗"],
        ["-m", "vlm", "evaluate", "-c", "last", "--out", "auswertung é"],
        ["-m", "vlm", "check-data", "--limit", "8", "--out", "seite ü"],
        ["-m", "vlm", "score", "é.json", "w.json", "--out", "werte.txt"],
        ["-m", "vlm", "export", "ausfuhr é", "-c", captioner],
        ["-m", "vlm", "info", "-c", captioner],
        ["-m", "vlm", "doctor"],
    ]
    commands = commands[::share]
    for command, (status, said) in zip(commands, run.each(commands), strict=True):
        assert status == 0, (command, said)
    assert not list(run.here.rglob("*.part"))
    (checkpoint,) = run.here.glob("läufe/*/*/checkpoints/best.ckpt")
    done = run("-m", "vlm", "classify", "meine Fotos ü", "-c", str(checkpoint))
    count = len(list((run.here / "meine Fotos ü").glob("*.png")))
    assert done.returncode == 0 and len(done.stdout.splitlines()) == count


@pytest.mark.parametrize(
    ("run", "full"),
    [("read-only home", False), pytest.param("no home", True, marks=pytest.mark.nightly)],
    indirect=["run"],
)
def test_the_service_answers(run, full: bool) -> None:
    pytest.importorskip("fastapi")
    if full:
        fill(run.root / "small" / "filler")
    sample = shutil.copytree(run.code / "data" / "sample", run.here / "meine Fotos ü")
    done = run("-c", SERVED, str(run.code), str(sample / "captioner.ckpt"), str(sample / "test-0-000000.png"))
    assert done.returncode == 128 + signal.SIGTERM and not done.stderr, done.stderr
    health, answer = map(json.loads, done.stdout.splitlines())
    line = run("-m", "vlm", "caption", str(sample / "test-0-000000.png"), "-c", str(sample / "captioner.ckpt")).stdout
    assert health == {"status": "ok", "task": "captioning"} and line.endswith(f"\t{answer['results'][0]['text']}\n")


@pytest.mark.nightly  # test_disk.py has a full disk for the same commands
@pytest.mark.parametrize("run", ["no home"], indirect=True)
def test_a_full_disk_is_told_in_a_line(run) -> None:
    captioner, full = str(run.code / "data" / "sample" / "captioner.ckpt"), run.root / "small" / "full"
    full.mkdir()
    fill(full / "filler")
    sample = str(run.code / "data" / "sample")
    commands = [
        ["caption", sample, "-c", captioner, "--out", f"{full}/texts.txt"],
        ["caption", sample, "-c", captioner, "--attention", f"{full}/looked"],
        ["check-data", "--limit", "8", "--out", f"{full}/page"],
        ["export", f"{full}/out", "-c", captioner],
        ["train", "trainer.max_steps=2", *FEW, f"runs={full}/runs"],
    ]
    found = run.each([["-m", "vlm", *command] for command in commands])
    for command, (status, said) in zip(commands, found, strict=True):
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert status == 1 and len(errors) == 1 and "No space left" in errors[0], (command, said)
