"""The trainer over several processes (FSDP2), each with a shard of every weight.

ranks       the processes, their collective operations, and the answers of each
model       a sharded model, of which each rank reads its rows; whole tensors by buckets
trainer     the update over all ranks
checkpoint  full checkpoints as one process writes them, or the files of every rank
"""
