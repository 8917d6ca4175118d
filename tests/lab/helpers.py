"""A small corpus and a progress object that records messages."""

import json

from bertsmith.progress import NullProgress

#: Two documents with two sentences each, as JSON lines.
TWO_DOCUMENTS = "\n".join(
    json.dumps({"text": f"the {word} sat. it ran."}) for word in ("cat", "dog")
)


class RecordingProgress(NullProgress):
    """Ignores progress and records messages.

    Attributes:
        messages: The messages in order.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []

    def log(self, text: str) -> None:
        """Add a message to ``messages``."""
        self.messages.append(text)
