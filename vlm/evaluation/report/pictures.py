"""Pictures of what a model does: `python -m vlm.evaluation.report.pictures IMAGES... -c CKPT --out FILE.png`."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vlm.atomic import named, replacing
from vlm.data.images.image import load_image
from vlm.errors import UserError, print_error
from vlm.inference.captioning import Captioner
from vlm.inference.files import find_images


def contact_sheet(images: Sequence[Image.Image], captions: Sequence[str], out: str, *, columns: int = 3) -> None:
    """Writes the images in a grid, each above its caption, as a PNG."""
    from matplotlib.figure import Figure

    rows = -(-len(images) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.6 * rows), layout="constrained")
    for place, (image, caption) in enumerate(zip(images, captions, strict=True), start=1):
        axes = figure.add_subplot(rows, columns, place)
        axes.imshow(image, interpolation="lanczos")
        axes.set_axis_off()
        axes.set_title(textwrap.fill(caption, 34), y=-0.04, verticalalignment="top", fontsize=11)
    with named(Path(out)) as path, replacing(path) as file:
        figure.savefig(file, format="png", dpi=100)


def main(argv: list[str] | None = None) -> int:
    """Captions images and writes them with their captions to one picture; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vlm.evaluation.report.pictures", description=main.__doc__)
    parser.add_argument("images", nargs="+")
    parser.add_argument("-c", "--checkpoint", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args(argv)
    try:
        captioner = Captioner(args.checkpoint)
        images = [load_image(path) for path in find_images(args.images)]
        captions = captioner.write([captioner.pixels(image) for image in images])
        contact_sheet(images, [caption.text for caption in captions], args.out)
    except OSError as fault:
        print_error(f"--out {args.out}: cannot be written ({fault.strerror}); choose another place")
        return 1
    except UserError as fault:
        print_error(fault)
        return fault.status
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
