"""Shards that a command writes (``pipe:curl -s URL``): each is fetched whole, and so many are kept on disk at a time.

A command's output can only be read from its begin. So it is run when a sample of its shard is first wanted, and what it
wrote is kept until other shards need the room. Its index stays, so that nothing but the first start reads them all.
"""

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from vlm.data.store.locks import alone
from vlm.data.store.shard_index import MAX_INDEX, ShardIndex, parse_index
from vlm.data.store.shard_scan import build_index, write_file
from vlm.data.store.storage import PAUSES, PIPE, read_file
from vlm.data.store.tar import Span, TarError, read_span
from vlm.errors import UserError, printable

REST = 60.0  # seconds for which a command that failed is not run again: each sample of its shard would ask for it
SHELL = "/bin/sh"
LEAST = 4  # shards: two that are read in turn, one that is fetched ahead, and one that others still read


class Pipes:
    """The tars of commands, the last few of them on disk; processes that share the folder share the tars.

    Args:
        folder: Where tars and indexes are kept, by hash of their command.
        most: Tars that are kept; beside them lie those being fetched.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self._failed: dict[str, tuple[float, str]] = {}
        self._coming: set[str] = set()

    def index(self, place: str) -> ShardIndex:
        """The index of a command's tar, made of it where no earlier run has left one.

        Raises:
            UserError: The command fails, or what it writes is no whole tar.
        """
        index = self._known(place)
        if index is None:
            print(f"reading, once for its index: {printable(place)}", file=sys.stderr, flush=True)
            try:
                self._fetch(place)
            except OSError as fault:
                where = f" in {self.folder}" if fault.errno else ""  # else it is the command's
                raise UserError(f"{place}: {fault.strerror or fault}{where}; mend it, or leave it out") from fault
            index = self._known(place)
        if index is None:
            raise UserError(f"{self._path(place, 'index')}: is not what was written there; is the folder full?")
        return index

    def read(self, place: str, span: Span) -> bytes:
        """The content of a member, as `tar.read_span` gives it; the tar is fetched where it is not there."""
        path = self._path(place, "tar")
        while True:
            try:
                os.utime(path)  # of all tars, the one not read for longest makes room
                return read_span(str(path), span)
            except FileNotFoundError:
                self._fetch(place)

    def ahead(self, place: str) -> None:
        """Fetches a tar in the background, unless it is there; what goes wrong, who reads it will be told."""
        if place in self._coming or self._path(place, "tar").exists():
            return
        self._coming.add(place)
        threading.Thread(target=self._come, args=(place,), daemon=True).start()

    def _come(self, place: str) -> None:
        with suppress(OSError):
            self._fetch(place)
        self._coming.discard(place)

    def _path(self, place: str, kind: str) -> Path:
        return self.folder / f"{blake2b(place.encode(), digest_size=16).hexdigest()}.{kind}"

    def _known(self, place: str) -> ShardIndex | None:
        with suppress(OSError, ValueError, TypeError, RecursionError):
            return parse_index(read_file(str(self._path(place, "index")), MAX_INDEX))
        return None

    def _fetch(self, place: str) -> None:
        """Runs a command, and tries again where it fails for a moment; processes that want the same tar wait for it.

        Raises:
            OSError: It still fails.
        """
        path = self._path(place, "tar")
        with alone(path):
            if path.exists():
                return
            until, reason = self._failed.get(place, (0.0, ""))
            if time.monotonic() < until:
                raise OSError(reason)
            for pause in (*PAUSES, None):
                try:
                    return self._run(place, path)
                except InterruptedError:
                    raise
                except OSError as fault:
                    if pause is None:
                        self._failed[place] = time.monotonic() + REST, str(fault)
                        raise OSError(str(fault)) from fault
                time.sleep(pause)

    def _run(self, place: str, path: Path) -> None:
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)  # a command whose run was killed may still write to it
        self._keep(self.most - 1)
        try:
            with open(part, "wb") as file:
                command = [SHELL, "-c", place.removeprefix(PIPE)]
                ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE)
            if ran.returncode < 0 or ran.returncode == 130:  # whoever ended it wants no second one
                raise InterruptedError("ended by a signal")
            if ran.returncode:
                said = ran.stderr.decode(errors="replace").strip().splitlines()  # those of progress bars end by \r
                raise OSError(f"ended with status {ran.returncode}: {said[-1][-200:] if said else 'it said nothing'}")
            self._check(place, part)
            os.replace(part, path)
            self._keep(self.most)  # others may have come meanwhile
        finally:
            part.unlink(missing_ok=True)

    def _check(self, place: str, part: Path) -> None:
        """Compares a tar with its index, or makes that of a new one."""
        known, size = self._known(place), part.stat().st_size
        if known is None:
            try:
                write_file(self._path(place, "index"), build_index(str(part)).to_bytes())
            except TarError as fault:
                raise OSError(f"what it writes cannot be read as a tar ({fault})") from fault
        elif known.size != size:
            index = self._path(place, "index")
            raise OSError(f"wrote {size:,} bytes, once {known.size:,}; if that is right, remove {index}")

    def _keep(self, most: int) -> None:
        """Removes tars, those that were not read for longest, until so many are left."""
        used: dict[Path, int] = {}
        for path in self.folder.glob("*.tar"):
            with suppress(FileNotFoundError):  # another process removed it
                used[path] = path.stat().st_mtime_ns
        for path in sorted(used, key=used.__getitem__)[: max(0, len(used) - most)]:
            path.unlink(missing_ok=True)
