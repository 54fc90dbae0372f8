"""Where the published data sets lie, a world for training runs, and a real browser."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def published_data():
    """The folder with whole data sets of others, which are not ours to ship."""
    if "SORTEDRL_DATA" not in os.environ:
        pytest.skip("needs the published data sets: SORTEDRL_DATA names no folder")
    return Path(os.environ["SORTEDRL_DATA"])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with what training runs need: a model, rewards."""
    from run_worlds import write_world

    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory):
    """A small model as a GGUF file."""
    pytest.importorskip("gguf")
    from run_worlds import write_gguf

    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture
def here(world, monkeypatch):
    """The commands run in the world, and the number of threads is put back afterwards."""
    import torch

    monkeypatch.chdir(world)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def chromium():
    """One browser for all tests of this process, started by the first that needs it."""
    from browser import Chromium

    chromium = Chromium()
    yield chromium
    chromium.close()


@pytest.fixture
def browser_log():
    """What the pages of this test said and fetched; `excuse` what is part of the test."""
    from browser import Log

    return Log()


@pytest.fixture
def browser_page(chromium, browser_log):
    """A fresh page, which must say no errors and fetch nothing from outside this machine."""
    context = chromium.open_context()
    browser_log.listen(context)
    try:
        yield context.new_page()
    finally:
        chromium.close_context(context)
    assert not browser_log.complaints, "\n".join(browser_log.complaints)
