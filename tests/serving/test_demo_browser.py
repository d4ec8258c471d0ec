"""The page of `vlm demo` in a headless Chromium: a photo is dropped, words light it, and nothing else is asked of."""

import base64
import re
import shutil
import signal
from pathlib import Path

import pytest
from serving_commands import listening
from tiny_checkpoints import IMAGES, ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CAPTIONER = ROOT / "data" / "sample" / "captioner.ckpt"
WAIT = 60_000  # milliseconds, on a busy machine
DROP = """([zone, name, content]) => {
  const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([bytes], name));
  zone.dispatchEvent(new DragEvent('drop', { dataTransfer, bubbles: true, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The page of a run with examples."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    run = tmp_path_factory.mktemp("run")
    (run / "checkpoints").mkdir()
    (run / "samples").mkdir()
    shutil.copy(CAPTIONER, run / "checkpoints" / "best.ckpt")
    shutil.copy(IMAGES[0], run / "samples" / "example.png")
    with listening("demo", "-c", str(run), "--max-mb", "1") as (process, port):
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143 and process.stderr.read() == ""


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=str)
def page(request, address):
    """The page in a browser, which may ask nothing else than it."""
    width, scheme = request.param
    asked: list[str] = []
    faults: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        options = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme, "has_touch": width < 600}
        page = browser.new_context(**options).new_page()
        page.set_default_timeout(WAIT)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda fault: faults.append(str(fault)))
        page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
        page.goto(address)
        page.wait_for_selector(".v-drop")
        yield page
        browser.close()
    assert asked and faults == []
    assert not [url for url in asked if not url.startswith((f"{address}/", "data:", "blob:"))]


def drop(page, name: str, content: bytes) -> None:
    zone = page.query_selector(".v-drop")
    page.evaluate(DROP, [zone, name, base64.b64encode(content).decode()])


def brightness(page) -> bytes:
    page.wait_for_timeout(400)  # until the light has come up
    return page.locator(".v-photo").screenshot()


def test_a_photo_is_dropped_and_words_light_it(page, capsys):
    """By pointer and by touch, and by the keyboard."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing to scroll sidewards
    drop(page, "photo.png", Path(IMAGES[1]).read_bytes())
    page.wait_for_selector(".v-word")
    words = page.locator(".v-text").first.locator(".v-word")
    assert len(words.all()) > 3 and re.fullmatch(r".+, \d+%", words.nth(0).get_attribute("aria-label"))
    page.mouse.move(1, 1)
    before = brightness(page)
    words.nth(3).hover()
    lit = brightness(page)
    words.nth(4).focus()
    page.mouse.move(1, 1)
    other = brightness(page)
    assert len({before, lit, other}) == 3
    page.keyboard.press("Tab")
    assert brightness(page) not in (lit, other)
    page.evaluate("document.activeElement.blur()")
    assert brightness(page) == before
    if page.evaluate("navigator.maxTouchPoints"):
        words.nth(3).tap()
        assert brightness(page) == lit


def test_beams_samples_and_examples_come_by_a_click(page):
    page.locator("[data-example]").first.click()
    page.wait_for_selector(".v-word")
    page.get_by_label("beams").click()
    page.wait_for_selector(".v-tree")
    assert page.locator(".v-text").count() == 4
    page.get_by_label("samples").click()
    page.wait_for_function("!document.querySelector('.v-tree')")
    assert page.locator(".v-text").count() == 4


def test_hostile_files_get_a_line(page):
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    for name, content, line in (
        ("photo.png", b"\x89PNG\r\n\x1a\n" + bytes(200), "photo: "),
        ("photo.svg", svg, "photo: damaged, or not"),
        ("photo.jpg", bytes(1_000_001), "photo: is too large; the maximum is 1,000,000 bytes"),
        ("photo.gif", b"", "photo: the file is empty"),
    ):
        drop(page, name, content)
        page.wait_for_function("line => document.querySelector('.v-refusal')?.textContent.startsWith(line)", arg=line)
        assert page.locator(".v-refusal").count() == 1 and "\n" not in page.locator(".v-refusal").inner_text()
    drop(page, "photo.png", Path(IMAGES[1]).read_bytes())  # and the page goes on
    page.wait_for_selector(".v-word")
