"""Conversations: environments that answer the policy, in worker processes."""
