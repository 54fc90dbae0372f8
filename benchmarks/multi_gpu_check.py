"""Tests every part of a run that needs GPUs, and prints a verdict for each.

    python benchmarks/multi_gpu_check.py                       all parts; 5 to 15 minutes
    python benchmarks/multi_gpu_check.py --parts sleep ranks   some of them
    python benchmarks/multi_gpu_check.py --json check.json     the verdicts as a file too
    python benchmarks/multi_gpu_check.py --cpu                 on CPU processes, where possible

Run it once on a machine with two or eight GPUs before a long run. Every part has its own process
and a tiny model, so a failure or hang does not affect the others. A part that this machine cannot
run says what it needs. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing.queues import Queue
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from sortedrl.cluster.broadcast import RendezvousStore
    from sortedrl.cluster.weight_transport import Rendezvous
    from sortedrl.models.shared_memory import BufferSharing

_SECONDS = 900.0
_ANSWER_SECONDS = 120.0
_TOKENS = 16
_PROMPT = [5, 9, 2, 7]
_SYNC_TENSORS = 64
_LLAMA_8B = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256))
"""Inputs and outputs: packed qkv, o, packed gate and up, down, head."""
# Of weights in a mixed order, of which some have a bucket of their own.
_MIXED_UNITS = (1, 3, 12, 16, 32)
_ROWS = (8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
_MOST_PADDED = 128
_CPU_PROCESSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part to test."""

    about: str
    run: Callable[[bool], str]
    """Whether on CPUs."""
    gpus: int
    packages: tuple[str, ...] = ()
    can_use_cpus: bool = False

    def missing(self, *, on_cpu: bool) -> str | None:
        """What this machine lacks for it."""
        if on_cpu and not self.can_use_cpus:
            return "tests GPUs only"
        if not on_cpu and torch.cuda.device_count() < self.gpus:
            return f"needs {self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        lacking = [name for name in self.packages if find_spec(name) is None]
        return f"needs the package {lacking[0]}" if lacking else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a part."""

    part: str
    verdict: Literal["ok", "failed", "skipped"]
    words: str
    seconds: float = 0.0


# --- the native engine ----------------------------------------------------------------------------


def _bits(on_cpu: bool) -> str:
    """Start-up checks of the native engine, for the products of a model with 8B parameters.

    A row must have the same bits in any batch.
    """
    from sortedrl.engines.native.matmul import (
        fewest_invariant_rows,
        fp32_logits,
        invariant_products,
        no_split_k,
    )

    device, dtype = ("cpu", torch.float32) if on_cpu else ("cuda", torch.bfloat16)
    scale, sizes = (64, _ROWS[:6]) if on_cpu else (1, _ROWS)
    with torch.device(device):
        layers = [
            torch.nn.Linear(width // scale, height // scale, bias=False, dtype=dtype)
            for width, height in _LLAMA_8B
        ]
    head = layers[-1]
    heard = _Heard()
    logger = logging.getLogger(invariant_products.__module__)
    logger.addHandler(heard)
    logits: dict[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]] = {
        head: fp32_logits(head)
    }
    with nullcontext() if on_cpu else no_split_k():
        fewest = fewest_invariant_rows(layers, logits, sizes=sizes, most=_MOST_PADDED)
        larger = [size for size in sizes if size >= fewest]
        found = invariant_products(layers, logits, sizes=larger)
    _require(not heard.warnings, "; ".join(heard.warnings))
    others = ", the others 64 rows at a time" if found else ""
    return f"{len(layers) - len(found)} of {len(layers)} unchanged from {fewest} rows on{others}"


class _Heard(logging.Handler):
    """Keeps the warnings of a logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


# --- vLLM -----------------------------------------------------------------------------------------


def _with_vllm(*, shards: int, can_sleep: bool) -> str:
    """Start vLLM, put it to sleep, load new weights, and compare its tokens."""
    from sortedrl.engines.conformance import greedy, reference_model
    from sortedrl.engines.sampling import Sampling
    from sortedrl.engines.streaming.backend import EventLoop, GenerationRequest
    from sortedrl.engines.vllm.vllm_process import VllmProcess
    from sortedrl.types import Weights

    loop = EventLoop("check")
    with tempfile.TemporaryDirectory() as folder:
        reference_model().save_pretrained(folder)
        backend = loop.call(
            VllmProcess.start(
                model=folder,
                slots=4,
                context=128,
                dtype="float32",
                memory_share=0.3,
                tensor_parallel=shards,
                can_sleep=can_sleep,
                options={"kv_cache_memory_bytes": 1 << 30, "enforce_eager": True},
            )
        )
        try:
            freed = 0
            if can_sleep:
                before = torch.cuda.mem_get_info()[0]
                _require(loop.call(backend.sleep()), "it must drop its weights when it sleeps")
                freed = torch.cuda.mem_get_info()[0] - before
                _require(freed > 0, f"sleeping must free memory, it freed {freed} bytes")
            new = reference_model(1)
            on_gpu = {name: tensor.cuda() for name, tensor in new.state_dict().items()}
            start = perf_counter()
            loop.call(backend.load_weights(Weights(1, on_gpu)))
            seconds = perf_counter() - start
            request = GenerationRequest(
                id="check-0",
                tokens=_PROMPT,
                max_tokens=_TOKENS,
                stop_tokens=frozenset(),
                sampling=Sampling(temperature=0),
                priority=0,
            )

            async def written() -> list[int]:
                return [token async for delta in backend.stream(request) for token in delta.tokens]

            found = loop.call(written())
            expected = greedy(new, _PROMPT, _TOKENS)
            _require(
                found == expected, f"it must write with the new weights: {expected}, got {found}"
            )
        finally:
            loop.call(backend.close())
            loop.close()
    slept = f"slept ({freed / 2**30:.1f} GiB freed), " if can_sleep else ""
    return f"{slept}weights by CUDA IPC in {seconds:.2f} s, {_TOKENS} tokens as the model writes"


# --- weights between processes --------------------------------------------------------------------


def _ipc(on_cpu: bool) -> str:
    """Weights from one process to another on the same GPU: 2 GiB by IPC, and over gloo.

    A reader that dies must leave no memory behind. On CPUs the buffers are files in shared memory.
    """
    from sortedrl.cluster import broadcast
    from sortedrl.cluster.buckets import parts
    from sortedrl.cluster.weight_transport import BROADCAST_BYTES, TransportFailed

    device, bucket_bytes = ("cpu", 1 << 16) if on_cpu else ("cuda:0", BROADCAST_BYTES)
    heard = _Heard()
    logging.getLogger(broadcast.__name__).addHandler(heard)
    store = broadcast.RendezvousStore("127.0.0.1", seconds=_ANSWER_SECONDS)
    tensors = _random_weights(device)
    size, held = sum(tensor.nbytes for tensor in tensors.values()), _allocated(device)
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("ipc", "gloo"):
            rendezvous, sharing = _pair(store, way), _sharing(way, device, folder)
            answers = _second_process(_receive_twice, rendezvous, way, device, folder)
            with closing(broadcast.BroadcastSender(device, sharing=sharing)) as sender:
                for _ in range(2):
                    start = perf_counter()
                    sender.send(rendezvous, parts(tensors.items(), bucket_bytes=bucket_bytes))
                    sent = perf_counter() - start
                found = _answer(answers)
            # Why a worker cannot open a buffer is said there.
            _require(not heard.warnings, "; ".join(heard.warnings))
            expected = "cpu" if way == "gloo" else torch.device(device).type
            _require(found["places"] == [expected], f"weights must come to {expected}: {found}")
            _require(found["is_equal"], f"the bits must arrive by {way} as they were sent")
            seconds[way] = max(sent, found["seconds"])
        rendezvous, sharing = _pair(store, "broken"), _sharing("ipc", device, folder)
        # The process starts only while its queue exists.
        answers = _second_process(_die_in_the_middle, rendezvous, device, folder)
        with closing(broadcast.BroadcastSender(device, sharing=sharing)) as sender:
            try:
                sender.send(rendezvous, parts(tensors.items(), bucket_bytes=bucket_bytes))
            except TransportFailed as error:
                _require("the broadcast failed" in str(error), f"a death was seen as: {error}")
            else:
                raise RuntimeError("the sender must see that the reader died")
        _require(not any(Path(folder).iterdir()), "no file of a buffer may be left")
    kept = _allocated(device) - held
    _require(kept <= 0, f"the sender must free its buffers, it kept {kept} bytes")
    rates = [f"{took:.3f} s ({size / took / 1e9:.1f} GB/s)" for took in seconds.values()]
    over = "shared files" if on_cpu else "CUDA IPC"
    return f"{size / 1e9:.2f} GB to the bit over {over} in {rates[0]}, over gloo in {rates[1]}"


def _random_weights(device: str) -> dict[str, torch.Tensor]:
    """The same bits in every process with such a device: 2 GiB on a GPU, 8 MiB on a CPU."""
    unit = 1 << (11 if device == "cpu" else 19)
    generator = torch.Generator(device).manual_seed(0)
    return {
        f"{number}.{units}": torch.randint(
            -(1 << 15), 1 << 15, (units * unit,), generator=generator, device=device
        )
        .to(torch.int16)
        .view(torch.bfloat16)
        for number in range(32)
        for units in _MIXED_UNITS
    }


def _allocated(device: str) -> int:
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


def _pair(store: RendezvousStore, key: str) -> Rendezvous:
    """The rendezvous of this process and a second one."""
    from sortedrl.cluster.weight_transport import Rendezvous

    return Rendezvous(
        host=store.host, port=store.port, world=2, key=key, timeout=_ANSWER_SECONDS / 2
    )


def _sharing(way: str, device: str, folder: str) -> BufferSharing | None:
    """How buffers are shared: by CUDA IPC, on CPUs as files."""
    from sortedrl.models.shared_memory import CudaSharing, FileSharing

    if way == "gloo":
        return None
    return FileSharing(Path(folder)) if device == "cpu" else CudaSharing(torch.device(device))


def _receive_twice(rendezvous: Rendezvous, way: str, device: str, folder: str) -> dict[str, object]:
    from sortedrl.cluster.broadcast import BroadcastReceiver

    # What comes over gloo comes to main memory.
    arriving = "cpu" if way == "gloo" else device
    receiver = BroadcastReceiver(arriving, sharing=_sharing(way, device, folder))
    places: set[str] = set()
    with closing(receiver):
        for _ in range(2):
            received: dict[str, torch.Tensor] = {}
            start = perf_counter()
            for bucket in receiver.buckets(rendezvous, 1):
                places |= {tensor.device.type for tensor in bucket.values()}
                received |= {name: tensor.to(device) for name, tensor in bucket.items()}
            if not device.startswith("cpu"):
                torch.cuda.synchronize()
            seconds = perf_counter() - start
    expected = _random_weights(device)
    is_equal = received.keys() == expected.keys() and all(
        torch.equal(received[name].view(torch.int16), tensor.view(torch.int16))
        for name, tensor in expected.items()
    )
    return {"seconds": seconds, "is_equal": is_equal, "places": sorted(places)}


def _die_in_the_middle(rendezvous: Rendezvous, device: str, folder: str) -> None:
    from sortedrl.cluster.broadcast import BroadcastReceiver

    receiver = BroadcastReceiver(device, sharing=_sharing("ipc", device, folder))
    for number, _ in enumerate(receiver.buckets(rendezvous, 1)):
        if number == 2:
            os._exit(1)


def _second_process(work: Callable[..., object], *arguments: object) -> Queue[object]:
    """Start another process; the queue gets what `work` returns there, or its error."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    # A daemon: where this process has failed, it does not wait for the other one.
    context.Process(target=_answered, args=(work, arguments, answers), daemon=True).start()
    return answers


def _answered(
    work: Callable[..., object], arguments: Sequence[object], answers: Queue[object]
) -> None:
    try:
        answers.put(work(*arguments))
    except Exception as error:  # noqa: BLE001  raised by the first process
        answers.put(RuntimeError(f"in the second process: {type(error).__name__}: {error}"))


def _answer(answers: Queue[object]) -> Any:  # noqa: ANN401
    found = answers.get(timeout=_ANSWER_SECONDS)
    if isinstance(found, RuntimeError):
        raise found
    return found


def _broadcast(on_cpu: bool) -> str:
    """A broadcast between two processes, as in a weight sync: 1 GiB on GPUs."""
    from sortedrl.cluster.broadcast import BroadcastSender, RendezvousStore
    from sortedrl.cluster.buckets import parts
    from sortedrl.cluster.weight_transport import BROADCAST_BYTES

    store = RendezvousStore("127.0.0.1", seconds=_ANSWER_SECONDS)
    rendezvous = _pair(store, "check")
    devices = ("cpu", "cpu") if on_cpu else ("cuda:0", "cuda:1")
    answers = _second_process(_receive, rendezvous, devices[1])
    length = 1 << (16 if on_cpu else 22)
    tensors = {
        f"{n}": torch.full((length,), float(n), device=devices[0]) for n in range(_SYNC_TENSORS)
    }
    start = time.perf_counter()
    with closing(BroadcastSender(devices[0])) as sender:
        sender.send(rendezvous, parts(tensors.items(), bucket_bytes=BROADCAST_BYTES))
        seconds = time.perf_counter() - start
        found = _answer(answers)
    expected = [float(n) for n in range(_SYNC_TENSORS)]
    _require(found["values"] == expected, "the second process must have what the first one sent")
    kind = torch.device(devices[1]).type
    _require(found["device"] == kind, f"weights must arrive on {kind}, got {found['device']}")
    size = sum(tensor.nbytes for tensor in tensors.values())
    over = "gloo" if on_cpu else "NCCL"
    return f"{size / 1e9:.2f} GB in {seconds:.2f} s, including setup, over {over}"


def _receive(rendezvous: Rendezvous, device: str) -> dict[str, object]:
    from sortedrl.cluster.broadcast import BroadcastReceiver

    with closing(BroadcastReceiver(device)) as receiver:
        received = {n: t for bucket in receiver.buckets(rendezvous, 1) for n, t in bucket.items()}
        values = [float(received[f"{n}"][-1]) for n in range(_SYNC_TENSORS)]
    return {"values": values, "device": received["0"].device.type}


# --- whole runs -----------------------------------------------------------------------------------


def run_words(name: str, out: Path, *, gpus: int) -> list[str]:
    """The command line of two updates of a tiny model with the cluster of a part.

    Without GPUs, all processes run on CPUs.
    """
    cluster = dict(CLUSTERS[name])
    processes = gpus or _CPU_PROCESSES
    flags: dict[str, object] = {
        "--model": "tiny",
        "--task": "knights_knaves:people=2,count=128,style=compact",
        "--rollout.engine": cluster.pop("engine", "native"),
        "--schedule.mode": "partial",
        "--schedule.group-prompts": 16,
        "--schedule.update-batch": 8,
        "--engine.slots": 8 * processes,
        "--engine.max-tokens": 24,
        "--max-updates": 2,
        "--rewards.workers": 1,
        "--out": out,
    }
    given = {"rollout_workers": 1, "trainer_ranks": 1, "gpus_per_worker": 1} | cluster
    if not gpus:
        given |= {"gpus_per_worker": 0}
        flags |= {"--threads": 1}
    for key, value in given.items():
        flags[f"--cluster.{key.replace('_', '-')}"] = processes if value == "all" else value
    return [str(word) for flag in flags.items() for word in flag]


def _run(name: str) -> Callable[[bool], str]:
    """Two updates with the cluster of this part."""

    def run(on_cpu: bool) -> str:
        gpus = 0 if on_cpu else torch.cuda.device_count()
        with tempfile.TemporaryDirectory() as folder:
            words = run_words(name, Path(folder) / "run", gpus=gpus)
            command = [sys.executable, "-m", "sortedrl", "train", *words]
            start = perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            said = [line for line in done.stderr.splitlines() if line.strip()]
            last = said[-1] if said else f"exit code {done.returncode}"
            output = f"{done.stdout}\n{done.stderr}"
            _require(done.returncode == 0, f"the run failed: {last}\n{output}")
        return f"two updates in {perf_counter() - start:.0f} s"

    return run


def _require(claim: bool, otherwise: str) -> None:
    if not claim:
        raise RuntimeError(otherwise)


_TURNS = {"kind": "colocated", "rollout_workers": "all", "trainer_ranks": "all"}
_SHARDS = {
    "kind": "colocated",
    "gpus_per_worker": 2,
    "tensor_parallel": 2,
    "trainer_ranks": 2,
    "engine": "vllm",
}
CLUSTERS: Mapping[str, Mapping[str, object]] = {
    "colocated": _TURNS,
    "colocated_vllm": _TURNS | {"engine": "vllm"},
    "ranks": {"trainer_ranks": 2},
    "separated": {},
    "controller": {"trainer_ranks": 0},
    "colocated_shards": _SHARDS,
}
"""The [cluster] of whole runs; all: as many as there are GPUs."""
PARTS: Mapping[str, Part] = {
    "bits": Part(
        about="batch-invariant products of LLaMA-3.1-8B",
        run=_bits,
        gpus=1,
        can_use_cpus=True,
    ),
    "ipc": Part(
        about="weights between two processes on one GPU", run=_ipc, gpus=1, can_use_cpus=True
    ),
    "sleep": Part(
        about="vLLM sleeps, gets weights by IPC and wakes",
        run=lambda _: _with_vllm(shards=1, can_sleep=True),
        gpus=1,
        packages=("vllm",),
    ),
    "tensor_parallel": Part(
        about="vLLM over two GPUs, weights to both shards",
        run=lambda _: _with_vllm(shards=2, can_sleep=False),
        gpus=2,
        packages=("vllm",),
    ),
    "broadcast": Part(
        about="weight sync between two GPUs", run=_broadcast, gpus=2, can_use_cpus=True
    ),
    "colocated": Part(
        about="a worker and an FSDP rank sharing every GPU",
        run=_run("colocated"),
        gpus=1,
        packages=("ray",),
        can_use_cpus=True,
    ),
    "colocated_vllm": Part(
        about="the same with vLLM, which sleeps during updates",
        run=_run("colocated_vllm"),
        gpus=1,
        packages=("ray", "vllm"),
    ),
    "ranks": Part(
        about="FSDP over two GPUs, a worker on a third",
        run=_run("ranks"),
        gpus=3,
        packages=("ray",),
        can_use_cpus=True,
    ),
    "separated": Part(
        about="a worker and a rank on separate GPUs",
        run=_run("separated"),
        gpus=2,
        packages=("ray",),
        can_use_cpus=True,
    ),
    "controller": Part(
        about="the trainer in the controller's process, on a GPU without workers",
        run=_run("controller"),
        gpus=2,
        packages=("ray",),
        can_use_cpus=True,
    ),
    "colocated_shards": Part(
        about="one vLLM over two GPUs shared with two ranks",
        run=_run("colocated_shards"),
        gpus=2,
        packages=("ray", "vllm"),
    ),
}


def tried(name: str, *, seconds: float, on_cpu: bool) -> Verdict:
    """The verdict on one part, run in its own process."""
    missing = PARTS[name].missing(on_cpu=on_cpu)
    if missing is not None:
        return Verdict(part=name, verdict="skipped", words=missing)
    start = perf_counter()
    command = [sys.executable, str(Path(__file__).resolve()), "--alone", name]
    command += ["--cpu"] if on_cpu else []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # With the processes that it has started, which hold memory of the GPUs.
            os.killpg(process.pid, signal.SIGKILL)
            return Verdict(part=name, verdict="failed", words=f"timeout after {seconds:g} s")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    took = perf_counter() - start
    if process.returncode:
        # Warnings of CUDA may come after the error.
        lines = [line for line in errors.splitlines() if line.strip() and line[0] != "["]
        words = lines[-1] if lines else f"exit code {process.returncode}"
        return Verdict(part=name, verdict="failed", words=words, seconds=took)
    words = output.strip().splitlines()[-1]
    return Verdict(part=name, verdict="ok", words=words, seconds=took)


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the parts, and print a line for each."""
    lines = [f"  {name:16} {part.about} ({_needs(part)})" for name, part in PARTS.items()]
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(["parts:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parts", nargs="*", choices=list(PARTS), default=list(PARTS), metavar="PART", help="all"
    )
    parser.add_argument("--cpu", action="store_true", help="use CPU processes instead of GPUs")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="timeout of one part")
    parser.add_argument("--json", type=Path, help="also write the verdicts to this file")
    parser.add_argument("--alone", choices=list(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.alone is not None:
        try:
            print(PARTS[given.alone].run(given.cpu))
        except Exception as error:  # noqa: BLE001  printed with its traceback, for the caller
            traceback.print_exc()
            print(f"{type(error).__name__}: {error}".partition("\n")[0], file=sys.stderr)
            return 1
        return 0
    cards = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    found = ", ".join(cards) or "none; use --cpu to test what can run on CPU processes"
    print("on CPU processes" if given.cpu else f"GPUs: {found}")
    verdicts = []
    for name in given.parts:
        verdict = tried(name, seconds=given.seconds, on_cpu=given.cpu)
        verdicts.append(verdict)
        print(f"{verdict.verdict:8} {name:16} {PARTS[name].about}: {verdict.words}", flush=True)
    if given.json is not None:
        report = {
            "gpus": [] if given.cpu else cards,
            "parts": [asdict(verdict) for verdict in verdicts],
        }
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(verdict.verdict == "failed" for verdict in verdicts))


def _needs(part: Part) -> str:
    least = f"{part.gpus} GPU{'s' if part.gpus > 1 else ''}"
    return ", ".join((least + (" or --cpu" if part.can_use_cpus else ""), *part.packages))


if __name__ == "__main__":
    raise SystemExit(main())
