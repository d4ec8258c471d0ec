"""Uses hostile files in a process that is watched, and prints what each of them did, a line of JSON each.

Run as `python hostile_use.py FOLDER`: FOLDER is where the files are made, and the only place that may be written to.
"""

import contextlib
import io
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1] if __name__ == "__main__" else ".").resolve()
ROOT = Path(__file__).parent.parent.parent
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MOVES = ("remove", "rename", "mkdir", "rmdir", "chmod", "chown", "link", "symlink", "truncate")
CHANGES = {f"os.{name}" for name in MOVES}
FOREIGN = {f"os.{name}" for name in ("system", "exec", "posix_spawn", "spawn", "fork", "forkpty", "startfile")}
FOREIGN |= {"subprocess.Popen", "pty.spawn", "webbrowser.open", "shutil.unpack_archive", "pickle.find_class"}
NETWORK = {f"socket.{name}" for name in ("connect", "bind", "getaddrinfo", "gethostbyname", "sendto")}
NETWORK |= {"urllib.Request"}

seen: list[str] = []
read: set[str] = set()


def inside(path):
    place = Path(os.path.realpath(os.fsdecode(path)))
    return place.is_relative_to(FOLDER) or str(place) == os.devnull


def watch(event, args):
    if event in FOREIGN or event in NETWORK:
        seen.append(f"{event} {args[:2]}")
    elif event == "open" and isinstance(args[0], str | bytes):
        mode, flags = args[1] or "", args[2] if isinstance(args[2], int) else 0
        if (set(str(mode)) & set("wax+") or flags & WRITES) and not inside(args[0]):
            seen.append(f"{event} {args}")
    elif event in CHANGES and isinstance(args[0], str | bytes) and not inside(args[0]):
        seen.append(f"{event} {args}")
    elif event == "import" and str(args[0]).startswith(("evil", "stranger")):
        seen.append(f"{event} {args[0]}")


def no_network(*args, **kwargs):
    seen.append(f"network {args[1:]}")
    raise OSError("no network here")


class WatchedEnvironment(type(os.environ)):
    def __getitem__(self, name):
        read.add(name)
        return super().__getitem__(name)


class TooLong(BaseException):
    pass


def too_long(*args):
    raise TooLong("is still at it")


def used(name, use):
    """Uses a file and says what came of it."""
    seen.clear()
    read.clear()
    said, started, before = io.StringIO(), time.perf_counter(), time.process_time()
    signal.alarm(60)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = use()
        except TooLong:
            status = "too long"
        except BaseException as fault:
            status = f"{type(fault).__name__}: {fault}"[:500]
    signal.alarm(0)
    took = min(time.perf_counter() - started, time.process_time() - before)
    done = {"name": name, "status": status, "said": said.getvalue()[-2000:], "seconds": took, "seen": list(seen)}
    print(json.dumps(done | {"read": sorted(read)}), flush=True)


def main():
    sys.path.insert(0, str(ROOT))
    import hostile_data
    import hostile_files as files
    import lightning.pytorch.callbacks
    import lightning.pytorch.loggers  # noqa: F401  what is imported is no part of what is measured
    import safetensors.torch  # noqa: F401
    import timm
    from PIL import Image

    from vlm.cli import main as cli
    from vlm.data.text.token_file import TokenFile
    from vlm.models.pretrained.folder import Folder
    from vlm.training.run import evaluate, run  # noqa: F401
    from vlm.training.run.fit import main as train

    timm.list_models()
    os.chdir(FOLDER)
    Image.new("RGB", (20, 10), "red").save("image.png")
    made = FOLDER / "made"
    made.mkdir()
    paths = {}
    groups = {
        "checkpoint": files.CHECKPOINTS,
        "config": files.CONFIGS,
        "coco": hostile_data.COCO,
        "folder": hostile_data.FOLDERS,
        "good": {"good": files.change_checkpoint(lambda checkpoint: None)},
    }
    for group, makers in groups.items():
        for number, (name, make) in enumerate(makers.items()):
            place = made / f"{group}{number}" / "checkpoints" / "last.ckpt"
            place.parent.mkdir(parents=True)
            make(place)
            paths[group, name] = place
    (made / "pipes").mkdir()
    os.mkfifo(made / "pipes" / "pipe.png")
    for link in ("link.png", "link2.png"):
        (made / "pipes" / link).symlink_to("pipe.png")
    hostile_data.hostile_tar(made / "hostile.tar")
    hostile_data.huge_member(made / "huge.tar")

    # Once everything, so that nothing is imported or cached for the first time while it is watched.
    good = str(paths["good", "good"])
    small = ["trainer=cpu", "callbacks.progress=null", "data.num_workers=0", f"runs={FOLDER}/runs"]
    with contextlib.redirect_stdout(io.StringIO()):
        cli.run([*files.CAPTION, good, "--device", "cpu"])
        cli.run(["evaluate", "-c", str(paths["config", "config names os.system"]), "--device", "cpu"])
        train([*small, "task=classification", "data=image_tar", f"data.path={made}/absent.tar", "data.image_size=32"])
        Image.open("image.png").load()

    os.environ[files.SECRET] = "a secret"
    os.environ.__class__ = WatchedEnvironment
    socket.socket.connect = socket.socket.connect_ex = no_network
    socket.create_connection = socket.getaddrinfo = no_network
    signal.signal(signal.SIGALRM, too_long)
    sys.addaudithook(watch)

    def caption_command(path):
        return lambda: cli.run([*files.CAPTION, str(path), "--device", "cpu"])

    used("good", caption_command(good))
    used("good info", lambda: cli.run(["info", "-c", good]))
    for name in files.CHECKPOINTS:
        used(f"caption {name}", caption_command(paths["checkpoint", name]))
    for name in INFO:
        used(f"info {name}", lambda name=name: cli.run(["info", "-c", str(paths["checkpoint", name])]))
    for name in files.CONFIGS:
        path = paths["config", name]
        used(f"evaluate {name}", lambda path=path: cli.run(["evaluate", "-c", str(path), "--device", "cpu"]))
        used(f"resume {name}", lambda path=path: train([f"resume={path}"]))
    used("run folder", lambda: train([f"resume={strange_folder(files, made, 'strange')}"]))
    used("run folder that laughs", lambda: train([f"resume={strange_folder(files, made, 'laughs', LAUGHS)}"]))
    data = [*small, "data.image_size=32", "trainer.max_epochs=1", "data.batch_size=4"]
    for name in hostile_data.COCO:
        root = made / "pipes" if "pipe" in name else made
        own = ["data=coco", f"data.root={root}", f"data.path={paths['coco', name]}", "tokenizer=bytes"]
        used(f"coco {name}", lambda own=own: train([*data, *own]))
    used("tar", lambda: read_tar(made / "hostile.tar"))
    own = ["task=classification", "data=image_tar", f"data.path={made / 'huge.tar'}"]
    used("tar huge", lambda: train([*data, *own]))
    vit = ["task=classification", "model/encoder=vit", "data.source.train_scenes=8", "data.source.val_scenes=8"]
    for name in hostile_data.FOLDERS:
        own = [*vit, f"+model.init_from={paths['folder', name]}"]
        used(f"folder {name}", lambda own=own: train([*small, *own]))
        used(f"tensors {name}", lambda name=name: told_of(lambda: Folder(paths["folder", name]).read_weights()))
    for name, content in CONFIG_FILES.items():
        place = made / "conf" / "experiment"
        place.mkdir(parents=True, exist_ok=True)
        (place / "strange.yaml").write_text(content)
        used(f"yaml {name}", lambda: train([*small, "--config-dir", str(made / "conf"), "experiment=strange"]))
    for name, content in TOKENS.items():
        path = made / f"{name.replace(' ', '-')}.tokens"
        path.write_bytes(content)
        used(f"tokens {name}", lambda path=path: told_of(lambda: TokenFile(path, "0")))
    print(json.dumps({"canaries": [str(path) for path in FOLDER.parent.rglob(files.CANARY)]}))
    # Of this process alone: getrusage tells what the one that started it had, if that was more.
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(json.dumps({"megabytes": peak / 1024}))


INFO = ("billion laughs", "zip bomb", "pickle of os.system", "spec of wrong type", "vlm of wrong type")
LAUGHS = "x:\n  a0: &a0 [ha, ha]\n" + "".join(f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 50))
HYDRA = "# @package _global_\nhydra:\n"
HANDLER = "    handlers:\n      x:\n"
CONFIG_FILES = {
    "names os.system": "# @package _global_\nmodel:\n  encoder:\n    _target_: os.system\n    x: touch canary\n",
    "names our function": "# @package _global_\ncallbacks:\n  x:\n    _target_: vlm.checkpoint.file.write\n"
    "    path: canary\n    checkpoint: {}\n",
    "has hydra call": f"{HYDRA}  callbacks:\n    x:\n      _target_: os.mkdir\n      path: canary\n",
    "sets the environment": f"{HYDRA}  job:\n    env_set:\n      LD_PRELOAD: evil.so\n",
    "has hydra log": f"{HYDRA}  job_logging:\n{HANDLER}        (): os.mkdir\n        path: canary\n",
    "reads the environment": "# @package _global_\nname: ${oc.env:VLM_TEST_SECRET}\n",
    "has a python tag": "# @package _global_\nname: !!python/object/apply:os.system ['touch canary']\n",
    "laughs": "# @package _global_\nx:\n  a0: &a0 [ha, ha]\n"
    + "".join(f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 8))
    + "seed: one\n",
}


def header(content, length=None):
    """The start of a file of tokens that says this of itself."""
    data = content.encode()
    return b"VLMTOKEN" + struct.pack("<II", 1, len(data) if length is None else length) + data.ljust(5000)


def token_header(dtype, count):
    rest = '"documents": 1, "words": 1, "bytes": 1, "digest": "0"'
    return f'{{"tokenizer": "0", "dtype": "{dtype}", "tokens": {count}, {rest}}}'


TOKENS = {
    "of another magic": b"EVILTOKN" + bytes(5000),
    "of a giant header": header("", 2**32 - 1),
    "of no JSON": header("[" * 4000),
    "of negative count": header(token_header("<u2", -2048)),
    "of wrong count": header(token_header("<u2", 10**15)),
    "of objects": header(token_header("|O", 10)),
}


def told_of(use):
    """Uses a file, and tells of its refusal as a command would."""
    from vlm.errors import UserError

    try:
        use()
    except UserError as fault:
        print(f"error: {fault}")
        return fault.status
    return 0


def read_tar(path):
    """Every image of a tar, in memory."""
    from vlm.data.sources.class_folders import ClassFolders

    source = ClassFolders(path=str(path))
    records = [record for name in source.splits for record in source.split(name).records()]
    print(json.dumps(sorted(record.id for record in records)))
    for record in records:
        record.image()
    return 0


def strange_folder(files, made, name, more=""):
    """The folder of a good checkpoint, with a config beside it that is not its own."""
    import yaml

    place = made / name / "checkpoints" / "last.ckpt"
    place.parent.mkdir(parents=True)
    files.change_checkpoint(lambda checkpoint: None)(place)
    strange = files.compose_small("task=captioning").tree
    strange["model"] = {"_target_": "os.system", "command": "touch canary"}
    (made / name / "config.yaml").write_text(more + yaml.safe_dump(strange))
    return made / name


if __name__ == "__main__":
    main()
