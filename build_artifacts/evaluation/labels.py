"""Mapping of label names and ids in files to the labels of a model."""

from __future__ import annotations

from build_artifacts.evaluation.files import Record, as_index, shorten


class LabelIndex:
    """Labels of one model, looked up by exact name, then by name without case, then by id."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._exact = {name: i for i, name in enumerate(names)}
        self._folded = {name.casefold(): i for i, name in enumerate(names)}

    def find(self, value: object) -> int | None:
        """Return the label's id, or None if the model has no such label.

        Names take precedence over ids, because a label may be named `1`.
        """
        if isinstance(value, str):
            name = value.strip()
            index = self._exact.get(name, self._folded.get(name.casefold()))
            if index is not None or not (name.isascii() and name.isdigit()):
                return index
            # No id has ten digits, and Python rejects integers of more than 4300 digits.
            value = int(name) if len(name) < 10 else None
        return as_index(value, len(self.names))

    def index(self, value: object, record: Record, field: str) -> int:
        """Return the label's id. Raises BadEvaluationData if the model has no such label."""
        index = self.find(value)
        if index is None:
            known = ", ".join(f"`{name}`" for name in self.names[:10])
            more = ", …" if len(self.names) > 10 else ""
            raise record.data_error(
                f"the model has no label `{shorten(value)}`; it has {known}{more}", field
            )
        return index
