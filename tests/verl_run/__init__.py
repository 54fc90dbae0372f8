"""verl on the CPU: its own loop, queue and agent loops, with servers and updates that cost nothing.

Real: `fit`, `step`, data loader, ReplayBuffer, TransferQueue, AgentLoopManagerTQ and its workers,
LLM client, load balancer, reward loop workers, Ray.
Stand-ins: the servers (no GPU), the worker group (no FSDP), and the update, which only takes note.
"""
