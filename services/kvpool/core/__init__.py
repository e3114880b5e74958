"""The pool's decisions, pure: messages and time in, answers and effects out."""
