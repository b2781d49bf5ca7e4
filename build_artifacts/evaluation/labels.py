"""What a file calls a label, and which of the model's labels it is."""

from __future__ import annotations

from build_artifacts.evaluation.files import Record, as_index, shorten


class ModelLabels:
    """The labels of one model, found by name, else by id."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._exact = {name: i for i, name in enumerate(names)}
        self._folded = {name.casefold(): i for i, name in enumerate(names)}

    def find(self, value: object) -> int | None:
        """The label's id; None when the model has no such label.

        Names go before ids, because a label may be called `1`.
        """
        if isinstance(value, str):
            name = value.strip()
            found = self._exact.get(name, self._folded.get(name.casefold()))
            if found is not None or not (name.isascii() and name.isdigit()):
                return found
            # Longer ones are no ids, and Python refuses to read thousands of digits.
            value = int(name) if len(name) < 10 else None
        return as_index(value, len(self.names))

    def index(self, value: object, record: Record, field: str) -> int:
        """The label's id. Raises BadEvaluationData."""
        found = self.find(value)
        if found is None:
            known = ", ".join(f"`{name}`" for name in self.names[:10])
            more = ", …" if len(self.names) > 10 else ""
            raise record.data_error(
                f"the model has no label `{shorten(value)}`; it has {known}{more}", field
            )
        return found
