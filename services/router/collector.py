"""Python's garbage collector, kept from walking what open streams hold again and again: with a thousand of them a full
collection takes a tenth of a second, in which no token is passed on."""

import gc

YOUNG, MIDDLE, OLD = 10_000, 20, 5
"""Objects added before a collection of the youngest, such collections before one of the middle, and those before a full
one. A stream that ends frees nearly all it had by reference counts; what is left in cycles waits for the collector."""


def collect_rarely() -> None:
    """To be called once, by the process, when all modules are there: they are not walked again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
