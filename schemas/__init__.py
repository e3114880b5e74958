"""The contract on the wire: every message, subject and key that crosses a process. Imports nothing of ours."""
