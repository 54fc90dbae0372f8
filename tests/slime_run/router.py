"""A router with one SGLang server behind it, without a model.

The first token of an answer decides all others and their number, so an answer that is resumed
where it was aborted is the one that would have been generated without the abort.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sortedrl.core.randomness import mix
from verl_run.servers import STOP, length_of, noise

START = 2
_TICK_SECONDS = 0.004


def answer_from(first: int) -> list[int]:
    """The whole answer that begins with this token."""
    length = length_of(first)
    return [first, *(noise(first, position) for position in range(1, length - 1)), STOP]


class Router:
    """Serves on a port of its own until it is closed."""

    def __init__(self) -> None:
        """Begin to serve."""
        self._lock = threading.Lock()
        self._running = 0
        self._aborts = 0
        self._drawn = 0
        self.seeds: list[int | None] = []
        self.version = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def generated(self, body: dict) -> dict:
        """Generate after `input_ids`, until the end or an abort."""
        tokens, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        seed = body["sampling_params"].get("sampling_seed")
        start = max(place for place, token in enumerate(tokens) if token == START)
        done = tokens[start + 1 :]
        with self._lock:
            self._running += 1
            self._drawn += 1
            self.seeds.append(seed)
            aborts, first = self._aborts, mix(7, self._drawn if seed is None else seed)
        whole = answer_from(done[0] if done else 4 + first % 40)
        new: list[int] = []
        while len(done) + len(new) < len(whole) and len(new) < limit and aborts == self._aborts:
            new.append(whole[len(done) + len(new)])
            time.sleep(_TICK_SECONDS)
        with self._lock:
            self._running -= 1
        is_whole = len(done) + len(new) == len(whole)
        reason = "stop" if is_whole else "length" if len(new) == limit else "abort"
        return {
            "text": "".join(f" w{token}" for token in new),
            "meta_info": {
                "output_token_logprobs": [[-1.0, token, None] for token in new],
                "finish_reason": {"type": reason},
                "weight_version": str(self.version),
            },
        }

    def _handler(router) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/abort_request":
                    router._aborts += 1
                    self._send({})
                else:
                    self._send(router.generated(body))

            def do_GET(self) -> None:
                if self.path == "/workers":
                    self._send({"workers": [{"url": f"http://127.0.0.1:{router.port}"}]})
                else:
                    self._send({"loads": [{"num_running_reqs": router._running}]})

            def _send(self, answer: dict) -> None:
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        return Handler
