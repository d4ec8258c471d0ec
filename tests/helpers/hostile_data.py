"""Data sets and folders of weights that a stranger may have made to do harm; each maker writes one."""

import io
import json
import tarfile

from PIL import Image


def tar(*members):
    def make(path):
        with tarfile.open(path, "w") as archive:
            for name, kind, data, link in members:
                info = tarfile.TarInfo(name)
                info.type, info.size, info.linkname = kind, len(data), link
                archive.addfile(info, io.BytesIO(data))

    return make


def pixels(color="red"):
    file = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(file, "PNG")
    return file.getvalue()


FILE, LINK, HARD, DEVICE, PIPE = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE


def hostile_tar(path):
    """Good images in two classes, with members that lead out of the archive."""
    bad = [
        ("../canary/a.png", FILE, pixels(), ""),
        ("/tmp/canary/b.png", FILE, pixels(), ""),
        ("a/../../canary.png", FILE, pixels(), ""),
        ("a/link.png", LINK, b"", "/etc/passwd"),
        ("a/hard.png", HARD, b"", "/etc/passwd"),
        ("a/device.png", DEVICE, b"", ""),
        ("a/pipe.png", PIPE, b"", ""),
    ]
    kept = ((name, color, n) for name, color in (("a", "red"), ("b", "blue")) for n in range(8))
    tar(*bad, *((f"{name}/{n}.png", FILE, pixels(color), "") for name, color, n in kept))(path)


def huge_member(path):
    """A header that claims an exabyte."""
    tar(("a/0.png", FILE, pixels(), ""))(path)
    data = bytearray(path.read_bytes())
    data[124:136] = b"\x80" + (2**60).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    path.write_bytes(data)


def coco(images, annotations):
    return lambda path: path.write_text(json.dumps({"images": images, "annotations": annotations}))


def images_named(*names):
    images = [{"id": n, "file_name": name} for n, name in enumerate(names)]
    return coco(images, [{"id": n, "image_id": n, "caption": "a picture"} for n in range(len(names))])


def text(content):
    return lambda path: path.write_text(content)


COCO = {
    "nested deeply": text("[" * 200_000),
    "nested deeply in images": text('{"images": ' + "[" * 100_000 + "]" * 100_000 + ', "annotations": []}'),
    "number of many digits": text(f'{{"images": [{{"id": {"9" * 100_000}, "file_name": "a"}}], "annotations": []}}'),
    "no list": text('{"images": 7, "annotations": {}}'),
    "names of wrong type": coco([{"id": 0, "file_name": ["a"]}], []),
    "ids of wrong type": coco([{"id": [], "file_name": "a"}], []),
    "names a device": images_named("/dev/zero", "/dev/zero", "/dev/random"),
    "names a pipe": images_named("pipe.png", "link.png", "link2.png"),
    "names files above": images_named("../" * 20 + "etc/passwd", "../" * 20 + "etc/hosts", "/etc/group"),
    "not text": lambda path: path.write_bytes(b'{"images": "\xff\xfe'),
}


def folder(config="{}", **files):
    """A folder of Hugging Face."""

    def make(path):
        path.mkdir()
        (path / "config.json").write_text(config)
        for name, data in files.items():
            (path / name.replace("__", ".")).write_bytes(data)

    return make


VIT_CONFIG = json.dumps({"model_type": "vit", "auto_map": {"AutoModel": "evil.Model"}})
INDEX = "model__safetensors__index__json"
GIANT = b'{"x":{"dtype":"F32","shape":[1000000000,1000000000],"data_offsets":[0,4]}}'
FOLDERS = {
    "of code": folder(VIT_CONFIG.replace("vit", "evil"), evil__py=b"open('canary', 'w')"),
    "of a pickle": folder(VIT_CONFIG, pytorch_model__bin=b"cos\nsystem\n(S'touch canary'\ntR."),
    "of a giant header": folder(VIT_CONFIG, model__safetensors=(2**62).to_bytes(8, "little") + b"{}"),
    "of giant tensors": folder(VIT_CONFIG, model__safetensors=len(GIANT).to_bytes(8, "little") + GIANT),
    "of shards above": folder(VIT_CONFIG, **{INDEX: b'{"weight_map": {"x": "../../../etc/passwd"}}'}),
    "of wrong types": folder(VIT_CONFIG, **{INDEX: b'{"weight_map": ["x"]}'}),
    "nested deeply": folder("[" * 200_000),
    "of no sizes": folder('{"model_type": "vit", "hidden_size": "many"}'),
}
