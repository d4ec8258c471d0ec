"""The commands of the README and of the pages, as they are written."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Pages whose commands need other machines, or the results of those before them: test_fine_tune.py runs these in order.
ELSEWHERE = ("gpu", "reliability", "resuming", "scaling", "several-gpus", "fine-tune")
PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.stem not in ELSEWHERE)]
README = PAGES[0].read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [block for page in PAGES for language, block in FENCED.findall(page.read_text()) if not language]
COMMANDS = sorted(
    {
        line.removeprefix("$ ")
        for block in BLOCKS
        for line in re.sub(r" \\\n +", " ", block).splitlines()
        if re.match(r"(\$ )?(python train\.py|vlm )", line)
    }
)
