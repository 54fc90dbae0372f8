"""Real servers of answers, each in a group of processes of its own that ends with the test."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from sortedrl.engines.conformance import STOPS, TEMPERATURE, limit_of
from sortedrl.engines.sampling import Sampling
from sortedrl.engines.streaming.streamed_engine import StreamedEngine
from sortedrl.engines.vllm.worker_extension import RECEIVER

START_SECONDS = 1200
OPTIONS = {"vllm": ("enforce_eager=true",), "sglang": ()}
"""Of an engine beside a trainer of a tiny model."""
SGL_KERNEL_STUB = Path(__file__).parent / "sgl_kernel_stub"


def streamed(opening):
    """An engine over a backend, as the laws of all engines want it."""
    return StreamedEngine(
        opening,
        max_tokens=limit_of,
        stop_tokens=STOPS,
        sampling=Sampling(temperature=TEMPERATURE),
    )


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    url: str
    process: subprocess.Popen

    def kill(self):
        """End all its processes at once, as a crash of the machine would."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def vllm_servers(folder, *, count, slots, context, dtype="float32"):
    """So many vLLM servers with the model of a folder, started side by side."""
    options = {
        "--model": folder,
        "--dtype": dtype,
        "--max-num-seqs": slots,
        "--max-model-len": context,
        "--kv-cache-memory-bytes": 64 << 20,
        "--scheduling-policy": "priority",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--worker-extension-cls": RECEIVER,
    }
    command = ["vllm.entrypoints.openai.api_server", *words(options)]
    command += ["--skip-tokenizer-init", "--enforce-eager"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with running(command, environment, count=count, health="/health") as servers:
        yield servers


@contextmanager
def sglang_servers(folder, *, count, slots, context):
    """The same of SGLang."""
    options = {
        "--model-path": folder,
        "--dtype": "float32",
        "--max-running-requests": slots,
        "--context-length": context + 6,
        "--max-total-tokens": slots * (context + 6),
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--log-level": "error",
    }
    command = ["sglang.launch_server", *words(options)]
    command += ["--skip-tokenizer-init", "--incremental-streaming-output", "--sleep-on-idle"]
    command += ["--enable-priority-scheduling", "--schedule-low-priority-values-first"]
    command += ["--disable-priority-preemption", "--skip-server-warmup"]
    command += ["--disable-overlap-schedule", "--disable-cuda-graph"]
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    with running(command, environment, count=count, health="/server_info") as servers:
        yield servers


def words(options):
    return [str(word) for option in options.items() for word in option]


@contextmanager
def running(command, environment, *, count, health):
    """Start a module so many times; gives the servers once all of them answer."""
    servers = []
    try:
        for _ in range(count):
            port = free_port()
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", *command, "--port", str(port)],
                env=os.environ | environment,
                start_new_session=True,
            )
            servers.append(Served(f"http://127.0.0.1:{port}", process))
        until = time.monotonic() + START_SECONDS
        for server in servers:
            while not answers(server.url + health):
                if server.process.poll() is not None or time.monotonic() > until:
                    pytest.fail(f"{command[0]} did not start; what it said stands above")
                time.sleep(0.3)
        yield servers
    finally:
        for server in servers:
            server.kill()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def answers(url):
    try:
        return httpx.get(url, timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False
