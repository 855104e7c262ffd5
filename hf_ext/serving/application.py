"""The routes of `hf-ext emr serve`: OpenAI's of models, completions and chats, classify as of vLLM, and restore."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import queue
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from transformers import AsyncTextIteratorStreamer

from hf_ext.emr import EMRModel

from .tasks import ServedTask
from .worker import Job, Worker

# Of a request's body, and of the samples in it.
_MAX_BYTES = 64 * 2**20
_MAX_INPUTS = 256
# Of one continuation: nobody keeps the one thread for ever.
_MAX_TOKENS = 8192
_OWN_NAMES = (b"127.0.0.1", b"localhost", b"[::1]")
# Of all bodies that are read or wait for their answers; what is announced and does not come takes no room.
_MAX_TOGETHER = 2**30
# Seconds until the next part of a body has to come.
_PATIENCE = 60.0
# The first wrong item ends the check: a message for each of a million would fill the memory.
_MANY = Field(fail_fast=True)
# An empty one would end every answer before its first word.
_Stop = Annotated[str, Field(min_length=1)]


class _Body(BaseModel):
    """What is not known is refused, so that no option is ignored in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str


class ClassifyBody(_Body):
    """A text, a picture in base64 or a sound, or several."""

    input: (
        str
        | Annotated[list[float], _MANY]
        | Annotated[list[str], _MANY]
        | Annotated[list[Annotated[list[float], _MANY]], _MANY]
    )


class _GenerateBody(_Body):
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] = []
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool = False
    n: int = Field(1, ge=1, le=1)
    user: str | None = None


class CompletionBody(_GenerateBody):
    """A prompt to continue."""

    prompt: str
    max_tokens: int = Field(16, ge=1, le=_MAX_TOKENS)


class Message(BaseModel):
    """What somebody said."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: str


class ChatBody(_GenerateBody):
    """A conversation to answer."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_tokens: int = Field(256, ge=1, le=_MAX_TOKENS)


class _Gate:
    """Before the routes: the token or the name of the server, and no body without a length or over the limit."""

    def __init__(self, app: Any, token: str | None) -> None:
        self._app, self._token = app, token
        self._held = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(dict(scope["headers"]), scope["method"])):
            await _refuse(*refusal)(scope, receive, send)
            return
        held, more = 0, scope["type"] == "http" and scope["method"] == "POST"

        async def take() -> Any:
            nonlocal held, more
            message = await (_receive_soon(receive) if more else receive())
            size, more = len(message.get("body", b"")), more and message.get("more_body", False)
            if held + size > _MAX_BYTES:
                raise HTTPException(413, f"the body has more than {_MAX_BYTES:,} bytes")
            if self._held + size > _MAX_TOGETHER:
                raise HTTPException(503, "too many bytes are waiting; try again later")
            held, self._held = held + size, self._held + size
            return message

        try:
            await self._app(scope, take, send)
        finally:
            self._held -= held

    def _refusal(self, headers: dict[bytes, bytes], method: str) -> tuple[int, str] | None:
        sent = headers.get(b"authorization", b"")
        name = re.sub(rb":\d+$", b"", headers.get(b"host", b""))
        if self._token is None and (name not in _OWN_NAMES or b"origin" in headers):
            # A web page can let its own name lead here, and a browser would send it what this server says.
            own = b", ".join(_OWN_NAMES).decode()
            return 403, f"this server has no token, so it answers to {own} only, and to no web page (Origin)"
        if self._token is not None and not hmac.compare_digest(sent, f"Bearer {self._token}".encode()):
            return 401, "a token is needed: send it as `Authorization: Bearer TOKEN` (`api_key` of OpenAI's client)"
        length = headers.get(b"content-length", b"0")
        # With both headers the chunks count, and the length is ignored.
        if method == "POST" and (b"transfer-encoding" in headers or not length.isdigit()):
            return 411, "send the body with a Content-Length, not in chunks"
        if method == "POST" and int(length) > _MAX_BYTES:
            return 413, f"the body has {int(length):,} bytes; at most {_MAX_BYTES:,} are taken"
        return None


async def _receive_soon(receive: Any) -> Any:
    """The next part of a body, for which nobody waits for ever."""
    try:
        return await asyncio.wait_for(receive(), _PATIENCE)
    except TimeoutError:
        raise HTTPException(408, f"nothing of the body came for {_PATIENCE:g} s; send it again") from None


def _refuse(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


class _Service:
    """The routes and what they need."""

    def __init__(self, tasks: dict[str, ServedTask], worker: Worker) -> None:
        self._tasks, self._worker, self._made = tasks, worker, int(time.time())

    def find(self, name: str, kind: str) -> ServedTask:
        """The task that a request names."""
        if name not in self._tasks:
            known = ", ".join(self._tasks)
            raise HTTPException(
                404, f"there is no model {name!r:.100}; the models are the tasks of the merge: {known}"
            )
        task = self._tasks[name]
        if task.kind != kind:
            raise HTTPException(400, f"model {name!r} does {task.kind}, not {kind}; see /v1/models")
        return task

    async def answer(self, request: Request, jobs: Sequence[Job]) -> list[Any]:
        """Lets the worker answer, unless the client leaves before."""
        leaving = asyncio.create_task(_wait_until_left(request))
        try:
            answers = asyncio.gather(*(asyncio.wrap_future(self._worker.submit(job)) for job in jobs))
            both: list[asyncio.Future[Any]] = [answers, leaving]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                answers.cancel()
                raise HTTPException(499, "the client has left")
            return answers.result()
        except queue.Full:
            raise HTTPException(503, "too many requests are waiting; try again later") from None
        finally:
            leaving.cancel()
            for job in jobs:
                job.cancel()

    async def models(self) -> dict[str, Any]:
        """The tasks."""
        about = {"object": "model", "created": self._made, "owned_by": "hf-ext"}
        return {"object": "list", "data": [{"id": name, **about, "kind": t.kind} for name, t in self._tasks.items()]}

    async def classify(self, request: Request, body: ClassifyBody) -> dict[str, Any]:
        """Labels and their probabilities."""
        task = self.find(body.model, "classification")
        several = isinstance(body.input, list) and not (body.input and isinstance(body.input[0], float))
        given = body.input if isinstance(body.input, list) and several else [body.input]
        if not 0 < len(given) <= _MAX_INPUTS:
            raise HTTPException(400, f"`input` has {len(given)} samples; give 1 to {_MAX_INPUTS}")
        if task.reads == "Sequence":
            # Tokenizers are not for several threads.
            jobs = [task.classification_job(sample) for sample in given]
        else:
            jobs = [await run_in_threadpool(task.classification_job, sample) for sample in given]
        answers = [{"index": index} | answer for index, answer in enumerate(await self.answer(request, jobs))]
        return {**_head("classify", "list", body.model), "data": answers}

    async def complete(self, request: Request, body: CompletionBody) -> Any:
        """A continuation of a text."""
        task = self.find(body.model, "generation")
        return await self._generate(request, task, body, task.encode_prompt(body.prompt), body.max_tokens, chat=False)

    async def chat(self, request: Request, body: ChatBody) -> Any:
        """The next message of a conversation."""
        task = self.find(body.model, "generation")
        messages = [message.model_dump() for message in body.messages]
        return await self._generate(request, task, body, task.encode_prompt(messages), body.max_tokens, chat=True)

    async def _generate(
        self, request: Request, task: ServedTask, body: _GenerateBody, tokens: list[int], longest: int, chat: bool
    ) -> Any:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        if body.stream and stop:
            raise HTTPException(400, "`stop` does not go with `stream`; leave one out")
        options = {"temperature": body.temperature, "top_p": body.top_p, "stop": stop, "seed": body.seed}
        streamer = (
            AsyncTextIteratorStreamer(task.reader, skip_prompt=True, skip_special_tokens=True) if body.stream else None
        )
        job = task.generation_job(tokens, streamer, max_tokens=longest, **options)
        kind = "chat.completion" if chat else "text_completion"
        if streamer is None:
            (found,) = await self.answer(request, [job])
            text = {"message": {"role": "assistant", "content": found["text"]}} if chat else {"text": found["text"]}
            choice = {"index": 0, **text, "finish_reason": found["finish_reason"], "logprobs": None}
            prompt, made = found["prompt_tokens"], found["completion_tokens"]
            usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
            return {**_head("chatcmpl" if chat else "cmpl", kind, body.model), "choices": [choice], "usage": usage}
        head = _head("chatcmpl", f"{kind}.chunk", body.model) if chat else _head("cmpl", kind, body.model)
        job.answer.add_done_callback(lambda _: streamer.end())
        with contextlib.suppress(queue.Full):
            self._worker.submit(job)
            return _Stream(job, _events(job, streamer, head, chat))
        raise HTTPException(503, "too many requests are waiting; try again later")

    async def restore(self, request: Request, model: str) -> Response:
        """The body is a picture file; a PNG comes back."""
        task = self.find(model, "restoration")
        (data,) = await self.answer(request, [task.restoration_job(await request.body())])
        return Response(data, media_type="image/png")


def _head(name: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


async def _wait_until_left(request: Request) -> None:
    """Ends when the client is gone; the body has to be read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(StreamingResponse):
    """Events of a job, which goes when the client goes, before the first of them too."""

    def __init__(self, job: Job, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _events(
    job: Job, streamer: AsyncTextIteratorStreamer, head: dict[str, Any], chat: bool
) -> AsyncIterator[str]:
    """A continuation as server-sent events, piece by piece."""

    def event(text: str | None, why: str | None = None) -> str:
        piece: dict[str, Any] = {"delta": {} if text is None else {"content": text}} if chat else {"text": text or ""}
        choice = {"index": 0, **piece, "finish_reason": why, "logprobs": None}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    async for text in streamer:
        if text:
            yield event(text)
    try:
        yield event(None, (await asyncio.wrap_future(job.answer))["finish_reason"])
    except Exception as error:
        message = str(error) if isinstance(error, ValueError) else "the server failed; see its log"
        yield f"data: {json.dumps({'error': {'message': message, 'type': 'server_error'}})}\n\n"
    yield "data: [DONE]\n\n"


def load_application(
    artifact: str,
    *,
    names: Sequence[str] = (),
    base: str | None = None,
    endpoint: str | None = None,
    device: str | None = None,
    token: str | None = None,
    max_batch: int = 32,
    wait_ms: float = 5.0,
) -> tuple[FastAPI, dict[str, str]]:
    """
    Loads an artifact and makes an application of it; its worker runs until the application ends.

    Args:
        artifact (`str`): Folder, or `org/name[@revision]`.
        names (`Sequence[str]`, *optional*): The tasks to serve; all by default.
        base, endpoint, device (`str`, *optional*): As of [`EMRModel.from_pretrained`].
        token (`str`, *optional*): What clients have to send.
        max_batch (`int`, *optional*, defaults to 32): Samples in a batch.
        wait_ms (`float`, *optional*, defaults to 5): How long the first sample of a batch waits for others.

    Returns:
        `tuple[FastAPI, dict[str, str]]`: The application, and what each task does.

    Raises:
        ValueError: A task that is not there, or that cannot be served.
    """
    emr = EMRModel.from_pretrained(artifact, next(iter(names), None), base=base, endpoint=endpoint, device=device)
    tasks = {name: ServedTask(emr, name) for name in dict.fromkeys(names or emr.tasks)}
    app = _make_application(tasks, Worker(emr, max_batch, wait_ms / 1000), token)
    return app, {name: task.kind for name, task in tasks.items()}


def _make_application(tasks: dict[str, ServedTask], worker: Worker, token: str | None) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(worker.close)

    app = FastAPI(title="hf-ext", lifespan=lifespan, docs_url=None, redoc_url=None)
    service = _Service(tasks, worker)
    app.get("/v1/models")(service.models)
    app.post("/v1/classify", response_model=None)(service.classify)
    app.post("/v1/completions", response_model=None)(service.complete)
    app.post("/v1/chat/completions", response_model=None)(service.chat)
    app.post("/v1/restore", response_model=None)(service.restore)
    app.add_middleware(_Gate, token=token)

    @app.exception_handler(RequestValidationError)
    async def tell_invalid_body(_: Request, error: RequestValidationError) -> Response:
        found = {".".join(str(part) for part in item["loc"] if part != "body"): item["msg"] for item in error.errors()}
        return _refuse(400, "; ".join(f"{place or 'body'}: {message}" for place, message in found.items()))

    @app.exception_handler(HTTPException)
    async def tell_refusal(_: Request, error: HTTPException) -> Response:
        return _refuse(error.status_code, str(error.detail))

    @app.exception_handler(ValueError)
    async def tell_wrong_value(_: Request, error: ValueError) -> Response:
        return _refuse(400, str(error))

    @app.exception_handler(Exception)
    async def tell_failure(_: Request, error: Exception) -> Response:
        return _refuse(500, "the server failed; see its log")

    return app


def serve(app: FastAPI, host: str, port: int, token: str | None, announce: Callable[[str], None]) -> None:
    """Listens until Ctrl-C or SIGTERM, after telling the address."""
    try:
        (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise ValueError(f"cannot listen on host {host!r}: {error}") from error
    if token is None and not ipaddress.ip_address(address).is_loopback:
        raise ValueError(f"host {host!r} is not loopback: set a token, or listen on 127.0.0.1")
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
    with socket.create_server((str(address), port), family=family, backlog=2048) as listening:
        name = f"[{address}]" if family == socket.AF_INET6 else address
        announce(f"http://{name}:{listening.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listening])
