"""A hub of Hugging Face on this machine, as far as its library asks it: models are folders, by ORG/NAME."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"  # of every model


class Handler(BaseHTTPRequestHandler):
    """Answers of the hub: what a revision is, which files it has, and their content."""

    protocol_version = "HTTP/1.1"
    models: Mapping[str, Path]
    asked: list[str]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        for name, folder in self.models.items():
            if path == f"/api/models/{name}/revision/main":
                return self._json({"id": name, "modelId": name, "sha": COMMIT, "siblings": [], "tags": []})
            if path in (f"/api/models/{name}/tree/{COMMIT}", f"/api/models/{name}/tree/main"):
                files = sorted(one for one in folder.iterdir() if one.is_file())
                return self._json(
                    [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": self._oid(f)} for f in files]
                )
            file = folder / path.rpartition("/")[2]
            if path == f"/{name}/resolve/{COMMIT}/{file.name}" and file.is_file():
                return self._send(file.read_bytes(), {"ETag": f'"{self._oid(file)}"', "X-Repo-Commit": COMMIT})
        code = "RevisionNotFound" if any(f"/{name}/" in path for name in self.models) else "RepoNotFound"
        return self._send(b"{}", {"X-Error-Code": code}, status=404)

    do_HEAD = do_GET

    def _oid(self, file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def _json(self, content: object) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return None


@contextmanager
def serve_models(models: Mapping[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """The address of a server that has these models, and the list of what it is asked."""
    asked: list[str] = []
    handler = type("Hub", (Handler,), {"models": models, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
