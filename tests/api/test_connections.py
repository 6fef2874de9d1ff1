"""Clients that disconnect, stall, or send malformed requests: real sockets, a real server."""

import http.client
import json
import socket

import psutil
import pytest

from tests.api.raw_client import LONG_ANSWER, RawClient, chat_body
from tests.server import ServerProcess


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages(fake_server: ServerProcess, stream: bool) -> None:
    fake_server.wait_idle()
    with RawClient(fake_server) as client:
        client.post(LONG_ANSWER | {"stream": stream, "n": 2})
        fake_server.wait_running(2)
        assert fake_server.metric("oscine:full_pages_used") > 0
    fake_server.wait_idle()


def test_a_client_that_goes_away_in_mid_stream(fake_server: ServerProcess) -> None:
    with RawClient(fake_server) as client:
        client.post(LONG_ANSWER | {"stream": True})
        client.read_until(b'"content":"O"')
    fake_server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_ends_its_sending_side_gets_its_answer(fake_server: ServerProcess, stream: bool) -> None:
    with RawClient(fake_server) as client:
        client.post(chat_body(stream=stream, max_tokens=100, ignore_eos=True))
        client.socket.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(client.socket)
        answer.begin()
        assert answer.status == 200
        assert answer.read().endswith(b"data: [DONE]\n\n" if stream else b"}")
    fake_server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_ends_its_sending_side_and_then_leaves_frees_its_pages(
    fake_server: ServerProcess, stream: bool
) -> None:
    with RawClient(fake_server) as client:
        client.post(LONG_ANSWER | {"stream": stream})
        fake_server.wait_running(1)
        client.socket.shutdown(socket.SHUT_WR)
    fake_server.wait_idle()


def test_a_client_that_does_not_read_holds_up_nobody(fake_server: ServerProcess) -> None:
    with RawClient(fake_server, receive_buffer=4096) as idle, RawClient(fake_server) as other:
        idle.post(LONG_ANSWER | {"stream": True})
        fake_server.wait_running(1)
        other.post(chat_body())
        assert other.status() == 200
    fake_server.wait_idle()


def test_a_body_that_comes_slowly_is_waited_for(fake_server: ServerProcess) -> None:
    with RawClient(fake_server) as slow, RawClient(fake_server) as quick:
        slow.head("Transfer-Encoding: chunked")
        slow.chunk(b'{"messages": [{"role": "user",')
        quick.post(chat_body())
        assert quick.status() == 200
        slow.chunk(b' "content": "hi"}]}')
        slow.socket.sendall(b"0\r\n\r\n")
        assert slow.status() == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/detokenize"])
def test_a_client_that_leaves_within_its_body(fake_server: ServerProcess, path: str) -> None:
    with RawClient(fake_server) as client:
        client.head("Content-Length: 1000", path=path)
        client.socket.sendall(b'{"messages": ')
    fake_server.wait_idle()
    assert fake_server.get("/v1/health/ready")
    assert 'status="500"' not in fake_server.get("/metrics")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00 this is TLS\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: minus\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
    ids=["tls", "length", "both lengths", "version"],
)
def test_what_is_no_request_gets_400(fake_server: ServerProcess, data: bytes) -> None:
    with RawClient(fake_server) as client:
        client.socket.sendall(data)
        assert client.status() == 400
    assert fake_server.get("/v1/health/ready")


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_request_error"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000, 431, "head_too_large"),
    ],
)
def test_what_is_refused_is_counted(fake_server: ServerProcess, data: bytes, status: int, code: str) -> None:
    responses = f'oscine:http_responses_total{{path="other",status="{status}"}}'
    errors = f'oscine:request_errors_total{{code="{code}",path="other"}}'

    def count(name: str) -> float:
        found = [line for line in fake_server.get("/metrics").splitlines() if line.startswith(name)]
        return float(found[0].split()[-1]) if found else 0.0

    before = count(responses), count(errors)
    with RawClient(fake_server) as client:
        client.socket.sendall(data)
        assert client.status() == status
    assert (count(responses), count(errors)) == (before[0] + 1, before[1] + 1)


def test_pipelined_requests_are_answered_in_order(fake_server: ServerProcess) -> None:
    with RawClient(fake_server) as client:
        client.post(chat_body(max_tokens=100))
        client.post(chat_body(max_tokens=101), "Connection: close")
        answers = client.read_to_end()
    assert answers.index(b'"completion_tokens":100,') < answers.index(b'"completion_tokens":101,')


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"\0 is no request\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000, 431),
    ],
)
@pytest.mark.parametrize("ends", [False, True])
def test_whole_requests_before_bad_bytes_are_answered(
    fake_server: ServerProcess, bad: bytes, status: int, *, ends: bool
) -> None:
    body = json.dumps(chat_body(max_tokens=20)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    good = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with RawClient(fake_server) as client:
        client.socket.sendall(good + good + bad)
        if ends:
            client.socket.shutdown(socket.SHUT_WR)
        answers = client.read_to_end()
    parts = [part for part in answers.split(b"HTTP/1.1 ")[1:] if not part.startswith(b"100 ")]
    assert [int(part.split()[0]) for part in parts] == [200, 200, status]
    assert [b'"choices":' in part for part in parts] == [True, True, False]


@pytest.mark.parametrize("kind", ["trailers", "one trailer", "chunk extension"])
def test_what_is_neither_head_nor_body_has_a_bound(fake_server: ServerProcess, kind: str) -> None:
    begin, more = {
        "trailers": (b"0\r\n", b"X-Header: a value\r\n" * 3000),
        "one trailer": (b"0\r\nX: ", b"y" * 60_000),
        "chunk extension": (b"1;", b"y" * 60_000),
    }[kind]
    memory = psutil.Process(fake_server.pid).memory_info
    before = memory().rss
    with RawClient(fake_server) as client:
        client.head("Transfer-Encoding: chunked")
        with pytest.raises(ConnectionError):  # noqa: PT012  (how many it takes is up to buffers)
            client.socket.sendall(begin)
            for _ in range(2000):
                client.socket.sendall(more)
    assert memory().rss - before < 32 << 20


def test_chunks_of_one_byte_are_a_body(fake_server: ServerProcess) -> None:
    with RawClient(fake_server) as client:
        client.head("Transfer-Encoding: chunked", path="/tokenize")
        body = b'{"prompt": "%s"}' % (b"a" * 60_000)
        client.socket.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\nX: y\r\n\r\n")
        assert client.status() == 200


def test_a_trailer_is_no_header(fake_server: ServerProcess) -> None:
    with RawClient(fake_server) as client:
        end = b"3\r\n{}\n\r\n0\r\nX-Request-Id: of-the-trailer\r\nConnection: close\r\n\r\n"
        fields = b"Host: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
        client.socket.sendall(b"POST /tokenize HTTP/1.1\r\nConnection: close\r\n" + fields + b"\r\n\r\n" + end)
        answer = client.read_to_end()
    assert b"x-request-id: " in answer
    assert b"of-the-trailer" not in answer
