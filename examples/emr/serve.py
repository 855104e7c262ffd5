"""Serve all tasks of a merge over HTTP from one process: classify, restore, generate.

    pip install fastapi uvicorn
    python examples/emr/serve.py merged --port 8000 [--token-file FILE]
    curl 127.0.0.1:8000/classify/emotion -d "At last!"
    curl 127.0.0.1:8000/generate/story -d "Once upon a time" -G --data-urlencode max_tokens=64
    curl 127.0.0.1:8000/restore/denoise --data-binary @photo.jpg -o restored.png

The body is a text, a picture file, or for tasks that hear a JSON list of numbers at the model's rate. Requests take
turns with the one set of weights: one classification, one picture, or at most 32 tokens. So a short request waits for
no long text of another client, unless that needs one turn: for beams, or settings of its whole length. A request ends
when its client leaves, and when it has used the time or the memory of --seconds and --gigabytes. Only this machine's
names are answered, and those of --allowed-host. For one task, `hf-ext emr export` and `transformers serve` do more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from hf_ext.answers.limits import ClientLeft, Clock, Limits, TookTooLong
from hf_ext.answers.merged_task import AnsweringTask
from hf_ext.embedded_hub.access import Access
from hf_ext.embedded_hub.errors import HubError
from hf_ext.emr import EMRModel
from hf_ext.hub.disclosure import cut_folders
from hf_ext.restoration.camera import Frames
from hf_ext.restoration.encoding import encode_frames

# Tokens of a turn; bytes of a body, all of which may be held at once; requests; seconds between looks for a client.
TURN_TOKENS, MAX_BYTES, MAX_WAITING, POLL = 32, 64 * 2**20, 32, 0.1
OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")


class Turns:
    """One thread for the model; requests wait in a row, and those of several turns stand in it anew for each."""

    def __init__(self, limits: Limits) -> None:
        self._lock, self._limits, self.waiting = asyncio.Lock(), limits, 0

    async def take(self, request: Request, clock: Clock, work: Callable[[], Any]) -> Any:
        """One turn; it ends when the time of the request is over or its client has left."""

        def run() -> Any:
            clock.check()
            with clock:
                return work()

        async with self._lock:
            left = await request.is_disconnected()
            clock.left = lambda: left
            running = asyncio.ensure_future(asyncio.to_thread(run))
            try:
                # Nobody else may begin before the thread ends.
                while not (await asyncio.wait([running], timeout=POLL))[0]:
                    left = left or await request.is_disconnected()
                return await running
            except asyncio.CancelledError:
                left = True
                await asyncio.gather(running, return_exceptions=True)
                raise

    @contextlib.asynccontextmanager
    async def request(self) -> Any:
        """A request from beginning to end; gives its clock."""
        if self.waiting >= MAX_WAITING:
            raise HTTPException(503, "too many requests are waiting; try again later")
        self.waiting += 1
        try:
            async with asyncio.timeout(self._limits.seconds):
                yield self._limits.clock()
        except (ClientLeft, ClientDisconnect):
            raise HTTPException(499, "the client has left") from None
        except (TookTooLong, TimeoutError) as error:
            raise HTTPException(504, str(error) or f"not done after {self._limits.seconds:g} s") from error
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise HTTPException(400, cut_folders(str(error))[:1000]) from error
        except (RuntimeError, OSError, MemoryError) as error:
            raise HTTPException(500, cut_folders(str(error))[:1000] or "memory is full") from error
        finally:
            self.waiting -= 1


def make_app(emr: EMRModel, access: Access, limits: Limits, tokens: int = 1024) -> FastAPI:
    """The application; `limits` and `tokens` are the most that a request may ask for."""

    async def guard(request: Request) -> None:
        """Refuses who calls this machine by another name, as a web page could, or has no token where one is needed."""
        try:
            access.base_url(request.headers, request.scope["server"])
            if not access.is_trusted(request.headers):
                raise HubError(401, "a token is needed: Authorization: Bearer TOKEN")
        except HubError as error:
            raise HTTPException(error.status, error.message) from error

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(guard)])
    turns = Turns(limits)
    tasks = {name: AnsweringTask(emr, name, limits.gigabytes) for name in emr.tasks}

    def find(name: str, kind: str) -> AnsweringTask:
        if name not in tasks:
            raise HTTPException(404, f"there is no task {name!r:.100}; there are {', '.join(tasks)}")
        if tasks[name].kind != kind:
            raise HTTPException(400, f"task {name!r} does {tasks[name].kind}, not {kind}")
        return tasks[name]

    @app.get("/tasks")
    async def list_tasks() -> dict[str, Any]:
        return {name: {"kind": task.kind, "reads": task.reads} for name, task in tasks.items()}

    @app.post("/classify/{name}")
    async def classify(name: str, request: Request) -> dict[str, Any]:
        task = find(name, "classification")
        async with turns.request() as clock:
            work = partial(classify_body, task, await read_body(request), limits)
            label, probabilities = await turns.take(request, clock, work)
        return {"label": label, "probabilities": probabilities}

    @app.post("/restore/{name}")
    async def restore(name: str, request: Request) -> Response:
        find(name, "restoration")
        async with turns.request() as clock:
            work = partial(restore_file, emr, name, await read_body(request), limits)
            return Response(await turns.take(request, clock, work), media_type="image/png")

    @app.post("/generate/{name}")
    async def generate(name: str, request: Request, max_tokens: int = 64, temperature: float = 0.0) -> dict[str, Any]:
        task = find(name, "generation")
        if not 1 <= max_tokens <= tokens or not 0 <= temperature <= 2:
            raise HTTPException(400, f"max_tokens must be from 1 to {tokens}, and temperature from 0 to 2")
        how = {"do_sample": True, "temperature": temperature} if temperature else {}
        async with turns.request() as clock:
            text, made, ended = (await read_body(request)).decode(), [], False
            prompt = (await turns.take(request, clock, partial(task.encode, text, max_tokens)))["input_ids"]
            while not ended and (count := min(TURN_TOKENS if task.in_turns else max_tokens, max_tokens - len(made))):
                new, ended = await turns.take(request, clock, partial(task.generate, prompt, [*made], count, **how))
                made += new
                if len(new) < count:
                    break
            return {"text": task.decode(made), "tokens": len(made), "ended": ended}

    return app


async def read_body(request: Request) -> bytes:
    """The body, of which no more than the limit is read."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BYTES:,} bytes")
    return bytes(data)


def classify_body(task: AnsweringTask, data: bytes, limits: Limits) -> Any:
    """The label and the probabilities of a request body."""
    read: Any = {"Image": limits.read_8_bits, "Sequence": bytes.decode}.get(task.reads, json.loads)
    return task.classify(read(data))


def restore_file(emr: EMRModel, name: str, data: bytes, limits: Limits) -> bytes:
    """A picture file restored by a task, as PNG."""
    picture = limits.read(data)
    with emr.task(name) as model:
        pixels = limits.restore(model, picture.pixels)
    return encode_frames(Frames([picture._replace(pixels=pixels)]), "PNG")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token-file", type=Path, help="what clients send; needed for a host that is not loopback")
    parser.add_argument("--allowed-host", action="append", default=[], help="a further name by which clients call it")
    parser.add_argument("--device")
    parser.add_argument("--megapixels", type=float, default=16.0, help="of a picture")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of memory for a request")
    parser.add_argument("--tokens", type=int, default=1024, help="of a text that is generated")
    parser.add_argument("--seconds", type=float, default=120.0, help="from a request's beginning to its end")
    words = parser.parse_args()
    if words.token_file is None and words.host not in OWN_NAMES:
        parser.error(f"--host {words.host} is not loopback: set --token-file")
    try:
        token = words.token_file.read_text().strip() if words.token_file else None
        access = Access(token, allowed_hosts=[*OWN_NAMES, words.host, *words.allowed_host])
        emr = EMRModel.from_pretrained(words.artifact, device=words.device)
        app = make_app(emr, access, Limits(words.megapixels, words.gigabytes, words.seconds), words.tokens)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    uvicorn.run(app, host=words.host, port=words.port)


if __name__ == "__main__":
    main()
