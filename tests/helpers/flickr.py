"""Folders in Flickr8k's layout, with drawn scenes for photos, and their captions in other languages."""

from pathlib import Path

from vlm.data.shapes.scene_captions import Shapes

GERMAN = {"small": "kleines", "large": "großes", "circle": "Rund", "cross": "Kreuz", "above": "über", "below": "unter"}
CHINESE = {"small": "小", "large": "大", "circle": "圆", "cross": "十字", "above": "上", "below": "下", "left": "左"}
CHINESE |= {"right": "右", "red": "红", "green": "绿", "blue": "蓝", "yellow": "黄", "and": "和"}


def draw_flickr8k(folder: Path) -> Path:
    """Draws the photos, and writes their English captions and the lists of the splits."""
    (folder / "images").mkdir()
    kinds = {"shapes": ["circle", "cross"], "colors": ["red", "green", "blue", "yellow"], "sizes": ["small", "large"]}
    counts = {"train_scenes": 12, "val_scenes": 8, "test_scenes": 8, "captions_per_image": 5}
    source = Shapes(seed=0, image_size=128, **kinds, **counts)
    lines = []
    for split, name in (("train", "train"), ("val", "dev"), ("test", "test")):
        scenes = source.split(split)
        names = [f"{split}{index}.jpg" for index in range(len(scenes))]
        (folder / f"Flickr_8k.{name}Images.txt").write_text("\n".join(names) + "\n")
        for record, file in zip(scenes.records(), names, strict=True):
            record.image().save(folder / "images" / file)
            lines += [f"{file}#{k}\t{caption} ." for k, caption in enumerate(record["captions"])]
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    return folder


def translate_flickr8k(folder: Path, flickr8k: Path, *, without: tuple[str, ...] = ()) -> Path:
    """Writes the German captions, which some photos go without, and the Chinese ones."""
    german, chinese = [], []
    for line in (flickr8k / "Flickr8k.token.txt").read_text().splitlines():
        key, _, caption = line.partition("\t")
        name, _, number = key.partition("#")
        words = caption.split()
        chinese.append(f"{name}#zhc#{number} {''.join(CHINESE.get(word, '') for word in words)}。")
        if name not in without:
            german.append(f"{key}\tEin {' '.join(GERMAN.get(word, word) for word in words[1:])}")
    folder.mkdir(exist_ok=True)
    (folder / "Flickr8k.german.token.txt").write_text("\n".join(german) + "\n")
    (folder / "flickr8kzhc.caption.txt").write_text("\n".join(chinese) + "\n")
    return folder
