"""The trainer over several processes (FSDP2), each with a shard of every weight.

ranks       the processes, what they do together, and which answers each of them passes over
model       a model of which every rank has a shard; whole tensors, a bucket at a time
trainer     the update that they make together
checkpoint  full checkpoints as one process writes them, or one file per rank
"""
