"""What `make run` plays."""
