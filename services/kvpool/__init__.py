"""The KV pool of one node: its arena in shared memory, who may read and write it, and what comes from peers."""
