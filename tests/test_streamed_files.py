"""Weights on their way to another process: whole, once, and gone in the end."""

import pytest
import torch
from safetensors.torch import load_file

from sortedrl.engines.streaming.weight_files import export_weights, remove_exported
from sortedrl.errors import EngineError
from sortedrl.types import Weights


def weights(version, value):
    tied = torch.full((2, 3), float(value))
    return Weights(version, {"embed": tied, "head": tied, "turned": tied.T})


def test_a_version_is_written_whole_and_the_one_before_it_is_gone(tmp_path):
    first = export_weights(weights(1, 1), tmp_path)
    second = export_weights(weights(2, 2), tmp_path)
    assert sorted(tmp_path.iterdir()) == [second]
    assert first != second
    found = load_file(second / "model.safetensors")
    assert torch.equal(found["embed"], torch.full((2, 3), 2.0))


def test_the_same_version_can_be_written_again(tmp_path):
    export_weights(weights(1, 1), tmp_path)
    again = export_weights(weights(1, 5), tmp_path)
    assert load_file(again / "model.safetensors")["embed"][0, 0] == 5


def test_tied_tensors_are_written_once(tmp_path):
    found = load_file(export_weights(weights(1, 1), tmp_path) / "model.safetensors")
    assert found.keys() == {"embed", "turned"}
    assert found["turned"].shape == (3, 2)


def test_a_folder_that_cannot_be_written_is_refused_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="every engine must be able to read it"):
        export_weights(weights(1, 1), tmp_path / "file")


def test_only_what_was_written_is_removed(tmp_path):
    folder = tmp_path / "hand_over"
    export_weights(weights(1, 1), folder)
    (tmp_path / "other").write_text("")
    remove_exported(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    export_weights(weights(1, 1), tmp_path)
    remove_exported(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
