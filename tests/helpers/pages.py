"""The page of `vlm demo` in this process, and what it answers over HTTP."""

import json
from typing import Any

from vlm.inference.options import ModelOptions


def page_of(path: str, **limits: Any) -> Any:
    """A client of a model's page in this process, once it is entered."""
    from fastapi.testclient import TestClient

    from vlm.serving.demo import make_app

    model = ModelOptions(checkpoint=path, device="cpu", precision="fp32")
    app = make_app(model, **{"local": True, "queue": 4, "max_bytes": 100_000, "rate": 100} | limits)
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


def defaults_of(http: Any, *, outputs: int = 1) -> list[Any]:
    """The values that the inputs of a form have until a visitor changes them; arguments as in `join`."""
    config = http.get("/config").json()
    clicks = [one for one in config["dependencies"] if one["inputs"] and len(one["outputs"]) == outputs]
    values = {one["id"]: one["props"].get("value") for one in config["components"]}
    return [values[number] for number in clicks[0]["inputs"]]


def join(http: Any, *data: Any, outputs: int = 1, session: str = "session") -> Any:
    """The answer to a request that is put into the queue.

    Args:
        outputs: Of what is asked.
        session: The visitor's.
    """
    config = http.get("/config").json()
    clicks = [one for one in config["dependencies"] if one["inputs"] and len(one["outputs"]) == outputs]
    body = {"data": data, "fn_index": clicks[0]["id"], "session_hash": session}
    headers = {"Content-Type": "application/json"}
    return http.post("/gradio_api/queue/join", content=json.dumps(body), headers=headers)


def answers(http: Any, *data: Any, outputs: int = 1, session: str = "session") -> list[str]:
    """The results that come of a form's values, in order; arguments as in `join`."""
    joined = join(http, *data, outputs=outputs, session=session)
    assert joined.status_code == 200, joined.text
    got, shown = list[str](), ""
    with http.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as events:
        for line in events.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if event.get("msg") in ("process_generating", "process_completed") and event["output"].get("data"):
                shown = apply_patch(shown, event["output"]["data"][0])
                got.append(shown)
    return got


def apply_patch(shown: str, news: Any) -> str:
    """A text, or what Gradio sends in its place: what is appended to the one before, or takes its place."""
    if isinstance(news, str):
        return news
    for action, _, value in news:
        shown = shown + value if action == "append" else value
    return shown
