"""The same protocols over Ray: engines and trainer in other processes and on other machines.

connection     a Ray of our own, or one that runs already
nodes          the machines, and what is free on them
placement      which resources each worker and each rank of the trainer gets
recipe         how an engine is made inside a worker
worker         the actor: drives one engine
worker_log     where its words go
remote_engine  the controller's side of one worker: an engine
fleet          all workers behind one engine; new ones join during a run
elastic        that engine, mended and grown between two rounds
trainer_rank   the actor of one rank of the trainer
remote_trainer the controller's side of all ranks: the trainer of a run

Weights on their way from ranks to workers:

weight_source  who has them, and can send, put or write them
hand_over      all hand-overs of a run, one way after another until all workers have them
shipment       what one of them moved, and how long it took
meetings       where sender and workers meet; keys of their groups
bridge         the process group between them
sending        the broadcast, beside what the workers do
offer          what a worker is offered, and how it takes it
flat           a bucket as one row of bytes
buckets        tensors as parts of a bounded size

probe, check   is the cluster what the run needs?
"""
