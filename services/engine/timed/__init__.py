"""An engine that takes the time of a model without being one: real queues, real blocks, made-up arithmetic."""
