"""Checkpoints: whole or not there, whatever happens while they are written."""

import errno
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Event

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from forked import run_program
from sortedrl.config.train import Saving
from sortedrl.errors import CheckpointError, ConfigError
from sortedrl.training.checkpoint import (
    Checkpoints,
    inspect,
    read_state,
    read_tensors,
    save,
    verify,
    write_model,
    write_state,
    write_tensors,
)

TENSORS = {"first": torch.arange(6.0).view(2, 3), "second": torch.ones(3, dtype=torch.bfloat16)}
FILES = ("buffer.bin", "model/config.json", "optimiser.safetensors", "state.json")


def writer(update, *, num_bytes=100):
    """Writes a small checkpoint that knows its update."""

    def write(folder):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "buffer.bin").write_bytes(bytes([update % 256]) * num_bytes)
        write_tensors(folder, "optimiser", tensors=TENSORS)
        write_state(folder, {"update": update, "rate": 0.1})

    return write


def saved(tmp_path, update=1):
    folder = tmp_path / f"update-{update:06d}"
    save(folder, writer(update))
    return folder


def checkpoints_in(folder, *, keep_last=2, keep_best=True, warnings=None):
    warn = [].append if warnings is None else warnings.append
    return Checkpoints(folder, keep_last=keep_last, keep_best=keep_best, warn=warn)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_read_back(tmp_path):
    folder = saved(tmp_path)
    verify(folder)
    assert sorted(inspect(folder)) == sorted(FILES)
    assert read_state(folder) == {"update": 1, "rate": 0.1}
    tensors = read_tensors(folder, "optimiser")
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
    assert names(tmp_path) == ["update-000001"]


def small_model(vocabulary=20):
    # Imported here because the processes that get killed below start faster without.
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    words = models.WordLevel({f"word{i}": i for i in range(vocabulary)}, unk_token="word0")
    return LlamaForCausalLM(config), PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


def test_the_model_in_a_checkpoint_loads_with_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = small_model()

    def write(folder):
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")

    save(tmp_path / "one", write)
    verify(tmp_path / "one")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "model")
    for name, parameter in model.named_parameters():
        assert loaded.get_parameter(name).equal(parameter)
    assert AutoTokenizer.from_pretrained(tmp_path / "one" / "model")("word7").input_ids == [7]


def test_tensors_that_are_views_are_saved_as_they_look(tmp_path):
    views = {"turned": torch.arange(6.0).view(2, 3).T}
    save(tmp_path / "one", lambda folder: write_tensors(folder, "views", tensors=views))
    assert read_tensors(tmp_path / "one", "views")["turned"].equal(views["turned"])


@settings(max_examples=40)
@given(data=st.data())
def test_every_damage_is_noticed_and_named(data, tmp_path_factory):
    folder = saved(tmp_path_factory.mktemp("run"))
    path = folder / data.draw(st.sampled_from(FILES))
    content = path.read_bytes()
    match data.draw(st.sampled_from(["missing", "truncated", "damaged"])):
        case "missing" as kind:
            path.unlink()
        case "truncated" as kind:
            path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        case kind:
            place = data.draw(st.integers(0, len(content) - 1))
            flipped = content[place] ^ (1 << data.draw(st.integers(0, 7)))
            path.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
    with pytest.raises(CheckpointError, match=rf"{path}: .*{kind}"):
        verify(folder)


def test_every_half_of_a_manifest_is_noticed(tmp_path):
    path = saved(tmp_path) / "manifest.json"
    whole = path.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=str(path)):
            verify(path.parent)


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (None, "not a complete sortedrl checkpoint"),
        ("[1, 2]", "must hold a JSON object"),
        ('{"format": "other", "version": 1}', "format must be 'sortedrl-checkpoint', got 'other'"),
        ('{"format": "sortedrl-checkpoint", "version": 2}', "version must be 1, got 2"),
        ('{"format": "sortedrl-checkpoint", "version": 1}', "damaged"),
        ('{"format": "sortedrl-checkpoint", "version": 1, "files": {"a": 3}}', "damaged"),
        (
            '{"format": "sortedrl-checkpoint", "version": 1,'
            ' "files": {"../a": {"size": 1, "sha256": ""}}}',
            "outside the folder",
        ),
    ],
)
def test_a_foreign_folder_is_refused(tmp_path, manifest, reason):
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    for read in (verify, read_state, lambda folder: read_tensors(folder, "optimiser")):
        with pytest.raises(CheckpointError, match=reason):
            read(tmp_path)


@pytest.mark.parametrize(
    "name", ["model/pytorch_model.bin", "optimiser.pt", "model/x.pth", "a.pkl", "b.ckpt"]
)
def test_a_folder_with_a_pickle_is_refused_and_never_made(tmp_path, name):
    folder = saved(tmp_path)
    (folder / name).write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=rf"{name}: .*pickle"):
        verify(folder)

    def write(partial):
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_bytes(b"")

    with pytest.raises(CheckpointError, match="pickle"):
        save(tmp_path / "update-000002", write)
    assert names(tmp_path) == ["update-000001"]


def test_only_files_of_the_manifest_are_read(tmp_path):
    folder = saved(tmp_path)
    shutil.copy(folder / "optimiser.safetensors", folder / "critic.safetensors")
    with pytest.raises(CheckpointError, match=r"has no critic\.safetensors"):
        read_tensors(folder, "critic")


def test_tensors_that_are_no_safetensors_are_refused(tmp_path):
    save(tmp_path / "one", lambda folder: (folder / "x.safetensors").write_bytes(b"nonsense"))
    with pytest.raises(CheckpointError, match=r"x\.safetensors: cannot be read"):
        read_tensors(tmp_path / "one", "x")


@contextmanager
def files_limited_to(num_bytes):
    """The system refuses to make any file larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_large_tensors(folder):
    write_tensors(folder, "optimiser", tensors={"large": torch.zeros(100_000)})


def write_large_buffer(folder):
    (folder / "buffer.bin").write_bytes(bytes(400_000))


def write_large_model(folder):
    small_model(vocabulary=10_000)[0].save_pretrained(folder / "model")


def write_large_tokenizer(folder):
    small_model(vocabulary=10_000)[1].save_pretrained(folder / "model")


@pytest.mark.parametrize(
    "write", [write_large_tensors, write_large_buffer, write_large_model, write_large_tokenizer]
)
def test_a_file_that_cannot_be_written_leaves_the_old_checkpoint(tmp_path, write):
    checkpoints = checkpoints_in(tmp_path)
    old = checkpoints.save(1, writer(1))
    with files_limited_to(100_000), pytest.raises(CheckpointError) as caught:
        checkpoints.save(2, write)
    message = str(caught.value)
    assert str(tmp_path / "update-000002") in message
    assert os.strerror(errno.EFBIG) in message
    assert "the last complete checkpoint is update-000001" in message
    assert names(tmp_path) == ["update-000001"]
    assert checkpoints.newest() == old
    assert checkpoints.save(2, write) == checkpoints.newest()


def test_a_full_disk_is_called_by_its_name(tmp_path):
    def write(folder):
        writer(2)(folder)
        Path("/dev/full").write_bytes(b"x")

    with pytest.raises(CheckpointError) as caught:
        checkpoints_in(tmp_path).save(2, write)
    assert str(caught.value) == (
        f"{tmp_path}/update-000002: the checkpoint cannot be saved: No space left on device; "
        "there is no complete checkpoint yet; free space there, or lower saving.keep_last, "
        "and resume"
    )


def test_a_checkpoint_that_cannot_be_saved_again_is_still_the_last_complete_one(tmp_path):
    def write(folder):
        Path("/dev/full").write_bytes(b"x")

    checkpoints = checkpoints_in(tmp_path)
    for update in (1, 2):
        checkpoints.save(update, writer(update))
    with pytest.raises(CheckpointError, match="the last complete checkpoint is update-000002"):
        checkpoints.save(2, write)
    assert checkpoints.newest() == tmp_path / "update-000002"


@contextmanager
def small_disk(place, options):
    mount = ["mount", "-t", "tmpfs", "-o", options, "sortedrl", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_on_a_disk_that_is_really_full_the_old_checkpoint_stands(tmp_path):
    warnings = []
    with small_disk(tmp_path, "size=600k"):
        checkpoints = checkpoints_in(tmp_path, warnings=warnings)
        old = checkpoints.save(1, writer(1, num_bytes=100_000))
        for write in (
            writer(2, num_bytes=600_000),
            lambda folder: write_large_tensors(folder) or write_large_tensors(folder / ".."),
            write_large_model,
        ):
            with pytest.raises(CheckpointError, match=r"No space left .* is update-000001"):
                checkpoints.save(2, write)
            (tmp_path / "optimiser.safetensors").unlink(missing_ok=True)
            assert names(tmp_path) == ["update-000001"]
            assert checkpoints.newest() == old
        assert checkpoints.save(2, writer(2)) == checkpoints.newest()
    assert warnings == []


def test_a_model_appears_whole_or_not_at_all_and_other_files_stay(tmp_path):
    def write(folder):
        (folder / "inner").mkdir()
        (folder / "inner" / "config.json").write_text("{}")

    def write_to_full_disk(folder):
        write(folder)
        raise RuntimeError("no room (os error 28)")

    model = tmp_path / "model"
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device; resume"):
        write_model(model, write_to_full_disk, otherwise="resume")
    assert names(tmp_path) == []
    model.mkdir()
    (model / "mine.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match="No space left"):
        write_model(model, write_to_full_disk, otherwise="resume")
    assert names(model) == ["mine.gguf"]
    write_model(model, write, otherwise="resume")
    assert names(model) == ["inner", "mine.gguf"]
    assert (model / "inner" / "config.json").read_text() == "{}"
    assert names(tmp_path) == ["model"]


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    with small_disk(tmp_path, "size=600k"):
        old = checkpoints.save(1, writer(1))
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(CheckpointError, match=r"Read-only file system; .* choose a folder"):
            checkpoints.save(2, writer(2))
        assert checkpoints.newest() == old


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_others_is_told(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    old = checkpoints.save(1, writer(1))
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(
            CheckpointError, match=r"Permission denied; .* make the folder writable"
        ):
            checkpoints.save(2, writer(2))
        assert checkpoints.newest() == old
    finally:
        tmp_path.chmod(0o755)


def test_a_place_that_is_no_folder_is_told(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=r"run/update-000001: .*cannot be saved"):
        checkpoints_in(tmp_path / "run").save(1, writer(1))
    assert checkpoints_in(tmp_path / "run").newest() is None


def test_an_error_of_the_writer_is_not_taken_for_the_disk(tmp_path):
    def write(folder):
        writer(1)(folder)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save(tmp_path / "one", write)
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed_at_the_next_save(tmp_path):
    for name in ("update-000002.partial", "update-000007.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{")
    checkpoints = checkpoints_in(tmp_path)
    assert checkpoints.newest() is None
    checkpoints.save(2, writer(2))
    assert names(tmp_path) == ["update-000002"]


def test_saving_an_update_again_replaces_it(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(1, writer(1))
    checkpoints.save(1, lambda folder: write_state(folder, {"second": True}))
    assert read_state(checkpoints.newest()) == {"second": True}
    assert names(tmp_path) == ["update-000001"]


def test_a_failed_replacement_leaves_what_was_there(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(1, writer(1))
    with files_limited_to(100_000), pytest.raises(CheckpointError):
        checkpoints.save(1, write_large_buffer)
    assert read_state(checkpoints.newest())["update"] == 1


@given(
    scores=st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0, float("nan")]), max_size=8),
    keep_last=st.integers(1, 3),
    keep_best=st.booleans(),
)
@settings(max_examples=15)
def test_the_last_and_the_best_are_kept(scores, keep_last, keep_best, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    checkpoints = checkpoints_in(folder, keep_last=keep_last, keep_best=keep_best)
    real = [(u, s) for u, s in enumerate(scores) if s is not None and s == s]
    best = max(real, key=lambda pair: (pair[1], -pair[0]), default=(None,))[0]
    for update, score in enumerate(scores):
        checkpoints.save(update, lambda f: write_state(f, {}), score=score)
    kept = set(range(len(scores))[-keep_last:]) | ({best} if keep_best else set()) - {None}
    assert checkpoints.complete() == [checkpoints.path_for(u) for u in sorted(kept, reverse=True)]
    assert names(folder) == sorted(path.name for path in checkpoints.complete())
    if keep_best:
        assert checkpoints.best() == (None if best is None else checkpoints.path_for(best))


def test_the_order_is_that_of_the_numbers(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(999_999, writer(1))
    newest = checkpoints.save(1_000_000, writer(2))
    assert checkpoints.newest() == newest
    assert [path.name for path in checkpoints.complete()] == ["update-1000000", "update-999999"]


def test_damaged_checkpoints_are_skipped_with_a_warning_and_stay(tmp_path):
    warnings = []
    checkpoints = checkpoints_in(tmp_path, keep_last=4, warnings=warnings)
    paths = [checkpoints.save(update, writer(update)) for update in (1, 2, 3, 4)]
    (paths[3] / "manifest.json").unlink()
    content = bytearray((paths[2] / "buffer.bin").read_bytes())
    content[50] ^= 4
    (paths[2] / "buffer.bin").write_bytes(content)
    assert checkpoints.newest() == paths[1]
    assert len(warnings) == 2
    assert "update-000004 is skipped" in warnings[0]
    assert "update-000003/buffer.bin: checksum differs" in warnings[1]
    assert len(names(tmp_path)) == 4


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_good_one(tmp_path):
    checkpoints = checkpoints_in(tmp_path, keep_last=2)
    paths = [checkpoints.save(update, writer(update)) for update in (1, 2)]
    (paths[1] / "state.json").unlink()
    paths.append(checkpoints.save(3, writer(3)))
    assert checkpoints.complete() == [paths[2], paths[0]]
    assert paths[1].exists(), "what is damaged may still be of use to someone"


def test_a_future_that_was_left_behind_is_set_aside(tmp_path):
    warnings = []
    checkpoints = checkpoints_in(tmp_path, warnings=warnings)
    for update in (1, 2, 3):
        checkpoints.save(update, writer(update))
    (tmp_path / "update-000003" / "state.json").unlink()
    checkpoints.save(3, writer(3))
    assert warnings == []
    checkpoints.save(2, writer(2))
    assert checkpoints.newest() == checkpoints.path_for(2)
    assert names(tmp_path) == ["update-000002", "update-000003.abandoned"]
    assert "update-000003 is later than update 2" in warnings[0]


def test_other_things_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "update-notes").mkdir()
    checkpoints = checkpoints_in(tmp_path, keep_last=1)
    for update in range(3):
        checkpoints.save(update, writer(update))
    assert names(tmp_path) == ["events.jsonl", "update-000002", "update-notes"]


def test_saving_can_be_set_within_reason():
    assert Saving() == Saving(every=50, keep_last=2, keep_best=True)
    for wrong in ({"every": 0}, {"keep_last": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Saving(**wrong)


# --- in the background ----------------------------------------------------------------------------


def slowly(update, begun, go):
    """Writes once it is told to."""

    def write(folder):
        begun.set()
        assert go.wait(20)
        writer(update)(folder)

    return write


def test_a_save_in_the_background_is_whole_once_it_is_waited_for(tmp_path):
    checkpoints, begun, go = checkpoints_in(tmp_path), Event(), Event()
    checkpoints.save_later(1, slowly(1, begun, go), score=0.5)
    assert begun.wait(20)
    checkpoints.check()
    assert names(tmp_path) == ["update-000001.partial"]
    assert checkpoints.newest() is None
    go.set()
    checkpoints.finish()
    verify(checkpoints.path_for(1))
    assert checkpoints.best() == checkpoints.path_for(1)
    checkpoints.finish()


def test_only_one_save_is_under_way(tmp_path):
    checkpoints = checkpoints_in(tmp_path, keep_last=5)
    seen = []

    def write(update):
        def one(folder):
            seen.append(("begun", update))
            time.sleep(0.02)
            writer(update)(folder)
            seen.append(("ended", update))

        return one

    for update in (1, 2):
        checkpoints.save_later(update, write(update))
    checkpoints.save(3, write(3))
    assert seen == [(what, update) for update in (1, 2, 3) for what in ("begun", "ended")]
    assert [path.name for path in checkpoints.complete()] == [
        f"update-{update:06d}" for update in (3, 2, 1)
    ]


def full(folder):
    raise OSError(errno.ENOSPC, "no space")


@pytest.mark.parametrize("call", ["check", "finish", "save", "save_later"])
def test_what_failed_in_the_background_is_raised_by_the_next_call(tmp_path, call):
    checkpoints = checkpoints_in(tmp_path)
    old = checkpoints.save(1, writer(1))
    checkpoints.save_later(2, full)
    checkpoints._writing.exception()
    with pytest.raises(CheckpointError, match=r"No space left.*update-000001; free space"):
        getattr(checkpoints, call)(*(() if call in ("check", "finish") else (3, writer(3))))
    assert checkpoints.newest() == old
    checkpoints.finish()
    assert checkpoints.save(3, writer(3)) == checkpoints.newest()


def test_a_failure_after_the_end_is_a_warning(tmp_path):
    warnings = []
    checkpoints = checkpoints_in(tmp_path, warnings=warnings)
    checkpoints.save_later(1, full)
    checkpoints.close()
    assert "the checkpoint cannot be saved: No space left" in warnings[0]


@pytest.mark.parametrize("state", ["fp32", "8bit", "offload"])
@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_snapshot_is_what_was_there_when_it_was_taken(tmp_path, state, lora_rank):
    from native_worlds import tiny_model
    from sharded_worlds import Silent
    from sortedrl.config.algorithm import Algorithm, Optimisation
    from sortedrl.config.train import Lora
    from sortedrl.training.lora import add_adapters
    from sortedrl.types import TrainBatch
    from training_worlds import train_settings, trainer_of, written

    model = tiny_model("qwen3", std=0.3).to(torch.bfloat16)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    batch = TrainBatch(0, tuple(written(tiny_model("qwen3", std=0.3), (5, 9, 4, 7))))
    if lora_rank is not None:
        add_adapters(model, Lora(rank=lora_rank), seed=0)
    trainer = trainer_of(
        model,
        train_settings(
            optimiser=Optimisation(learning_rate=0.01, state=state),
            algorithm=Algorithm(name="reinforce_pp"),
        ),
    )
    trainer.update(batch)
    found = []
    save(tmp_path / "before", lambda at: found.append(trainer.save(at, tokenizer=Silent())))
    snapshot = trainer.snapshot(tokenizer=Silent())
    trainer.update(batch)
    save(tmp_path / "later", lambda at: found.append(snapshot(at)))
    assert found[0] == found[1]
    assert inspect(tmp_path / "before").keys() == inspect(tmp_path / "later").keys()
    for path in (tmp_path / "before").rglob("*.safetensors"):
        one, other = (
            load_file(p) for p in (path, tmp_path / "later" / path.relative_to(tmp_path / "before"))
        )
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one), path.name
    now = trainer.tensors()["optimiser"]
    assert not all(
        now[n].equal(t) for n, t in load_file(tmp_path / "later/optimiser.safetensors").items()
    )


def test_a_snapshot_is_written_without_a_change_of_the_default_dtype_that_threads_share(
    tmp_path, monkeypatch
):
    from native_worlds import tiny_model
    from sharded_worlds import Silent
    from sortedrl.config.train import Lora
    from sortedrl.training.lora import add_adapters
    from training_worlds import train_settings, trainer_of

    model = tiny_model("qwen3", std=0.3).to(torch.bfloat16)
    add_adapters(model, Lora(rank=2), seed=0)
    snapshot = trainer_of(model, train_settings()).snapshot(tokenizer=Silent())
    changes = []
    monkeypatch.setattr(torch, "set_default_dtype", changes.append)
    save(tmp_path / "later", snapshot)
    assert not changes
    assert (tmp_path / "later/model/config.json").exists()


def test_without_room_for_a_copy_there_is_no_snapshot(monkeypatch):
    from native_worlds import tiny_model
    from sharded_worlds import Silent
    from sortedrl.training import trainer as trainer_module
    from training_worlds import train_settings, trainer_of

    trainer = trainer_of(tiny_model(std=0.3), train_settings())
    assert trainer.snapshot(tokenizer=Silent()) is not None
    monkeypatch.setattr(trainer_module, "free_main_memory", lambda: 1000)
    assert trainer.snapshot(tokenizer=Silent()) is None


def in_a_fork(work):
    """Run some work in a process of its own; gives its id."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return process


def is_killed(process):
    end = os.waitpid(process, 0)[1]
    assert os.WIFSIGNALED(end) or os.WEXITSTATUS(end) == 0
    return os.WIFSIGNALED(end)


def die_at_operation(number):
    """Let the kernel kill this process as it is about to change the file system that often."""
    changes = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
    count = 0

    def hook(event, details):
        nonlocal count
        if event in changes or (event == "open" and "w" in (details[1] or "")):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_at_every_operation(folder, update, *, is_later):
    """Kill a save before each of its changes to the file system; say what is found afterwards."""
    whole = folder / f"whole-{update}"
    checkpoints_in(whole).save(1, writer(1), score=0.0)
    checkpoints_in(whole).save(2, writer(2), score=1.0)
    for number in itertools.count(1):
        run = folder / f"run-{update}-{number}"
        shutil.copytree(whole, run)
        checkpoints = checkpoints_in(run, keep_last=1)

        def work(number=number, checkpoints=checkpoints):
            die_at_operation(number)
            save = checkpoints.save_later if is_later else checkpoints.save
            save(update, writer(update + 10), score=2.0)
            checkpoints.finish()

        was_killed = is_killed(in_a_fork(work))
        newest = checkpoints.newest()
        found = newest and [newest.name, read_state(newest)["update"]]
        checkpoints.save(update, writer(update))
        whole_ones = [path.name for path in checkpoints.complete()]
        report = {"update": update, "found": found, "left": names(run), "whole": whole_ones}
        print(json.dumps(report))  # noqa: T201
        if not was_killed:
            break


def killed_at_random_instants(folder, *, is_later):
    """Kill a process that saves one checkpoint after the other; say what it had said and left."""
    random = Random(0)
    for number in range(8):
        run = folder / f"run-{number}"
        checkpoints = checkpoints_in(run, keep_last=2)
        checkpoints.save(0, writer(0))
        said = run / "said"
        said.write_text("")

        def work(checkpoints=checkpoints, said=said):
            for update in range(1, 1000):
                if is_later:
                    checkpoints.save_later(update, writer(update, num_bytes=3_000_000))
                    checkpoints.finish()
                else:
                    checkpoints.save(update, writer(update, num_bytes=3_000_000))
                with said.open("a") as file:
                    file.write("x")

        process = in_a_fork(work)
        deadline = time.monotonic() + 20
        while not any(run.glob("*.partial")) and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(random.choice([0, random.uniform(0, 0.05)]))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        left = names(run)
        newest = checkpoints.newest()
        found = newest and read_state(newest)["update"]
        report = {"said": len(said.read_text()), "found": found, "left": left}
        print(json.dumps(report))  # noqa: T201
        shutil.rmtree(run)


def reports_of(call):
    """What a function of this file prints in a process of its own, line by line."""
    # What a killed process has written stays with the kernel, so no need to wait for the disk.
    done = run_program(f"import os; os.fsync = id; import test_training_checkpoint as t; {call}")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


IS_LATER = pytest.mark.parametrize("is_later", [False, True])


@IS_LATER
def test_a_save_killed_at_any_operation_leaves_a_whole_checkpoint(tmp_path, is_later):
    arguments = f"t.Path({str(tmp_path)!r}), u, is_later={is_later}"
    reports = reports_of(f"[t.killed_at_every_operation({arguments}) for u in (1, 2, 3)]")
    for update in (1, 2, 3):
        own = [report for report in reports if report["update"] == update]
        assert len(own) > 20
        found = [report["found"] for report in own]
        new = [f"update-{update:06d}", update + 10]
        switch = found.index(new)
        assert found == [["update-000002", 2]] * switch + [new] * (len(own) - switch)
        for report in own:
            assert new[0] in report["whole"]
            left = {name.removesuffix(".abandoned") for name in report["left"]}
            assert left - {"update-000002"} <= set(report["whole"]), "no halves, no leftovers"


@IS_LATER
def test_a_run_killed_at_random_instants_of_saving_resumes_from_its_last_word(tmp_path, is_later):
    arguments = f"t.Path({str(tmp_path)!r}), is_later={is_later}"
    reports = reports_of(f"t.killed_at_random_instants({arguments})")
    assert len(reports) == 8
    for report in reports:
        assert report["found"] - report["said"] in (0, 1)
    assert any(name.endswith(".partial") for report in reports for name in report["left"])
