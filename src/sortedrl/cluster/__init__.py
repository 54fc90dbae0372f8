"""The same protocols over Ray: rollout workers in other processes and on other machines.

connection     a Ray of our own, or one that runs already
nodes          the machines, and what is free on them
placement      which resources each worker and each rank of the trainer gets
recipe         how an engine is made inside a worker
worker         the actor: drives one engine
worker_log     where its words go
buckets        tensors as bytes, in parts
hand_over      weights put into the object store once, and fetched by every worker
remote_engine  the controller's side of one worker: an engine
fleet          all workers behind one engine; new ones join during a run
probe, check   is the cluster what the run needs?
"""
