"""What tests give an experiment: two documents to read, and someone who hears what it says.

It never knows what is tested.
"""

import json

from bertsmith.progress import Silent

#: Two documents of two sentences, as JSON lines.
LINES = "\n".join(json.dumps({"text": f"the {word} sat. it ran."}) for word in ("cat", "dog"))


class Heard(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        """Keep it."""
        self.said.append(text)
