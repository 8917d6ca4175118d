"""A tiny corpus and a recorder of log messages."""

import json

from bertsmith.progress import NullProgress

#: Two documents with two sentences each, as JSON lines.
TWO_DOCUMENTS = "\n".join(
    json.dumps({"text": f"the {word} sat. it ran."}) for word in ("cat", "dog")
)


class RecordingProgress(NullProgress):
    """Records log messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def log(self, text: str) -> None:
        """Record a message."""
        self.messages.append(text)
