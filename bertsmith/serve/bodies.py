"""What each endpoint is sent: strict about names, so that a slip is told and not left out.

It never answers.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bertsmith.serve.bounds import TOP
from bertsmith.use.vectors import VectorSettings, settings_of

Texts = Annotated[list[str], Field(min_length=1)]
#: One text or several.
Inputs = str | Texts
Name = Annotated[str | None, Field(description="Which model; the first that can, if not given.")]


class Body(BaseModel):
    """What all bodies have: the model's name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    model: Name = None


class Vectors(Body):
    """How vectors are made; see ``VectorSettings``."""

    inputs: Inputs
    layer: int | Annotated[list[int], Field(min_length=1)] | None = None
    combine: Literal["concat", "mean", "weighted"] = "concat"
    weights: list[float] = []
    special: bool = True
    truncate: Annotated[
        bool, Field(description="Cut a text that is too long, rather than refuse it.")
    ] = True

    def settings(self, **more: Any) -> VectorSettings:
        """Return the settings that are asked for. Raises SettingsError."""
        return settings_of(
            self.layer, combine=self.combine, weights=self.weights, special=self.special, **more
        )


class EmbedBody(Vectors):
    """POST /embed."""

    pooling: str | None = None
    normalize: bool | None = True


class OpenAiBody(BaseModel):
    """POST /v1/embeddings, as OpenAI's clients send it. Other fields of theirs are not read."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    input: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class Compared(BaseModel):
    """One sentence, and those it is compared with."""

    model_config = ConfigDict(extra="forbid")
    source_sentence: str
    sentences: Texts


class SimilarityBody(Body):
    """POST /similarity."""

    inputs: Compared


class TokenizeBody(Body):
    """POST /tokenize."""

    inputs: Inputs
    add_special_tokens: bool = True


class FillBody(Body):
    """POST /fill."""

    inputs: Inputs
    top: Annotated[int, Field(ge=1, le=TOP)] = 5


class PairBody(Body):
    """POST /pair: [A, B], or several of them."""

    inputs: tuple[str, str] | Annotated[list[tuple[str, str]], Field(min_length=1)]


class ClassifyBody(Body):
    """POST /classify: a text or several; each may be a pair [A, B]."""

    inputs: str | Annotated[list[str | tuple[str, str]], Field(min_length=1)]


class TagBody(Body):
    """POST /tag."""

    inputs: Inputs


class Asked(BaseModel):
    """A question and its context."""

    model_config = ConfigDict(extra="forbid")
    question: str
    context: str


class AnswerBody(Body):
    """POST /answer."""

    inputs: Asked | Annotated[list[Asked], Field(min_length=1)]


class Prompt(BaseModel):
    """A prompt and its endings."""

    model_config = ConfigDict(extra="forbid")
    prompt: str
    endings: Annotated[list[str], Field(min_length=2)]


class ChooseBody(Body):
    """POST /choose."""

    inputs: Prompt | Annotated[list[Prompt], Field(min_length=1)]
