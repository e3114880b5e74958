"""How NATS compares a subject with a pattern."""


def matches(pattern: str, subject: str) -> bool:
    """Whether `pattern` (`*` one token, `>` at its end one or more) covers `subject`; `subject` may hold wildcards,
    then every subject that it covers must be covered."""
    wanted, given = pattern.split("."), subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(given) > place
        if place >= len(given) or (token != "*" and token != given[place]) or given[place] == ">":
            return False
    return len(wanted) == len(given)
