"""The architecture picture: python docs/architecture.py writes docs/architecture.svg."""

from pathlib import Path

BOX, SHADE, LINE = "#ffffff", {"data": "#e8eef7", "nn": "#fdf1dc", "out": "#e6f4e6"}, "#44546a"
WIDTH, HEIGHT = 920, 400


def box(x: int, y: int, width: int, lines: list[str], kind: str, height: int = 56) -> str:
    """A rounded box with centred lines, the first of them bold."""
    rect = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{SHADE[kind]}" stroke="{LINE}"/>'
    middle = y + height / 2 - 8 * (len(lines) - 1) + 5
    texts = [
        f'<text x="{x + width / 2}" y="{middle + 17 * at}" text-anchor="middle" '
        f'font-size="{14 if at == 0 else 12}" font-weight="{600 if at == 0 else 400}">{line}</text>'
        for at, line in enumerate(lines)
    ]
    return rect + "".join(texts)


def arrow(x1: int, y1: int, x2: int, y2: int, label: str = "") -> str:
    """An arrow from one place to another, with a label above its middle."""
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1.6" marker-end="url(#tip)"/>'
    if not label:
        return line
    at = f'x="{(x1 + x2) / 2}" y="{(y1 + y2) / 2 - 7}"'
    return f'{line}<text {at} text-anchor="middle" font-size="11" fill="{LINE}">{label}</text>'


PARTS = [
    box(20, 40, 130, ["images", "(B, 3, H, W)"], "data"),
    arrow(150, 68, 200, 68),
    box(200, 40, 150, ["ViT", "patches, blocks"], "nn"),
    arrow(350, 68, 440, 104),
    box(20, 150, 130, ["input text", "tokens (B, S)"], "data"),
    arrow(150, 178, 200, 178),
    box(200, 150, 150, ["text encoder", "the same blocks"], "nn"),
    arrow(350, 178, 440, 142),
    box(440, 95, 160, ["Context", "states (B, S, D), mask"], "out"),
    arrow(600, 123, 680, 123),
    box(680, 95, 220, ["heads", "class, label of each word"], "out"),
    arrow(520, 151, 520, 250, ""),
    '<text x="530" y="206" font-size="11" fill="#44546a">keys and values, computed once an input</text>',
    box(20, 300, 130, ["texts in a row", "tokens (B, L)", "segments (B, L)"], "data", 72),
    arrow(150, 336, 200, 336),
    box(200, 300, 150, ["embedding", "+ positions"], "nn", 72),
    arrow(350, 336, 400, 336),
    box(400, 250, 240, ["decoder block, × depth", "causal self-attention", "cross-attention", "MLP"], "nn", 122),
    arrow(640, 311, 680, 311),
    box(680, 283, 90, ["hidden", "(B, L, D)"], "out"),
    arrow(770, 311, 800, 311),
    box(800, 283, 100, ["head", "logits (…, V)"], "out"),
]


def main() -> None:
    tip = (
        '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0,0 L10,5 L0,10 z" fill="{LINE}"/></marker>'
    )
    style = 'font-family="sans-serif" fill="#1b2430"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{BOX}"/>'
    text = "\n".join([head, f"<defs>{tip}</defs>", ground, *PARTS, "</svg>", ""])
    Path(__file__).with_suffix(".svg").write_text(text)


if __name__ == "__main__":
    main()
