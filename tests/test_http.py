"""Calls by HTTP over connections that are kept for the next call, against real servers in threads."""

import os
import socket
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Thread

import pytest

from reshard.comm import http
from reshard.comm.background import in_background
from reshard.comm.http import RefusedError, call_route
from reshard.core.errors import ReshardError


class Handler(BaseHTTPRequestHandler):
    """Answers with the port that the caller came from, and what it asked for."""

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.behave(self)
        self.answer(f'{{"port": {self.client_address[1]}, "asked": {asked}, "path": "{self.path}"}}')

    def do_GET(self):
        self.server.behave(self)
        self.answer(f'{{"port": {self.client_address[1]}, "path": "{self.path}"}}')

    def answer(self, text: str, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(text))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@contextmanager
def serving(behave=lambda handler: None, host: str = "127.0.0.1"):
    """The address of a server that first does this in each call."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    with Server((host, 0), Handler) as server:
        server.behave = behave
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield (
            f"http://[{host}]:{server.server_port}" if ":" in host else f"http://{host}:{server.server_port}"
        )
        server.shutdown()


@pytest.fixture(autouse=True)
def environment_without_proxies(monkeypatch):
    """Each test begins as a process does: no connection is kept, and proxies are looked up anew."""
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)
    http._proxies.cache_clear()
    http._kept.clear()
    yield
    http._proxies.cache_clear()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_calls_that_follow_each_other_share_a_connection_and_later_ones_do_not(host, monkeypatch):
    with serving(host=host) as url, serving() as other:
        ports = [call_route(url, "one", {"n": n})["port"] for n in range(3)]
        call_route(other, "one")
        ports.append(call_route(url, "one")["port"])
        assert len(set(ports)) == 1
        monkeypatch.setattr(http, "KEPT_SECONDS", 0.0)
        assert call_route(url, "one", {})["port"] != ports[0], "the server may be about to close it"


def test_a_connection_that_the_server_has_closed_is_not_used():
    def hang_up(handler):
        handler.connection.settimeout(0.05)  # in which no other request comes

    with serving(hang_up) as url:
        first = call_route(url, "one", {})["port"]
        time.sleep(0.2)
        assert call_route(url, "two", {})["port"] != first


def test_a_refusal_is_told_with_its_code_and_the_next_call_goes_on():
    def refuse(handler):
        if handler.path == "/no":
            handler.answer("x" * 9000, 503)
            raise ConnectionAbortedError  # nothing else is answered

    with serving(refuse) as url:
        call_route(url, "one", {})
        with pytest.raises(RefusedError, match="answers /no with 503: x{300}$") as refused:
            call_route(url, "no", {})
        assert refused.value.code == 503 and call_route(url, "two", {})["path"] == "/two"


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_calls():
    def be_late(handler):
        if handler.path == "/late":
            time.sleep(0.3)

    with serving(be_late) as url:
        call_route(url, "one", {})
        with pytest.raises(ReshardError, match="does not answer /late \\(timed out\\)"):
            call_route(url, "late", {}, timeout=0.1)
        assert call_route(url, "two", {})["path"] == "/two"
        call_route(url, "late", {}, timeout=2.0)  # the time limit is that of this call, not of the one before


def test_calls_at_the_same_time_have_connections_of_their_own():
    both = Barrier(2, timeout=10)
    with serving(lambda handler: handler.path == "/first" or both.wait()) as url:
        call_route(url, "first", {})
        calls = [in_background(lambda n=n: call_route(url, "both", {"n": n})) for n in range(2)]
        answers = [call.result(10) for call in calls]
    assert [answer["asked"]["n"] for answer in answers] == [0, 1]
    assert answers[0]["port"] != answers[1]["port"]


def test_a_forked_process_leaves_its_parents_connections_alone():
    with serving() as url:
        first = call_route(url, "one", {})["port"]
        if (child := os.fork()) == 0:
            os._exit(int(bool(http._kept)))
        assert os.waitpid(child, 0)[1] == 0, "the child has none"
        assert call_route(url, "two", {})["port"] == first, "and has not closed the parent's"


def test_what_goes_by_a_proxy_of_the_environment_still_does(monkeypatch):
    with serving() as proxy, serving() as url:
        monkeypatch.setenv("http_proxy", proxy)
        assert call_route(url, "one", {})["path"] == f"{url}/one", "as a proxy is asked"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert call_route(url, "one", {})["path"] == "/one"


def test_a_redirection_is_followed():
    def redirect(handler):
        if handler.path == "/old":
            handler.answer("", 302, Location="/new")
            raise ConnectionAbortedError

    with serving(redirect) as url:
        assert call_route(url, "old")["path"] == "/new"
