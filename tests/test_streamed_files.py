"""Weights on their way to another process: whole, once, and gone in the end."""

import pytest
import torch
from safetensors.torch import load_file

from sortedrl.engines.streaming.weights import remove_weights, write_weights
from sortedrl.errors import EngineError
from sortedrl.types import Weights


def weights(version, value):
    tied = torch.full((2, 3), float(value))
    return Weights(version, {"embed": tied, "head": tied, "turned": tied.T})


def test_a_version_is_written_whole_and_the_one_before_it_is_gone(tmp_path):
    first = write_weights(weights(1, 1), tmp_path)
    second = write_weights(weights(2, 2), tmp_path)
    assert sorted(tmp_path.iterdir()) == [second]
    assert first != second
    found = load_file(second / "model.safetensors")
    assert torch.equal(found["embed"], torch.full((2, 3), 2.0))


def test_the_same_version_can_be_written_again(tmp_path):
    write_weights(weights(1, 1), tmp_path)
    again = write_weights(weights(1, 5), tmp_path)
    assert load_file(again / "model.safetensors")["embed"][0, 0] == 5


def test_tied_tensors_are_written_once(tmp_path):
    found = load_file(write_weights(weights(1, 1), tmp_path) / "model.safetensors")
    assert found.keys() == {"embed", "turned"}
    assert found["turned"].shape == (3, 2)


def test_a_folder_that_cannot_be_written_is_refused_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="every engine must be able to read it"):
        write_weights(weights(1, 1), tmp_path / "file")


def test_only_what_was_written_is_removed(tmp_path):
    folder = tmp_path / "hand_over"
    write_weights(weights(1, 1), folder)
    (tmp_path / "other").write_text("")
    remove_weights(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    write_weights(weights(1, 1), tmp_path)
    remove_weights(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
