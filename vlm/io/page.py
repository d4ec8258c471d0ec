"""Self-contained HTML pages without scripts or network access, responsive, with a light and a dark theme."""

import base64
import html
import re
from collections.abc import Iterable, Sequence
from io import BytesIO

from PIL import Image

CONTROLS = re.compile("[\\0-\\x08\\x0b-\\x1f\\x7f-\\x9f]")  # forbidden in HTML, and executed by terminals
STYLE = """
:root { color-scheme: light dark; --text: #1d2329; --soft: #5c6773; --line: #dfe4ea; --back: #ffffff; --card: #f6f8fa;
  --one: #1f6feb; --two: #d9730d; --three: #2b8a3e; --four: #8b5cf6; --five: #c2255c; --good: #2b8a3e; --bad: #c92a2a; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --soft: #9aa5b1; --line: #313840; --back: #14181d;
  --card: #1c2229; --one: #6cb1ff; --two: #ffa657; --three: #69db7c; --four: #b9a2ff; --five: #ff8fb3; --good: #69db7c;
  --bad: #ff8787; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); overflow-wrap: anywhere;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .8rem; padding-bottom: .35rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 .6rem; }
p { margin: .4rem 0 .8rem; max-width: 46rem; } .soft { color: var(--soft); } .small { font-size: .86rem; }
a { color: var(--one); } .good { color: var(--good); } .bad { color: var(--bad); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 60%; }
th, td { padding: .34rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); font-size: .86rem; } th:first-child, td:first-child { text-align: left;
  padding-left: 0; } td.text { text-align: left; white-space: normal; }
.tiles, .cards, .charts { display: grid; gap: 1rem; margin: 1rem 0; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.55rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.cards { grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; margin: 0; }
.card img { display: block; width: 100%; height: 13rem; object-fit: contain; background: var(--line); }
.card figcaption { padding: .7rem .9rem .9rem; } .card ul { margin: .3rem 0 0; padding-left: 1.1rem; }
.card .said { font-weight: 600; } summary { cursor: pointer; }
.charts { grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); }
.chart { margin: 0; } .chart figcaption { font-weight: 600; font-size: .92rem; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.mark { display: inline-block; margin-right: .9em; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .3em; }
.picture img { max-width: 100%; height: auto; border-radius: 10px; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .9rem 1rem;
  white-space: pre-wrap; font: .86rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
@media (max-width: 600px) { main { padding: 1.2rem 1rem 3rem; } h1 { font-size: 1.4rem; }
  .cards, .charts { grid-template-columns: 1fr; } .tiles { grid-template-columns: 1fr 1fr; }
  th, td { padding: .34rem .5rem; } .card img { height: auto; max-height: 22rem; } }
"""


def page(title: str, subtitle: str, body: Iterable[str]) -> str:
    """Returns a page. The body is HTML; the titles are text and are escaped."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(subtitle)}</p>\n'
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def escape(text: str, quote: bool = False) -> str:
    """Escapes text for HTML; control characters are replaced by their codes."""
    return html.escape(CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text), quote)


def section(title: str, *body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(body) + "\n</section>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of texts, which scrolls horizontally if it is wider than the screen."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{"".join(lines)}\n</tbody></table></div>'
    )


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """Returns tiles with a name, a headline number, and a line below it."""
    divs = (
        f'<div class="tile"><span class="soft small">{escape(name)}</span><b>{escape(number)}</b>'
        f'<span class="soft small">{escape(below)}</span></div>'
        for name, number, below in items
    )
    return f'<div class="tiles">{"".join(divs)}</div>'


def card(
    image: str | None,
    caption: str,
    lines: Sequence[str] = (),
    references: Sequence[str] = (),
    links: Sequence[tuple[str, str]] = (),
) -> str:
    """Returns a figure with an image, its caption, further lines, and references, all but the first collapsed.

    Args:
        links: Text and target of each link.
    """
    picture = f'<img src="{image}" alt="{escape(caption, quote=True)}" loading="lazy">' if image else ""
    parts = [f'<div class="said">{escape(caption) or "<i>(empty)</i>"}</div>']
    parts += [f'<div class="soft small">{escape(line)}</div>' for line in lines]
    parts += [f'<div class="small"><a href="{escape(to, quote=True)}">{escape(text)}</a></div>' for text, to in links]
    if references:
        parts.append(f'<div class="small">reference: {escape(references[0])}</div>')
    if len(references) > 1:
        items = "".join(f"<li>{escape(text)}</li>" for text in references[1:])
        more = f"{len(references) - 1} more"
        parts.append(f'<details class="small"><summary class="soft">{more}</summary><ul>{items}</ul></details>')
    return f'<figure class="card">{picture}<figcaption>{"".join(parts)}</figcaption></figure>'


def cards(figures: Iterable[str]) -> str:
    return f'<div class="cards">{"".join(figures)}</div>'


def code_block(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def picture(data: str, alt: str) -> str:
    return f'<p class="picture"><img src="{data}" alt="{escape(alt, quote=True)}"></p>'


THUMBNAIL = 320  # longest side of an image on a page, in pixels


def thumbnail(image: Image.Image, side: int = THUMBNAIL) -> str:
    """Returns a thumbnail as a data URI, of at most `side` pixels; small images are stored losslessly."""
    image = image.convert("RGB")
    small = max(image.size) <= 128
    if small and max(image.size) < side // 2:  # otherwise a screen would blur it
        image = image.resize((image.width * 2, image.height * 2), Image.Resampling.LANCZOS)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = BytesIO()
    image.save(file, "PNG" if small else "JPEG", **({} if small else {"quality": 82}))
    return data_uri(file.getvalue(), "png" if small else "jpeg")


def data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
