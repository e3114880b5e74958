"""What a recorded request waits for."""

from services.btrace import ContextRecipe, Dependency, Operation, Row


def row(dependencies: list[Dependency], base: str | None) -> Row:
    return Row(
        request_id="p/1#0",
        play_id="p",
        session_id="p/1",
        input_length=64,
        output_length=1,
        dependencies=dependencies,
        ctx=ContextRecipe(keep=1, add=[], base=base),
        op=Operation.FORK,
    )


def test_where_no_dependency_is_recorded_the_base_of_the_context_is_one() -> None:
    after = [Dependency("p/0#0", 250.0)]
    assert row(after, "p/0#1").starts_after == after
    assert row([], "p/0#1").starts_after == [Dependency("p/0#1", 0.0)]
    assert row([], None).starts_after == []
