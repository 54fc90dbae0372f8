"""The name by which vLLM finds our part of its workers; the part itself needs torch."""

RECEIVER = "sortedrl.engines.vllm.worker.WeightReceiver"
