"""The engine and trainer protocols over Ray: rollout workers and trainer ranks on other machines.

connection        a local Ray, or a cluster that is already running
placement         nodes, and the resources of each worker and each rank
check             tries whether a cluster has what a run needs
worker            the actor of one rollout worker, and the thread that drives its engine
remote_engine     the controller's side of one worker: an engine
worker_pool       all workers as one engine; replaces lost ones, adds new ones
remote_trainer    the actor of one trainer rank, and all ranks as the trainer of a run
weight_sync       pushes each new version from the trainer to all workers
weight_transport  the three transports: broadcast, object store, disk
broadcast         senders and receivers of buckets: which worker gets them in which channel
channels          a broadcast over NCCL or gloo, or buffers that workers on the same GPU read
buckets           tensors as buckets of bytes
"""
