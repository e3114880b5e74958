"""The router decides here: identity, admission, placement, load, and the life of a request. Pure."""
