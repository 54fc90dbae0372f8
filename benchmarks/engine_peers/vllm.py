"""vLLM, in this process or in another interpreter, because of conflicting versions.

`Remote` starts the other interpreter and sends requests; `serve` answers there: JSON lines.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from engine_peers.peer import Sample, Workload, check_lengths, clock, free_memory

VllmName = Literal["vllm", "vllm-compile", "vllm-invariant"]


class Vllm:
    """vLLM's offline engine in this process."""

    def __init__(self, name: VllmName, folder: Path, workload: Workload) -> None:
        """Load the folder; existing environment variables are kept."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        vllm: Any = importlib.import_module("vllm")
        full_graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        on_gpu = workload.device.startswith("cuda")
        only_graphs = on_gpu and name == "vllm"
        self.note = f"vLLM {vllm.__version__}, log-probabilities included"
        self.note += ", full decode graphs, no torch.compile" if only_graphs else ""
        self.note += ", batch-invariant" if name == "vllm-invariant" else ""
        self._workload = workload
        self._params: Any = vllm.SamplingParams
        self._llm: Any = vllm.LLM(
            model=str(folder),
            dtype=workload.dtype,
            skip_tokenizer_init=True,
            max_num_seqs=workload.slots,
            max_model_len=workload.longest_context + 1,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.5,
            distributed_executor_backend="uni",
            compilation_config=full_graphs if only_graphs else None,
        )

    def warm_up(self) -> None:
        """Generate a few tokens for each prompt; graphs were captured at load time."""
        self._write(self._workload.shortened())

    def run(self, seed: int) -> Sample:
        """Generate all answers; without seeds per request, which would slow vLLM down."""
        return self._write(self._workload)

    def close(self) -> None:
        """Stop the engine and free its memory, so that another one can start."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        state: Any = importlib.import_module("vllm.distributed.parallel_state")
        state.cleanup_dist_env_and_memory()
        free_memory(self._workload.device)

    def _write(self, workload: Workload) -> Sample:
        began = clock(workload.device)
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in workload.prompts],
            [
                self._params(
                    temperature=1.0,
                    max_tokens=length,
                    ignore_eos=True,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                )
                for length in workload.lengths
            ],
            use_tqdm=False,
        )
        seconds = clock(workload.device) - began
        answers = [output.outputs[0] for output in outputs]
        check_lengths([len(answer.token_ids) for answer in answers], workload)
        total = math.fsum(answer.cumulative_logprob for answer in answers)
        return Sample(seconds=seconds, tokens=workload.tokens, mean_logprob=total / workload.tokens)


class Remote:
    """vLLM in another interpreter, which stays loaded between runs."""

    def __init__(self, name: VllmName, folder: Path, workload: Workload, *, python: Path) -> None:
        """Start the worker and wait until the model is loaded."""
        script = Path(__file__).parent.with_name("engine.py")
        command = [str(python), str(script), "--worker", name]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_worker_environment(name, python, workload),
        )
        self.note = str(self._ask({"folder": str(folder), "workload": asdict(workload)})["note"])

    def warm_up(self) -> None:
        """Let the worker warm up."""
        self._ask({"run": None})

    def run(self, seed: int) -> Sample:
        """A run, timed by the worker."""
        return Sample(**self._ask({"run": seed}))

    def close(self) -> None:
        """Stop the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _ask(self, question: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the vLLM worker ended with code {self._process.wait()}, see above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(name: VllmName) -> None:
    """The worker: answer requests of a `Remote` until it disconnects."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints, and so do its libraries
    peer: Vllm | None = None
    for line in sys.stdin:
        question = json.loads(line)
        if peer is None:
            peer = Vllm(name, Path(question["folder"]), Workload(**question["workload"]))
            answer: dict[str, object] = {"note": peer.note}
        elif question["run"] is None:
            peer.warm_up()
            answer = {}
        else:
            answer = asdict(peer.run(question["run"]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _worker_environment(name: VllmName, python: Path, workload: Workload) -> dict[str, str]:
    environment = dict(os.environ)
    if name == "vllm-invariant":
        # It replaces torch operations in the whole process.
        environment["VLLM_BATCH_INVARIANT"] = "1"
    if not workload.device.startswith("cuda"):
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        openmp = python.parent.parent / "lib" / "libiomp5.so"
        if openmp.exists():
            environment.setdefault("LD_PRELOAD", str(openmp))
        if workload.threads is not None:
            environment["OMP_NUM_THREADS"] = str(workload.threads)
    return environment
