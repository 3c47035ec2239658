"""The facts of a run beside its arrays, and what a checkpoint must say for a run to go on from it."""

from typing import Any

WHOLE_NUMBERS_END = 2**63  # what TensorFlow's integers hold
SIZES = ("num_examples", "batch_size", "num_shards")


def check_facts(facts: dict[str, Any]) -> None:
    """Checks what the loops and the evaluator will look up; what else there is may be of a later version.

    Raises:
        ValueError: names the first that is missing or of another kind.
    """
    _require("examples", is_whole(facts.get("examples")))
    _require("target_step", is_whole(facts.get("target_step", 0)))  # the first checkpoints did not have it
    given = _section("input", facts.get("input"))
    sharding = _section("input.sharding", given.get("sharding"))
    for name in SIZES:
        _require(f"input.sharding.{name}", is_whole(sharding.get(name)) and sharding[name] > 0)
    positions = given.get("positions")
    _require("input.positions", _are_whole(positions) and len(positions or []) == sharding["num_shards"])
    _require("local_steps", _are_whole(facts.get("local_steps", [])))
    for name in ("mode", "data"):
        _require(name, isinstance(facts.get(name, ""), str))


def is_whole(value: Any) -> bool:
    """Whether it can count something; True cannot, although Python takes it for 1."""
    return type(value) is int and 0 <= value < WHOLE_NUMBERS_END


def _are_whole(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_whole, values))


def _section(name: str, value: Any) -> dict[str, Any]:
    _require(name, isinstance(value, dict))
    found: dict[str, Any] = value
    return found


def _require(name: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"does not say what it must ({name})")
