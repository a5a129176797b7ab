"""What the functions that switch a drop-in on return."""


class Switch:
    """Undoes a change at `disable()` or at the end of a `with` block, once."""

    def __init__(self, undo):
        self._undo = undo

    def disable(self):
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.disable()
