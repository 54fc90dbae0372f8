"""The trainer over several processes, each with a part of every weight.

ranks       the processes, and what they do together
shares      which answers each of them goes through
model       a model of which every process has a part
trainer     the update that they make together
weights     whole tensors, a bucket at a time
shards      one file per process, and who has what
checkpoint  the files that one process writes, or shards
"""
