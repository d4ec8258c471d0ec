"""The bar leaves nothing of itself behind where a run is stopped."""

import io
from types import SimpleNamespace

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from vlm.training.callbacks.progress import Progress


def test_a_stopped_bar_is_not_drawn_again():
    screen = io.StringIO()
    bar = Progress()
    bar._train_progress_bar = Tqdm(total=9, file=screen, leave=True)
    bar._train_progress_bar.update(4)
    drawn = len(screen.getvalue())
    bar.on_exception(SimpleNamespace(), SimpleNamespace(), KeyboardInterrupt())
    assert not screen.getvalue()[drawn:].strip()
