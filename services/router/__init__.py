"""The router: HTTP in front, NATS behind; who serves a request, when it is tried again, and what the client is told."""
