"""The explorer's server and the command that starts it, on a small stand-in for the built page."""

import http.client
import re
import socket
import struct
import subprocess
import sys
import threading
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

import linvit
from linvit.explorer import serving
from linvit_cli import main


@pytest.fixture
def built(tmp_path, monkeypatch):
    folder = tmp_path / "built"
    (folder / "runtime").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>page</title>")
    (folder / "app.js").write_text("export const answer = 42;")
    (folder / "runtime" / "ort.mjs").write_text("export {};")
    (folder / "runtime" / "ort.wasm").write_bytes(b"\0asm")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    monkeypatch.setattr(serving, "INSTALLED", folder)
    return folder


@pytest.fixture
def opened(monkeypatch):
    addresses = []
    monkeypatch.setattr(serving.webbrowser, "open", lambda address: addresses.append(address) or True)
    return addresses


def status(explorer, path, host="127.0.0.1:80"):
    """The status of a request whose path and host are sent as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", int(explorer.address.rsplit(":")[-1].strip("/")))
    connection.putrequest("GET", path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    return connection.getresponse().status


def test_a_page_that_is_closed_while_it_loads_is_no_error(built, opened, capfd, monkeypatch):
    (built / "runtime" / "ort.wasm").write_bytes(bytes(1 << 25))
    with linvit.explore() as explorer:
        server, ended = explorer._server, threading.Event()
        end = server.shutdown_request
        monkeypatch.setattr(server, "shutdown_request", lambda request: (end(request), ended.set()))
        with socket.create_connection(("127.0.0.1", server.server_port)) as browser:
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
            browser.sendall(b"GET /runtime/ort.wasm HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert browser.recv(15) == b"HTTP/1.0 200 OK"
        assert ended.wait(30)
    assert capfd.readouterr().err == ""


def test_explore_serves_the_page_in_one_call_and_opens_the_browser(built, opened):
    with linvit.explore() as explorer:
        assert opened == [explorer.address]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", explorer.address)
        with urlopen(explorer.address) as response:
            assert response.read() == (built / "index.html").read_bytes()
            assert response.headers["Content-Type"] == "text/html; charset=utf-8"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
    with pytest.raises(OSError, match="refused"):
        urlopen(explorer.address)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("app.js", "text/javascript; charset=utf-8"),
        ("runtime/ort.mjs", "text/javascript; charset=utf-8"),
        ("runtime/ort.wasm", "application/wasm"),
    ],
)
def test_browsers_get_the_types_that_modules_and_webassembly_need(built, name, expected):
    with linvit.explore(browser=False) as explorer, urlopen(explorer.address + name) as response:
        assert response.headers["Content-Type"] == expected


@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "//etc/passwd", "/link.txt", "/runtime/", "/no"],
)
def test_nothing_outside_the_folder_is_served_and_nothing_is_listed(built, path):
    with linvit.explore(browser=False) as explorer:
        assert status(explorer, path) == 404
        assert status(explorer, "/app.js") == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost:9000", 200),
        ("LocalHost", 200),
        ("127.0.0.1", 200),
        ("evil.example:8000", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost:80:evil", 421),
        ("", 421),
        (None, 421),
    ],
)
def test_only_this_machine_s_names_are_answered(built, host, expected):
    """A page of another name that is made to lead here (DNS rebinding) reads nothing."""
    with linvit.explore(browser=False) as explorer:
        assert status(explorer, "/app.js", host) == expected


def test_the_page_can_only_be_read(built):
    with linvit.explore(browser=False) as explorer, pytest.raises(HTTPError, match="501"):
        urlopen(explorer.address, data=b"x")


def test_a_port_in_use_is_one_sentence(built, capsys):
    with linvit.explore(browser=False) as explorer:
        port = explorer.address.rsplit(":")[-1].strip("/")
        assert main(["explore", "--no-browser", "--port", port]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"linvit: --port {port} cannot be used (Address already in use): choose another")
    assert message.count("\n") == 1


@pytest.mark.parametrize("port", [-1, 65536, 1.5, True, "80"])
def test_a_port_that_is_none_is_refused(built, port):
    with pytest.raises(ValueError, match=r"`port` is .*, expected a whole number from 0"):
        linvit.explore(port=port, browser=False)


def test_without_a_build_one_sentence_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serving, "INSTALLED", tmp_path / "none")
    monkeypatch.setattr(serving, "BUILT", tmp_path / "none")
    assert main(["explore"]) == 2
    assert main(["explore", "--write", str(tmp_path / "site")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    assert first.startswith("linvit: The explorer is not in this installation: install a released wheel")
    assert not (tmp_path / "site").exists()


def test_write_copies_the_page_into_a_new_or_empty_folder(built, tmp_path, capsys):
    target = tmp_path / "site" / "explorer"
    assert main(["explore", "--write", str(target)]) == 0
    assert capsys.readouterr().out == f"Page: {target / 'index.html'}\n"
    assert (target / "runtime" / "ort.wasm").read_bytes() == b"\0asm"
    assert [path.name for path in target.parent.iterdir()] == ["explorer"]
    assert main(["explore", "--write", str(target)]) == 2
    assert "is not an empty folder: choose another one" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["explore", "--write", str(tmp_path / "empty")]) == 0
    assert main(["explore", "--write", str(tmp_path / "new"), "--port", "1"]) == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("opens", [True, False])
def test_without_a_browser_one_sentence_says_so(built, monkeypatch, capsys, opens):
    monkeypatch.setattr(serving.webbrowser, "open", lambda address: opens)
    monkeypatch.setattr(serving.Explorer, "wait", lambda self: None)
    assert main(["explore"]) == 0
    assert ("No browser could be opened here" in capsys.readouterr().out) is not opens


def test_the_command_prints_the_address_and_needs_no_torch(built):
    code = (
        "import sys; from pathlib import Path; sys.modules['torch'] = None; from linvit_cli import main;"
        f"from linvit.explorer import serving; serving.INSTALLED = Path({str(built)!r});"
        "serving.Explorer.wait = lambda self: None; sys.exit(main(['explore', '--no-browser']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"Explorer: http://127\.0\.0\.1:\d+/ \(stop with Ctrl\+C\)\n", done.stdout)
