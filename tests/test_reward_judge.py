"""A judge behind a URL: retried, asked once for equal content, its cost and failures counted."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sortedrl.config.data import RewardSettings
from sortedrl.errors import RewardError
from sortedrl.rewards.functions import RewardSource
from sortedrl.rewards.pool.pool import RewardPool
from sortedrl.types import Prompt


@contextmanager
def judge(answer):
    """A server whose answers are `answer(number of the request, content)`: a status and a text."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = body["messages"][0]["content"]
            requests.append(content)
            status, text = answer(len(requests), content)
            said = {
                "choices": [{"message": {"content": text}}],
                "usage": {"total_tokens": 7},
            }
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def scores(url, responses, **options):
    """The scores of responses, all asked at the same time."""
    values = {"url": url, "model": "judge", "wait_seconds": 0.01, **options}
    source = RewardSource("sortedrl.rewards.judge:judge_reward", values)
    settings = RewardSettings(workers=1, time_limit_seconds=60.0)
    prompt = Prompt(id=0, fields={"prompt": "6 * 7?", "answer": "42"})
    with RewardPool(source, settings) as pool:
        tickets = [pool.submit(prompt, response) for response in responses]
        return [result.score for result in pool.wait(tickets)]


def test_the_score_is_read_and_its_cost_counted():
    def answer(_, content):
        assert "Right answer:\n42" in content
        return 200, f"Fine. Score: {9 if 'forty-two' in content else 2}"

    with judge(answer) as (url, requests):
        good, bad, again = scores(url, ["forty-two", "seven", "forty-two"])
        assert (good.reward, bad.reward, again.reward) == (0.9, 0.2, 0.9)
        assert sorted(s.parts["judge_cached"] for s in (good, again)) == [0.0, 1.0]
        assert sum(s.parts["judge_tokens"] for s in (good, bad, again)) == 14
        assert len(requests) == 2


def test_a_busy_judge_is_asked_again():
    with judge(lambda n, _: (503, "") if n < 3 else (200, "Score: 10")) as (url, requests):
        (score,) = scores(url, ["x"])
        assert (score.reward, score.parts["judge_failed"], len(requests)) == (1.0, 0.0, 3)


def test_a_judge_that_never_says_a_score_has_failed():
    with judge(lambda *_: (200, "I cannot say.")) as (url, requests):
        (score,) = scores(url, ["x"], failure_reward=-0.5)
        assert (score.reward, score.parts["judge_failed"], len(requests)) == (-0.5, 1.0, 3)
        assert score.parts["judge_tokens"] == 21


def test_a_judge_out_of_reach_has_failed():
    (score,) = scores("http://127.0.0.1:9/v1", ["x"])
    assert score.parts["judge_failed"] == 1.0


def test_a_judge_that_refuses_stops_the_run():
    with (
        judge(lambda *_: (401, "")) as (url, _),
        pytest.raises(RewardError, match="refuses: 401"),
    ):
        scores(url, ["x"])
