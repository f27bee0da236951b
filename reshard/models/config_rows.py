"""Rows of a family's `config`, `refused` and `equal` tables, read into records.

The columns are explained in `reshard.models.family.Family`.
"""

from dataclasses import dataclass
from typing import Any

from reshard.core.errors import ReshardError
from reshard.models.config_fields import number, whole_number

# In place of a default: a config without the field is refused. The second is a number that may have a point.
NEEDED, NEEDED_AMOUNT = "needed", "needed, an amount"


@dataclass(frozen=True)
class ConfigRow:
    """A config field, and the argument of Megatron's that it becomes: equal to it, or ``not`` it."""

    field: str
    aliases: tuple[str, ...]  # other spellings of the field, as configs have them
    argument: str
    relation: str
    default: Any  # a value, the name of another field, or the quotient of two such as "hidden_size/heads"
    needed: bool
    amount: bool  # a number with a point, and no whole number

    @staticmethod
    def of(row: tuple[str, str, str, Any]) -> "ConfigRow":
        """Read a row of a table."""
        spellings, argument, relation, default = row
        field, *aliases = spellings.split("|")
        needed = default in (NEEDED, NEEDED_AMOUNT)
        amount = isinstance(default, float) or default == NEEDED_AMOUNT
        default = None if needed else default
        return ConfigRow(field, tuple(aliases), argument, relation, default, needed, amount)

    @property
    def spellings(self) -> tuple[str, ...]:
        """The names of the field in configs, its own first."""
        return (self.field, *self.aliases)

    def value_where_absent(self, config: dict[str, Any], where: str) -> Any:
        """Return the field's value in a config that lacks it. Raises ReshardError for a field that is
        needed."""
        if self.needed:
            model = config.get("architectures", ["this model"])[0]
            raise ReshardError(f"{where} has no field {self.field}, which {model} needs")
        if not isinstance(self.default, str):
            return self.default
        dividend, _, divisor = self.default.partition("/")
        return config[dividend] // config[divisor] if divisor else config[dividend]

    def check_value(self, value: Any, where: str) -> None:
        """Raise ReshardError for a value, other than None, that is not of the field's kind: a
        switch, an amount, or else a whole number."""
        if value is None:
            return
        if isinstance(self.default, bool):
            good, kind = isinstance(value, bool), "true or false"
        elif self.amount:
            good, kind = number(value) and value >= 0, "a number of at least 0"
        else:
            least = 0 if self.default == 0 else 1
            good, kind = whole_number(value, least), "a positive whole number" if least else "a whole number"
        if not good:
            raise ReshardError(f"{where}: {self.field} is {value!r:.80}, which is not {kind}")


@dataclass(frozen=True)
class Refusal:
    """A field that may have these values only."""

    field: str
    values: tuple[Any, ...]
    reason: str

    @property
    def fields(self) -> tuple[str, ...]:
        """The config fields that it reads."""
        return (self.field,)

    def sentence(self, config: dict[str, Any]) -> str:
        """Return what is wrong with a config; empty if nothing is."""
        value = config.get(self.field, self.values[0])  # null is a value: transformers takes it for one
        if value in self.values:
            return ""
        return f"{self.field} = {value!s:.80} cannot be held by Megatron: {self.reason}"


@dataclass(frozen=True)
class Equality:
    """A field that, where it is there, has to equal another, or a sum such as ``a + b``."""

    field: str
    total: str
    reason: str

    @property
    def fields(self) -> tuple[str, ...]:
        """The config fields that it reads."""
        return (self.field, *self.total.split(" + "))

    def sentence(self, config: dict[str, Any]) -> str:
        """Return what is wrong with a config; empty if nothing is."""
        _, *terms = self.fields
        total = sum(config.get(term) or 0 for term in terms)
        if self.field not in config or config[self.field] == total:
            return ""
        value = config[self.field]
        return f"{self.field} is {value!s:.80} and {self.total} is {total}, which have to be equal: {self.reason}"
