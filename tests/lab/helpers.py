"""What tests give an experiment: two documents to read, and someone who hears what it says.

It never knows what is tested.
"""

import json

from bertsmith.progress import NullProgress

#: Two documents of two sentences, as JSON lines.
TWO_DOCUMENTS = "\n".join(
    json.dumps({"text": f"the {word} sat. it ran."}) for word in ("cat", "dog")
)


class RecordingProgress(NullProgress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def log(self, text: str) -> None:
        """Keep it."""
        self.messages.append(text)
