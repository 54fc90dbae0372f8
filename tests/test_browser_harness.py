import asyncio

import pytest

from browser import Log, is_allowed, open_text

HEAD = "<!DOCTYPE html><title>a page</title>"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("<script>throw new Error('boo')</script>", "boo"),
        ("<script>console.error('boo')</script>", "boo"),
        ("<img src='beside.png'>", "beside.png"),
        ("<img src='http://203.0.113.1/x.png'>", "203.0.113.1"),
        ("<link rel='stylesheet' href='//example.com/x.css'>", "example.com"),
    ],
)
def test_a_page_that_errs_or_needs_a_network_is_complained_about(chromium, tmp_path, body, word):
    log = Log()
    context = chromium.open_context()
    log.listen(context)
    open_text(context.new_page(), HEAD + body, tmp_path)
    chromium.close_context(context)
    assert any(word in complaint for complaint in log.complaints)


def test_a_quiet_page_is_not_complained_about_and_what_belongs_to_the_test_is_excused(
    browser_page, browser_log, tmp_path
):
    browser_log.excuse("expected")
    open_text(browser_page, HEAD + "<p>x<script>console.error('expected')</script>", tmp_path)
    assert browser_log.errors
    assert not browser_log.complaints


def test_other_tests_of_the_process_can_run_a_loop_of_their_own(chromium):
    async def one():
        return 1

    assert asyncio.run(one()) == 1


@pytest.mark.parametrize(
    ("url", "is_document", "allowed"),
    [
        ("file:///tmp/page.html", True, True),
        ("file:///tmp/other.json", False, False),
        ("data:text/plain,x", False, True),
        ("http://127.0.0.1:8642/state", False, True),
        ("http://127.0.0.1.example.com/", True, False),
        ("http://localhost/", True, False),
        ("https://example.com/", True, False),
    ],
)
def test_a_page_may_fetch_only_itself_and_this_machine(url, is_document, allowed):
    assert is_allowed(url, is_document=is_document) is allowed


def test_without_a_browser_the_test_is_left_out_but_not_in_ci(monkeypatch):
    import browser

    monkeypatch.setattr(browser, "_PROGRAMS", ("no-such-browser",))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="Chromium is missing"):
        browser.Chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="in CI nothing is left out"):
        browser.Chromium()
