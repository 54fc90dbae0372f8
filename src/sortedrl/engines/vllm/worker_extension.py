"""A worker extension of vLLM that loads weights bucket by bucket, in every shard of the model.

    begin_weights -> receive_weights or read_weights, once for each bucket -> finish_weights

On a GPU a tensor is sent by its address, so nothing is copied on the way. The sender keeps its
tensors unchanged until all shards have replied. Elsewhere a bucket is a safetensors file. Each
shard takes its own part of a tensor. vLLM imports the extension by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sortedrl.models.shared_memory import Address, tensors_at


class WeightReceiver:
    """A mixin of vLLM's worker."""

    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def begin_weights(self) -> None:
        """Make the model ready for new weights; all of them must come before the next request."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with self._context():
            initialize_layerwise_reload(self._model)

    def receive_weights(self, given: Sequence[Address]) -> None:
        """Load the tensors at these addresses."""
        # vLLM keeps a tensor until its layer is complete, which may be in a later bucket.
        self._load((name, tensor.clone()) for name, tensor in tensors_at(given))
        # The sender may change its tensors as soon as this returns.
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def read_weights(self, path: str) -> None:
        """Load the tensors of a safetensors file."""
        from safetensors.torch import load_file

        self._load(iter(load_file(path).items()))

    def finish_weights(self) -> None:
        """Have every layer compute with its new weights."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._context():
            finalize_layerwise_reload(self._model, self.vllm_config.model_config)
        self._renew_tied_output()

    def reload_folder(self, folder: str) -> None:
        """Load the weights of a folder, all at once."""
        self.reload_weights(weights_path=folder)
        self._renew_tied_output()

    @property
    def _model(self) -> Any:  # noqa: ANN401
        return self.model_runner.model

    @contextmanager
    def _context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            yield

    def _load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        with self._context():
            self._model.load_weights(tensors)

    def _renew_tied_output(self) -> None:
        # On a CPU every layer computes with a packed copy of its weights. vLLM does not renew that
        # of an output layer which is tied to the embedding.
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self._model.modules():
            if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
                module.quant_method.process_weights_after_loading(module)


RECEIVER = "sortedrl.engines.vllm.worker_extension.WeightReceiver"
