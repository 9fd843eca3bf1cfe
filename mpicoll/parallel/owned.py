"""What owns a communicator: `with` frees it at the end of the block."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

_Self = TypeVar("_Self", bound="Owner")


class Owner:
    """Base of what holds a duplicate of a communicator until `free`, which is collective."""

    def free(self) -> None:
        """Free the duplicate of the communicator; collective."""
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free; after an error not, since the other ranks may be elsewhere."""
        if error is None:
            self.free()
