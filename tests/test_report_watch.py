import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sortedrl.report.watch as pages_module
from sortedrl.cli.watch import Arguments
from sortedrl.core.events import from_json, read_events
from sortedrl.core.files import read_lines
from sortedrl.errors import ConfigError, DataError
from sortedrl.report.html import head_value, page
from sortedrl.report.record import read_run
from sortedrl.report.watch import (
    USUAL_PORT,
    FollowedRun,
    Pages,
    Tail,
    decoded,
    file_inside,
    followed,
    open_server,
)
from watched_runs import ask, first_updates, log_of, served, until, whole_log, write_run

LINES = log_of(preset="picture")[:120]
OTHERS = log_of(preset="picture", seed=1)[:120]


@settings(max_examples=40)
@given(st.lists(st.integers(0, len(b"".join(LINES))), max_size=6))
def test_a_log_that_grows_by_pieces_is_read_as_far_as_its_lines_are_whole(
    tmp_path_factory, lengths
):
    path = tmp_path_factory.mktemp("tail") / "events.jsonl"
    path.touch()
    tail = Tail(path)
    for length in sorted(lengths):
        path.write_bytes(b"".join(LINES)[:length])
        assert tail.look() == [from_json(line) for _, line in read_lines(path)]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, len(LINES)), st.integers(0, len(OTHERS)), st.integers(0, 99)),
        min_size=2,
        max_size=5,
    )
)
def test_a_log_that_was_cut_and_written_on_is_read_as_it_is_now(tmp_path_factory, versions):
    path = tmp_path_factory.mktemp("tail") / "events.jsonl"
    path.touch()
    tail = Tail(path)
    for kept, until_line, torn in versions:
        path.write_bytes(b"".join(LINES[:kept] + OTHERS[kept:until_line]) + b"x" * torn)
        assert tail.look() == [from_json(line) for _, line in read_lines(path)]


def test_lines_that_were_read_are_not_read_again(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(LINES[:9]))
    tail = Tail(path)
    first = list(tail.look())
    path.write_bytes(b"".join(LINES))
    later = tail.look()
    assert all(one is other for one, other in zip(first, later, strict=False))
    assert tail.kept == path.stat().st_size


@pytest.mark.parametrize("bad", [b"{}\n", b"[1]\n", b"\xff\n", b'{"event":"begin"}\n', b"\n"])
def test_a_line_that_holds_no_event_is_named_and_read_anew_once_it_is_mended(tmp_path, bad):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(LINES[:3]) + bad + b"".join(LINES[3:]))
    tail = Tail(path)
    for _ in range(2):
        with pytest.raises(DataError, match=r"events\.jsonl:4: "):
            tail.look()
    path.write_bytes(b"".join(LINES))
    assert tail.look() == list(read_events(path))


def test_a_run_is_waited_for_until_its_log_opens_and_then_followed(tmp_path):
    folder = tmp_path / "runs" / "mine"
    run = FollowedRun(folder, name="mine")
    assert run.look()
    assert run.note == f"{folder} does not exist yet; waiting for the run to start"
    assert not run.look()
    folder.mkdir(parents=True)
    assert run.look()
    assert run.note == "waiting for the run's first update"
    write_run(folder, LINES[0][:20])
    assert run.look()
    assert run.record is None
    write_run(folder, first_updates(1))
    assert run.look()
    assert run.note is None
    assert run.record == read_run(folder, name="mine")
    assert not run.is_ended
    assert not run.look()
    write_run(folder, whole_log())
    assert run.look()
    assert run.is_ended


def test_every_file_of_the_run_is_followed(tmp_path):
    run = FollowedRun(write_run(tmp_path / "mine", first_updates(1)), name="mine")
    run.look()
    (tmp_path / "mine" / "config.toml").write_text("seed = 3\n")
    (tmp_path / "mine" / "metrics.jsonl").write_text('{"update":1,"reward/mean":0.5}\n{"upd')
    (tmp_path / "mine" / "answers.jsonl").write_text('{"torn')
    assert run.look()
    assert run.record == read_run(tmp_path / "mine")
    assert run.record.config == {"seed": 3}
    assert len(run.record.rows) == 1


def test_a_file_that_cannot_be_read_leaves_the_record_and_is_told(tmp_path):
    run = FollowedRun(write_run(tmp_path / "mine", first_updates(1)), name="mine")
    run.look()
    kept = run.record
    (tmp_path / "mine" / "metrics.jsonl").write_text("[]\n")
    assert run.look()
    assert run.record is kept
    assert "metrics.jsonl:1: expected a JSON object" in run.note
    assert not run.look()
    (tmp_path / "mine" / "metrics.jsonl").unlink()
    assert run.look()
    assert run.note is None


def test_a_log_that_does_not_open_with_begin_is_told(tmp_path):
    run = FollowedRun(write_run(tmp_path / "mine", b"".join(LINES[1:5])), name="mine")
    run.look()
    assert run.record is None
    assert "a log must start with 'begin'" in run.note


def test_a_bare_log_can_be_followed(tmp_path):
    log = write_run(tmp_path / "mine", whole_log()) / "events.jsonl"
    (run,) = followed([log])
    run.look()
    assert (run.record.name, run.record.events) == ("mine", read_run(log).events)


def test_runs_that_are_called_alike_get_names_of_their_own(tmp_path):
    paths = [tmp_path / "a" / "sorted", tmp_path / "b" / "sorted", tmp_path / "sync"]
    assert [run.name for run in followed(paths)] == ["a/sorted", "b/sorted", "sync"]
    with pytest.raises(ConfigError, match="twice"):
        followed([paths[0]] * 2)


@pytest.fixture
def folder(tmp_path):
    """A run's folder with some of everything, and secrets beside it."""
    folder = write_run(tmp_path / "mine", first_updates(1))
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "mine-too").mkdir()
    (tmp_path / "mine-too" / "secret.txt").write_text("secret")
    (folder / "model").mkdir()
    (folder / "model" / "weights.bin").write_bytes(bytes(range(256)) * 1000)
    (folder / "a b.txt").write_text("spaces")
    (folder / ".env").write_text("secret")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.txt").write_text("secret")
    (folder / "page.html").write_text("<script>alert(1)</script>")
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "above").symlink_to(tmp_path)
    (folder / "to-hidden.txt").symlink_to(folder / ".env")
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "log.txt").symlink_to(folder / "events.jsonl")
    os.mkfifo(folder / "pipe")
    return folder


GOOD = ["events.jsonl", "model/weights.bin", "a%20b.txt", "page.html", "log.txt"]
OUTSIDE = [
    "",
    ".",
    "..",
    "../secret.txt",
    "%2e%2e/secret.txt",
    "%2E%2E%2Fsecret.txt",
    "..%2fsecret.txt",
    "%252e%252e/secret.txt",
    "model/../../secret.txt",
    "model/../events.jsonl",
    "model/./weights.bin",
    "model//weights.bin",
    "model",
    "model/",
    "events.jsonl/",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "//etc/passwd",
    "..\\secret.txt",
    "..%5csecret.txt",
    "model%5cweights.bin",
    "C:%5cWindows",
    "events.jsonl%00",
    "%00",
    "events.jsonl%00.txt",
    "%ff%fe",
    "%c0%ae%c0%ae/secret.txt",
    "out.txt",
    "above/secret.txt",
    "../mine-too/secret.txt",
    ".env",
    "%2eenv",
    ".hidden/x.txt",
    "to-hidden.txt",
    "circle",
    "pipe",
    "nothing.txt",
    "x" * 5000,
    "x/" * 500,
]


def test_the_runs_own_plain_files_are_handed_out_to_be_saved(folder):
    with served(folder) as server:
        for path in GOOD:
            status, headers, body = ask(server, f"/files/mine/{path}")
            assert status == 200
            assert (
                body
                == file_inside(folder, [decoded(part) for part in path.split("/")]).read_bytes()
            )
            assert headers["Content-Disposition"].startswith("attachment;")
            assert headers["Content-Type"] in (
                "text/plain; charset=utf-8",
                "application/octet-stream",
            )
            assert "sandbox" in headers["Content-Security-Policy"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_outside_the_folder_and_nothing_hidden_is_handed_out(folder, path):
    with served(folder) as server:
        status, _, body = ask(server, f"/files/mine/{path}")
        assert status == 404
        assert body == b"Not Found\n"


def test_every_odd_address_is_refused(folder):
    told = []
    with served(folder, told=told) as server:
        for path in (
            "/files",
            "/files/",
            "/files/mine",
            "/files/other/events.jsonl",
            "/files//events.jsonl",
            "/files/../mine/events.jsonl",
            "/etc/passwd",
            "/index.html",
            "/favicon.ico",
            "*",
            "http://example.com/",
            "/%2e%2e/",
            "/state/",
        ):
            assert ask(server, path)[0] == 404, path
    assert not told


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from(
            ["..", ".", "above", "model", "mine", "secret.txt", "out.txt", "events.jsonl"]
        )
        | st.text(max_size=3),
        max_size=5,
    )
)
def test_no_path_leads_out_of_the_folder(tmp_path_factory, parts):
    world = tmp_path_factory.mktemp("world")
    folder = write_run(world / "mine", b"")
    (world / "secret.txt").write_text("secret")
    (folder / "above").symlink_to(world)
    (folder / "out.txt").symlink_to(world / "secret.txt")
    found = file_inside(folder, parts)
    assert found is None or parts == ["events.jsonl"]


def test_a_log_can_be_saved_while_it_grows(tmp_path):
    folder = write_run(tmp_path / "mine", whole_log())
    with served(folder) as server:
        assert ask(server, "/files/mine/events.jsonl")[2] == whole_log()
        write_run(folder, whole_log() * 2)
        assert ask(server, "/files/mine/events.jsonl")[2] == whole_log() * 2


def test_runs_with_odd_names_are_served_under_them(tmp_path):
    folder = write_run(tmp_path / 'a <b> "c" ä', first_updates(1))
    with served(folder) as server:
        assert ask(server, "/files/a%20%3Cb%3E%20%22c%22%20%C3%A4/events.jsonl")[0] == 200
        assert "a &lt;b&gt; &quot;c&quot; ä" in ask(server, "/")[2].decode()


def test_the_page_and_its_state_tell_of_the_same_version(folder):
    with served(folder) as server:
        status, headers, body = ask(server, "/")
        assert status == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        state = json.loads(ask(server, "/state")[2])
        assert state == {
            "version": head_value(body.decode(), "sortedrl-version"),
            "runs": 1,
            "ended": False,
            "seconds": read_run(folder).events[-1].seconds,
            "written": pytest.approx((folder / "events.jsonl").stat().st_mtime),
            "notes": [],
        }
        policy = head_value(body.decode(), "Content-Security-Policy")
        assert "connect-src 'self'" in policy
        assert headers["Content-Security-Policy"] == f"{policy}; frame-ancestors 'none'"
        write_run(folder, whole_log())
        ended = until(lambda: (now := json.loads(ask(server, "/state")[2]))["ended"] and now)
        assert ended["version"] != state["version"]


@pytest.mark.parametrize("path", ["/", "/state", "/files/mine/events.jsonl", "/nothing"])
def test_every_answer_is_guarded_and_head_is_get_without_its_body(folder, path):
    with served(folder) as server:
        ask(server, "/")
        status, headers, body = ask(server, path)
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Server"] == "sortedrl"
        assert int(headers["Content-Length"]) == len(body)
        head = ask(server, path, method="HEAD")
        assert (head[0], head[2]) == (status, b"")
        assert head[1]["Content-Length"] == headers["Content-Length"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "X"])
def test_only_get_and_head_are_answered(folder, method):
    with served(folder) as server:
        status, headers, _ = ask(server, "/state", method=method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "host",
    [
        ["example.com"],
        ["example.com:8642"],
        ["127.0.0.1.example.com"],
        ["localhost.example.com"],
        ["127.0.0.1@example.com"],
        ["127.0.0.1:8642:1"],
        ["127.0.0.1:x"],
        ["10.0.0.1"],
        [""],
        [],
        ["localhost", "example.com"],
    ],
)
def test_on_loopback_a_request_for_another_name_is_refused(folder, host):
    with served(folder) as server:
        for path in ("/", "/state", "/files/mine/events.jsonl", "/nothing"):
            status, _, body = ask(server, path, host=host)
            assert (status, body) == (421, b"Misdirected Request\n")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8642", "[::1]:80"])
def test_on_loopback_every_name_of_this_machine_is_answered(folder, host):
    with served(folder) as server:
        assert ask(server, "/state", host=[host])[0] == 200


def test_elsewhere_any_name_is_answered_and_the_address_is_told(folder):
    with served(folder, host="0.0.0.0") as server:
        assert not server.is_loopback
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"
        assert ask(server, "/state", host=["training-box:1"])[0] == 200


def test_it_listens_on_this_machine_alone_unless_told():
    assert Arguments(runs=()).host == "127.0.0.1"
    assert Arguments(runs=()).port is None


def test_what_is_no_request_gets_a_short_answer(folder):
    told = []
    with served(folder, told=told) as server:
        for sent in (
            b"\r\n\r\n",
            b"nonsense\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\xff\x00\r\n\r\n",
        ):
            with closing(socket.create_connection(server.server_address)) as line:
                line.sendall(sent)
                line.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda line=line: line.recv(4096), b""))
                assert b"Traceback" not in answer
        assert ask(server, "/state")[0] == 200


def test_a_request_that_breaks_is_told_in_one_line_and_the_next_is_answered(folder, monkeypatch):
    told = []
    with served(folder, told=told) as server:
        with monkeypatch.context() as patch:
            patch.setattr(server, "folders", None)
            with pytest.raises(ConnectionError):
                ask(server, "/files/mine/events.jsonl")
        assert ask(server, "/files/mine/events.jsonl")[0] == 200
    assert len(told) == 1
    assert told[0].startswith("a request failed (AttributeError: ")
    assert "\n" not in told[0]


def test_a_browser_that_goes_away_is_no_news(folder):
    told = []
    (folder / "large.bin").write_bytes(bytes(30_000_000))
    with served(folder, told=told) as server:
        threads = threading.active_count()
        with closing(socket.create_connection(server.server_address)) as line:
            line.sendall(b"GET /files/mine/large.bin HTTP/1.1\r\nHost: localhost\r\n\r\n")
            line.recv(100)
        assert ask(server, "/state")[0] == 200
        until(lambda: threading.active_count() <= threads)
    assert not told


def open_at(port):
    return open_server("127.0.0.1", port, pages=None, folders={}, tell=print)


def test_a_port_that_is_taken_is_refused_if_asked_for_and_passed_over_if_not():
    with open_at(None) as first, open_at(None) as second:
        assert first.server_address[1] >= USUAL_PORT
        assert second.server_address[1] > first.server_address[1]
        with pytest.raises(ConfigError, match="choose others with --host and --port"):
            open_at(first.server_address[1])


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(ConfigError, match=r"port must lie in 0\.\.65535"):
        open_at(port)


def test_a_host_that_is_not_this_machine_is_refused():
    for host in ("203.0.113.7", "no such host"):
        with pytest.raises(ConfigError, match="must listen on an address"):
            open_server(host, 0, pages=None, folders={}, tell=print)


def a_page(text, *, title="t"):
    return page(title=title, body=f"<main>{text}</main>", style="", script="", refresh_seconds=1)


@pytest.fixture
def made(monkeypatch):
    """The records that pages were made of, in place of real pages."""
    made = []

    def make(records, *, title, refresh_seconds):
        made.append(records)
        return a_page(str(len(made)))

    monkeypatch.setattr(pages_module, "runs_page", make)
    return made


def test_a_page_is_made_only_for_someone_who_looks_and_only_of_something_new(tmp_path, made):
    (run,) = followed([write_run(tmp_path / "mine", first_updates(1))])
    with closing(Pages([run], tell=print, refresh_seconds=0.01)) as pages:
        time.sleep(0.1)
        assert not made
        first = pages.newest(timeout_seconds=10)
        assert len(made) == 1
        time.sleep(0.1)
        assert len(made) == 1
        write_run(run.path, first_updates(2))
        until(lambda: pages.newest().version != first.version)
        assert len(made) == 2


def test_nobody_looking_nothing_is_made(tmp_path, made, monkeypatch):
    monkeypatch.setattr(pages_module, "WANTED_SECONDS", 0.1)
    (run,) = followed([write_run(tmp_path / "mine", first_updates(1))])
    with closing(Pages([run], tell=print, refresh_seconds=0.01)) as pages:
        until(lambda: pages.newest() and made)
        time.sleep(0.3)
        write_run(run.path, first_updates(2))
        time.sleep(0.3)
        assert len(made) == 1
        until(lambda: pages.newest() and len(made) == 2)


def test_the_state_never_waits_for_a_page(tmp_path, monkeypatch):
    go_on = threading.Event()

    def make(records, *, title, refresh_seconds):
        assert go_on.wait(20)
        return a_page("made at last")

    monkeypatch.setattr(pages_module, "runs_page", make)
    (run,) = followed([write_run(tmp_path / "mine", first_updates(1))])
    with closing(Pages([run], tell=print, refresh_seconds=0.01)) as pages:
        assert pages.newest().notes == ("the page is being built",)
        assert "the page is being built" in pages.newest(timeout_seconds=0.05).text
        go_on.set()
        assert "made at last" in pages.newest(timeout_seconds=20).text


def test_a_slow_page_is_made_for_at_most_a_fifth_of_the_time(tmp_path, monkeypatch):
    spans = []

    def make(records, *, title, refresh_seconds):
        started = time.monotonic()
        time.sleep(0.05)
        spans.append((started, time.monotonic()))
        return a_page(str(len(spans)))

    monkeypatch.setattr(pages_module, "runs_page", make)
    (run,) = followed([tmp_path / "mine"])
    with closing(Pages([run], tell=print, refresh_seconds=0.01)) as pages:
        number = 0
        while len(spans) < 4:
            number += 1
            write_run(run.path, first_updates(1) + b" " * number)
            pages.newest()
            time.sleep(0.01)
    for (start, end), (after, _) in pairwise(spans):
        assert after - start >= 5 * (end - start)


def test_a_page_that_cannot_be_made_is_told_and_the_old_one_stays(tmp_path, monkeypatch):
    told = []

    def make(records, *, title, refresh_seconds):
        if len(records[0].events) > good:
            raise ZeroDivisionError("by nothing")
        return a_page("good")

    (run,) = followed([tmp_path / "mine"])
    good = len(first_updates(1).splitlines())
    monkeypatch.setattr(pages_module, "runs_page", make)
    with closing(Pages([run], tell=told.append, refresh_seconds=0.01)) as pages:
        assert "does not exist yet" in pages.newest(timeout_seconds=10).text
        write_run(run.path, first_updates(2))
        broken = until(lambda: (now := pages.newest()).notes and told and now)
        assert "Nothing to show yet" in broken.text
        write_run(run.path, first_updates(1))
        until(lambda: "good" in pages.newest().text)
        write_run(run.path, first_updates(2))
        note = "the page could not be built (ZeroDivisionError: by nothing)"
        kept = until(lambda: (now := pages.newest()).notes == (note,) and now)
        assert "good" in kept.text
    assert set(told) == {note}


def test_runs_that_have_begun_are_shown_while_others_are_waited_for(tmp_path):
    one, other = write_run(tmp_path / "one", whole_log()), tmp_path / "other"
    with served(one, other) as server:
        assert "one" in ask(server, "/")[2].decode()
        state = json.loads(ask(server, "/state")[2])
        assert not state["ended"]
        assert state["notes"] == [
            f"other: {other} does not exist yet; waiting for the run to start"
        ]
        write_run(other, whole_log(strategy="sync"))
        until(lambda: json.loads(ask(server, "/state")[2])["ended"])
        text = ask(server, "/")[2].decode()
        assert "other" in text


def test_a_folder_that_is_not_there_yet_is_waited_for_by_a_page_that_asks_for_news(tmp_path):
    with served(tmp_path / "<mine>") as server:
        text = ask(server, "/")[2].decode()
        assert "&lt;mine&gt; does not exist yet" in text
        assert head_value(text, "sortedrl-refresh") == "0.05"
        before = json.loads(ask(server, "/state")[2])
        assert before["seconds"] is None
        write_run(tmp_path / "<mine>", first_updates(1))
        until(lambda: json.loads(ask(server, "/state")[2])["seconds"] is not None)
        assert "Nothing to show yet" not in ask(server, "/")[2].decode()


def test_a_resumed_run_whose_log_was_cut_is_shown_as_it_is(tmp_path):
    folder = write_run(tmp_path / "mine", whole_log(preset="picture"))
    with served(folder) as server:
        ask(server, "/")
        assert json.loads(ask(server, "/state")[2])["ended"]
        write_run(folder, first_updates(1, preset="picture") + b'{"event":"load","sec')
        cut = until(lambda: not (now := json.loads(ask(server, "/state")[2]))["ended"] and now)
        assert cut["seconds"] == list(read_events(folder / "events.jsonl"))[-1].seconds


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path):
    folder = write_run(tmp_path / "mine", first_updates(1))
    # Where the tests run in the background, Ctrl-C is ignored by all their children.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from sortedrl.cli.watch import run; run(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, str(folder), "--port", "0", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as command:
        try:
            url = json.loads(command.stdout.readline())["url"]
            assert url.startswith("http://127.0.0.1:")
            port = int(url.rstrip("/").rpartition(":")[2])
            with closing(socket.create_connection(("127.0.0.1", port))) as line:
                line.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
                assert line.recv(15) == b"HTTP/1.0 200 OK"
            command.send_signal(signal.SIGINT)
            _, errors = command.communicate(timeout=120)
        finally:
            command.kill()
    assert command.returncode == 0
    assert errors == f"watching {folder} at {url} (Ctrl-C stops it)\nstopped\n"
